"""Blobs: stored whole or not at all, fetched from several peers, verified, resumed; liars are found."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from swarm_harness import RUN, StartTransport, eventually

from spesd.swarm import chunks
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.blobs import BlobExchange
from spesd.swarm.chunks import CHUNK_BYTES, chunk_hash
from spesd.swarm.errors import BlobMissing, BlobUnavailable, PeerRefused, Refused
from spesd.swarm.rate import BURST_BYTES
from spesd.swarm.streams import Reply
from spesd.swarm.transport import Transport, protocol_name

CHUNKS = 25
SHARED = CHUNKS - 8  # of these two equally fast sources send half each; the last ones go to whoever is free
DATA = os.urandom((CHUNKS - 1) * CHUNK_BYTES + 12345)
HASH = blake3(DATA).hexdigest()
BLOB = protocol_name(RUN, "blob")

Before = Callable[[dict[str, Any]], Reply | None]
"""Sees each request, and may answer it otherwise."""


def test_a_blob_comes_back_and_can_be_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    (tmp_path / "file").write_bytes(DATA)
    assert store.put_file(tmp_path / "file") == store.put(DATA) == HASH
    assert store.get(HASH) == DATA and store.size(HASH) == len(DATA) and list(store) == [HASH]
    with store.open(HASH) as file:
        assert file.read() == DATA
    store.remove(HASH)
    assert not store.has(HASH)
    for read in (store.get, store.open, store.size):
        with pytest.raises(BlobMissing, match=HASH):
            read(HASH)
    for name in ("../../etc/passwd", "", HASH.upper(), HASH + "0"):
        with pytest.raises(ValueError, match="not a hex blake3 hash"):
            store.path(name)


def test_a_damaged_blob_is_removed_and_missing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    for read in (store.get, store.open):
        store.put(DATA)
        store.path(HASH).write_bytes(DATA[:-1])
        with pytest.raises(BlobMissing, match="damaged"):
            read(HASH)
        assert not store.has(HASH)


def test_a_write_that_fails_or_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.put(DATA, durable=True)
    assert list(store) == [] and list((tmp_path / "temporary").iterdir()) == []
    (tmp_path / "temporary" / "of a killed process").write_bytes(b"half")
    assert list(BlobStore(tmp_path)) == [] and list((tmp_path / "temporary").iterdir()) == []


class Peer:
    """A transport with a store, and a count of the chunks that it was asked for, by offset."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport = transport
        self.store = BlobStore(folder)
        self.exchange = BlobExchange(transport, self.store, RUN)
        self.id = transport.peer_id
        self.asked: Counter[int] = Counter()
        self.before: Before = lambda body: None

    @classmethod
    async def start(cls, start_transport: StartTransport, folder: Path, data: bytes = b"") -> Peer:
        peer = cls(await start_transport(), folder)
        if data:
            peer.store.put(data)
        await peer.transport.serve(BLOB, peer.answer)
        return peer

    async def answer(self, caller: str, body: dict[str, Any], payload: bytes) -> Reply:
        if "offset" in body:
            self.asked[body["offset"]] += 1
        return self.before(body) or await self.exchange._server.answer(caller, body, payload)

    def lie(self, data: bytes) -> None:
        """Serve `data` under every name, with a chunk list that fits it."""

        def before(body: dict[str, Any]) -> Reply:
            if "offset" not in body:
                pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
                return Reply({"size": len(data)}, b"".join(map(chunk_hash, pieces)))
            return Reply({}, data[body["offset"] :][: body["length"]])

        self.before = before


def with_wrong_chunk(index: int) -> bytes:
    return DATA[: index * CHUNK_BYTES] + b"wrong" + DATA[index * CHUNK_BYTES + 5 :]


async def fetch(me: Peer, *sources: Peer, timeout: float = 60, **options: Any) -> None:
    await me.exchange.fetch(HASH, [source.id for source in sources], timeout=timeout, size=len(DATA), **options)
    assert me.store.get(HASH) == DATA
    assert not me.store.partial_path(HASH).exists()


async def test_two_sources_share_the_work_and_no_chunk_comes_twice(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    sources = [await Peer.start(start_transport, tmp_path / name, DATA) for name in ("one", "other")]
    gate = asyncio.Barrier(2)

    async def slowly(caller: str, body: dict[str, Any], payload: bytes, peer: Peer) -> Reply:
        """Both sources are equally fast: each waits for the other before it answers."""
        if "offset" in body and sum(map(len, (source.asked for source in sources))) < SHARED:
            async with asyncio.timeout(10):
                await gate.wait()
        return await peer.answer(caller, body, payload)

    for peer in sources:
        await peer.transport.serve(BLOB, lambda *request, peer=peer: slowly(*request, peer))
    await fetch(me, *sources)
    counts = [source.asked.total() for source in sources]
    assert sum(counts) == CHUNKS and min(counts) >= SHARED // 2
    assert me.transport.traffic.total.down < len(DATA) + 20_000


async def test_one_source_lying_one_dying(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    liar = await Peer.start(start_transport, tmp_path / "liar", DATA)
    dying = await Peer.start(start_transport, tmp_path / "dying", DATA)

    def send_rubbish(body: dict[str, Any]) -> Reply | None:
        return Reply({}, bytes(body["length"])) if "offset" in body else None

    def die(body: dict[str, Any]) -> None:
        if dying.asked.total() == 3:
            os.kill(dying.transport.p2pd_pid, signal.SIGKILL)

    liar.before, dying.before = send_rubbish, die
    await fetch(me, dying, liar, good)
    assert me.exchange.liars == {liar.id}


async def test_a_false_chunk_list_is_found_out_and_costs_only_the_chunks_that_differ(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    liars = [await Peer.start(start_transport, tmp_path / f"liar {number}", DATA) for number in range(2)]
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    for liar in liars:
        liar.lie(with_wrong_chunk(2))
    await fetch(me, *liars, good)  # the liars are in the majority
    assert me.exchange.liars == {liar.id for liar in liars}
    assert good.asked == {2 * CHUNK_BYTES: 1}
    assert me.transport.traffic.total.down < len(DATA) + CHUNK_BYTES + 20_000
    me.store.remove(HASH)
    await fetch(me, *liars, good)  # who is known for a lie is not believed before others
    assert me.transport.traffic.total.down < 2 * len(DATA) + CHUNK_BYTES + 40_000


async def test_a_lone_liar_is_named(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    liar = await Peer.start(start_transport, tmp_path / "liar")
    liar.lie(with_wrong_chunk(2))
    empty = await Peer.start(start_transport, tmp_path / "empty")
    with pytest.raises(BlobUnavailable, match="no source delivered it") as caught:
        await me.exchange.fetch(HASH, [liar.id, empty.id], timeout=60)
    assert "another hash" in caught.value.reasons[liar.id] and "not-found" in caught.value.reasons[empty.id]
    assert not me.store.has(HASH) and me.exchange.liars == {liar.id}


async def test_lies_about_the_size_are_survived(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    longer = await Peer.start(start_transport, tmp_path / "longer")
    longer.lie(DATA + b"more")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    with pytest.raises(BlobUnavailable, match=f"exactly {len(DATA)}"):
        await fetch(me, longer)
    with pytest.raises(BlobUnavailable, match="another hash"):
        await me.exchange.fetch(HASH, [longer.id], timeout=60)
    assert me.exchange.liars == {longer.id}
    await me.exchange.fetch(HASH, [longer.id, good.id], timeout=60)
    assert me.store.get(HASH) == DATA
    me.store.remove(HASH)
    for most, complaint in ((len(DATA) - 1, f"at most {len(DATA) - 1}"), (1000, "at most 32 were asked for")):
        with pytest.raises(BlobUnavailable, match=complaint):
            await me.exchange.fetch(HASH, [good.id], timeout=60, max_size=most)


async def test_a_download_resumes_with_the_chunks_that_lack(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)

    def leave_half(body: dict[str, Any]) -> None:
        if good.asked.total() > CHUNKS // 2:
            raise Refused("not-found", "gone")

    good.before = leave_half
    with pytest.raises(BlobUnavailable, match="gone"):
        await fetch(me, good)
    good.before = lambda body: None
    first, good.asked = good.asked, Counter()
    again = Peer(me.transport, tmp_path / "me")  # a restart: nothing is known but what lies on disk
    await fetch(again, good)
    assert sum(good.asked.values()) == CHUNKS - CHUNKS // 2
    assert sum((first & good.asked).values()) == first.total() - CHUNKS // 2  # only those that were refused
    # a partial file of other bytes costs one more download, not the blob
    me.store.remove(HASH)
    me.store.partial_path(HASH).write_bytes(bytes(CHUNK_BYTES))
    await fetch(me, good)
    assert me.exchange.liars == set()


async def test_peers_that_fetch_at_once_give_their_chunks_to_each_other(
    start_transport: StartTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "HEDGE_SECONDS", 60.0)
    donor = await Peer.start(start_transport, tmp_path / "donor", DATA)
    pupils = [await Peer.start(start_transport, tmp_path / f"pupil {number}") for number in range(2)]
    given: set[int] = set()

    def give_once(body: dict[str, Any]) -> None:
        if body.get("offset") in given:
            raise Refused("busy", "ask somebody else")
        given.update({body["offset"]} if "offset" in body else ())

    donor.before = give_once
    await asyncio.gather(*(fetch(pupil, donor, *pupils) for pupil in pupils))
    assert donor.transport.traffic.total.up < 1.1 * len(DATA)


async def test_fetches_of_one_blob_share_a_download(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    await asyncio.gather(*(fetch(me, good) for _ in range(5)))
    assert me.transport.traffic.total.down < len(DATA) + 20_000


async def test_a_joined_fetch_brings_its_own_sources(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    silent = await Peer.start(start_transport, tmp_path / "silent")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)

    async def hang(*_: object) -> Reply:
        await asyncio.Event().wait()
        return Reply()

    await silent.transport.serve(BLOB, hang)
    await asyncio.gather(fetch(me, silent), fetch(me, good))


async def test_a_silent_source_is_named_at_the_deadline_and_hedged(
    start_transport: StartTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "HEDGE_SECONDS", 0.1)
    me = await Peer.start(start_transport, tmp_path / "me")
    silent, asked = await Peer.start(start_transport, tmp_path / "silent", DATA), asyncio.Event()
    empty = await Peer.start(start_transport, tmp_path / "empty")

    async def hang(caller: str, body: dict[str, Any], payload: bytes) -> Reply:
        if "offset" in body:
            asked.set()
            await asyncio.Event().wait()
        return await silent.answer(caller, body, payload)

    await silent.transport.serve(BLOB, hang)
    with pytest.raises(BlobUnavailable, match="not complete after") as caught:
        await fetch(me, silent, empty, timeout=3)
    assert caught.value.reasons[silent.id] == "still waited for"
    assert "not-found" in caught.value.reasons[empty.id]
    assert asked.is_set() and me.exchange._fetches == {}
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    await fetch(me, silent, good, timeout=20)


async def test_a_cancelled_fetch_ends_its_download_and_can_be_taken_up(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    cancelled = asyncio.create_task(fetch(me, good))

    async def begun() -> bool:
        return me.store.partial_path(HASH).exists() or cancelled.done()

    await eventually(begun)
    cancelled.cancel()
    again = asyncio.create_task(fetch(me, good))
    await asyncio.gather(cancelled, return_exceptions=True)
    await again


async def test_a_capped_source_is_busy_and_is_asked_again(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    refusals = iter(range(12))

    def busy(body: dict[str, Any]) -> None:
        if "offset" in body and next(refusals, None) is not None:
            raise Refused("busy", "later")

    good.before = busy
    await fetch(me, good)
    assert next(refusals, None) is None


async def test_under_a_cap_no_byte_leaves_before_it_may(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    good.transport.traffic.up_limit.limit(1.0)  # what the bucket holds at first is all for today
    fetching = asyncio.create_task(fetch(me, good))

    async def asked() -> bool:
        return good.asked.total() >= 1

    await eventually(asked)
    for _ in range(20):
        await asyncio.sleep(0.02)
        assert good.transport.traffic.total.up <= BURST_BYTES + 20
        assert me.transport.traffic.total.down <= BURST_BYTES + 20
    good.transport.traffic.up_limit.limit(None)
    await fetching


async def test_small_and_empty_blobs_and_bad_requests(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    server = await Peer.start(start_transport, tmp_path / "server")
    for data in (b"a manifest", b"", bytes(CHUNK_BYTES), bytes(CHUNK_BYTES + 1)):
        path = await me.exchange.fetch(server.store.put(data), [server.id], timeout=20)
        assert path.read_bytes() == data
    hash = server.store.put(b"a manifest")
    for body in (
        {},
        {"hash": "../x"},
        {"hash": hash, "offset": 0},
        {"hash": "../x", "offset": 0, "length": 1, "urgent": True},
        {"hash": hash, "offset": -1, "length": 1, "urgent": True},
        {"hash": hash, "offset": 1, "length": 1, "urgent": True},
        {"hash": hash, "offset": 0, "length": CHUNK_BYTES + 1, "urgent": True},
    ):
        with pytest.raises(PeerRefused, match="bad-request"):
            await me.transport.request(server.id, BLOB, body, timeout=10)


SMALL = os.urandom(1000)
SMALL_HASH = blake3(SMALL).hexdigest()


async def small(me: Peer, *sources: Peer, timeout: float = 20) -> None:
    await me.exchange.fetch(SMALL_HASH, [source.id for source in sources], timeout=timeout, size=len(SMALL))
    assert me.store.get(SMALL_HASH) == SMALL


async def test_a_blob_of_one_chunk_takes_one_request(start_transport: StartTransport, tmp_path: Path) -> None:
    me, server, other = [await Peer.start(start_transport, tmp_path / str(number), SMALL) for number in range(3)]
    me.store.remove(SMALL_HASH)
    requests: list[str] = []
    for peer in (server, other):
        peer.before = lambda body, peer=peer: requests.append(peer.id)  # type: ignore[misc]
    await small(me, server, other)
    assert requests == [server.id]


async def test_who_lacks_a_blob_of_one_chunk_is_asked_again(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    empty = await Peer.start(start_transport, tmp_path / "empty")
    with pytest.raises(BlobUnavailable, match="is not here"):
        await small(me, empty)

    silent = await Peer.start(start_transport, tmp_path / "silent")
    forever = asyncio.Event()

    async def wait(caller: str, body: dict[str, Any], payload: bytes) -> Reply:
        empty.store.put(SMALL)
        await forever.wait()
        raise AssertionError

    await silent.transport.serve(BLOB, wait)
    await small(me, empty, silent)


async def test_who_lies_about_a_blob_of_one_chunk_is_caught(start_transport: StartTransport, tmp_path: Path) -> None:
    me, liar = await Peer.start(start_transport, tmp_path / "me"), await Peer.start(start_transport, tmp_path / "liar")
    good = await Peer.start(start_transport, tmp_path / "good", SMALL)
    liar.lie(bytes(len(SMALL)))
    await small(me, liar, good)
    assert me.exchange.liars == {liar.id}


async def test_a_blob_that_was_damaged_on_disk_is_not_offered(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    server = await Peer.start(start_transport, tmp_path / "server", DATA)
    server.store.path(HASH).write_bytes(with_wrong_chunk(3))
    with pytest.raises(BlobUnavailable, match="damaged"):
        await fetch(me, server)
    assert me.exchange.liars == set() and not server.store.has(HASH)
