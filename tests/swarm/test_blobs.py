"""Blobs: stored whole or not at all, fetched from several peers, verified, resumed; liars are found."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from blake3 import blake3
from swarm_harness import RUN, StartTransport, eventually

from spesd.swarm import download
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.blobs import BlobExchange, Lookup
from spesd.swarm.download import CHUNK_BYTES
from spesd.swarm.errors import BlobMissing, BlobUnavailable, PeerRefused
from spesd.swarm.transport import Transport, protocol_name

DATA = os.urandom(6 * CHUNK_BYTES + 12345)
HASH = blake3(DATA).hexdigest()


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
            store.put(DATA)
    assert list(store) == [] and list((tmp_path / "temporary").iterdir()) == []
    (tmp_path / "temporary" / "of a killed process").write_bytes(b"half")
    assert list(BlobStore(tmp_path)) == [] and list((tmp_path / "temporary").iterdir()) == []


class Peer:
    """A transport with a store."""

    def __init__(self, transport: Transport, folder: Path, lookup: Lookup | None) -> None:
        self.transport = transport
        self.store = BlobStore(folder)
        self.exchange = BlobExchange(transport, self.store, RUN, lookup)
        self.id = transport.peer_id

    @classmethod
    async def start(
        cls, start_transport: StartTransport, folder: Path, data: bytes = b"", lookup: Lookup | None = None
    ) -> Peer:
        peer = cls(await start_transport(), folder, lookup)
        if data:  # perhaps not the bytes that the hash promises
            path = peer.store.path(HASH)
            path.parent.mkdir()
            path.write_bytes(data)
        await peer.exchange.serve()
        return peer


def lie(chunk: int) -> bytes:
    return DATA[: chunk * CHUNK_BYTES] + b"wrong" + DATA[chunk * CHUNK_BYTES + 5 :]


async def test_three_sources_one_lying_one_dying(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    liar = await Peer.start(
        start_transport, tmp_path / "liar", b"".join(bytes(CHUNK_BYTES) for _ in range(6)) + b"x" * 12345
    )

    def die(hash: str) -> None:
        os.kill(dying.transport.p2pd_pid, signal.SIGKILL)

    dying = await Peer.start(start_transport, tmp_path / "dying", DATA, die)
    path = await me.exchange.fetch(HASH, [dying.id, liar.id, good.id], timeout=60, size=len(DATA))
    assert path == me.store.path(HASH) and me.store.get(HASH) == DATA
    assert me.exchange.liars == {liar.id}
    assert list((tmp_path / "me" / "partial").iterdir()) == []


async def test_a_lone_liar_is_named(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    liar = await Peer.start(start_transport, tmp_path / "liar", lie(2))
    empty = await Peer.start(start_transport, tmp_path / "empty")
    with pytest.raises(BlobUnavailable, match="no source delivered it") as caught:
        await me.exchange.fetch(HASH, [liar.id, empty.id], timeout=60)
    assert "another hash" in caught.value.reasons[liar.id] and "not-found" in caught.value.reasons[empty.id]
    assert not me.store.has(HASH) and me.exchange.liars == {liar.id}


async def test_a_prefix_from_a_liar_does_not_spoil_the_next_source(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    served: list[str] = []

    def lie_and_leave(hash: str) -> bytes | None:
        served.append(hash)
        return bytes(len(DATA)) if len(served) <= 3 else None

    liar = await Peer.start(start_transport, tmp_path / "liar", lookup=lie_and_leave)
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    me.exchange.liars |= {liar.id, good.id}  # so that each is asked alone
    await me.exchange.fetch(HASH, [liar.id, good.id], timeout=60, size=len(DATA))
    assert len(served) > 3 and me.store.get(HASH) == DATA


async def test_lies_about_the_size_are_survived(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    longer = await Peer.start(start_transport, tmp_path / "longer", DATA + b"more")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    await me.exchange.fetch(HASH, [longer.id, good.id], timeout=60)
    assert me.store.get(HASH) == DATA and longer.id in me.exchange.liars
    me.store.remove(HASH)
    with pytest.raises(BlobUnavailable, match="at most 1000"):
        await me.exchange.fetch(HASH, [good.id], timeout=60, max_size=1000)


async def test_a_download_resumes_where_it_was_cut(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    me.store.partial_path(HASH).write_bytes(DATA[: 4 * CHUNK_BYTES + 77])
    await me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA))
    assert me.store.get(HASH) == DATA
    assert me.transport.traffic.total.down < 2.1 * CHUNK_BYTES
    # a partial file of other bytes costs one more download, not the blob
    me.store.remove(HASH)
    me.store.partial_path(HASH).write_bytes(bytes(CHUNK_BYTES))
    await me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA))
    assert me.store.get(HASH) == DATA and me.exchange.liars == set()


async def test_fetches_of_one_blob_share_a_download(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    fetches = [me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA)) for _ in range(5)]
    assert set(await asyncio.gather(*fetches)) == {me.store.path(HASH)}
    assert me.transport.traffic.total.down < len(DATA) + 10_000


async def test_a_joined_fetch_falls_back_to_its_own_sources(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    empty = await Peer.start(start_transport, tmp_path / "empty")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    first, second = await asyncio.gather(
        me.exchange.fetch(HASH, [empty.id], timeout=60, size=len(DATA)),
        me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA)),
        return_exceptions=True,
    )
    assert isinstance(first, BlobUnavailable) and second == me.store.path(HASH)


async def test_a_silent_source_is_named_at_the_deadline_and_hedged(
    start_transport: StartTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "HEDGE_SECONDS", 0.1)
    me = await Peer.start(start_transport, tmp_path / "me")
    silent, asked = await start_transport(), asyncio.Event()
    empty = await Peer.start(start_transport, tmp_path / "empty")

    async def hang(peer: str, body: dict[str, object], payload: bytes) -> dict[str, object]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    await silent.serve(protocol_name(RUN, "blob"), hang)
    with pytest.raises(BlobUnavailable, match="not complete after") as caught:
        await me.exchange.fetch(HASH, [silent.peer_id, empty.id], timeout=1, size=len(DATA))
    assert caught.value.reasons[silent.peer_id] == "still waited for"
    assert "not-found" in caught.value.reasons[empty.id]
    assert asked.is_set() and me.exchange._fetches == {}
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    await me.exchange.fetch(HASH, [silent.peer_id, good.id], timeout=20, size=len(DATA))
    assert me.store.get(HASH) == DATA


async def test_a_cancelled_fetch_ends_its_download_and_can_be_taken_up(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    good = await Peer.start(start_transport, tmp_path / "good", DATA)
    fetch = asyncio.create_task(me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA)))

    async def begun() -> bool:
        return me.store.partial_path(HASH).exists() or fetch.done()

    await eventually(begun)
    fetch.cancel()
    again = asyncio.create_task(me.exchange.fetch(HASH, [good.id], timeout=60, size=len(DATA)))
    await asyncio.gather(fetch, return_exceptions=True)
    await again
    assert me.store.get(HASH) == DATA


async def test_blobs_from_elsewhere_and_bad_requests(start_transport: StartTransport, tmp_path: Path) -> None:
    me = await Peer.start(start_transport, tmp_path / "me")
    small = b"a manifest"
    hash = blake3(small).hexdigest()
    server = await Peer.start(start_transport, tmp_path / "server", lookup={hash: small}.get)
    assert (await me.exchange.fetch(hash, [server.id], timeout=20)).read_bytes() == small
    name = protocol_name(RUN, "blob")
    for body in (
        {},
        {"hash": "../x", "offset": 0, "length": 1},
        {"hash": hash, "offset": -1, "length": 1},
        {"hash": hash, "offset": 0, "length": CHUNK_BYTES + 1},
    ):
        with pytest.raises(PeerRefused, match="bad-request"):
            await me.transport.request(server.id, name, body, timeout=10)
