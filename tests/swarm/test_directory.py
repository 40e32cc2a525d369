"""Records in a real DHT of two or three nodes: seen, released, withdrawn, expired; hostile ones ignored."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from swarm_harness import OTHER_RUN, RUN, StartTransport, eventually

from spesd.swarm.directory import Directory
from spesd.swarm.errors import CannotJoin
from spesd.swarm.identity import Identity
from spesd.swarm.known_peers import KnownPeers
from spesd.swarm.records import PEERS, Claim, PeerRecord, dht_key, seal

StartDirectory = Callable[..., Awaitable[Directory]]


def record_of(directory: Directory, seconds: float = 30.0, **fields: object) -> PeerRecord:
    now = time.time()
    defaults = {"state": "training", "round": 1, "version": "0", "addresses": tuple(directory.transport.addresses())}
    return PeerRecord(
        peer=directory.transport.identity.peer_id, issued=now, expires=now + seconds, **(defaults | fields)
    )


@pytest.fixture
async def start_directory(start_transport: StartTransport, tmp_path: Path) -> AsyncIterator[StartDirectory]:
    started: list[Directory] = []

    async def start(run_id: str = RUN) -> Directory:
        transport = await start_transport()
        number = len(started)
        known = KnownPeers(tmp_path / f"known-{number}.json")
        directory = await Directory.start(transport, run_id, known, timeout=10)
        started.append(directory)
        if number:
            await directory.join(started[0].transport.addresses())
        return directory

    yield start
    for directory in reversed(started):
        await directory.stop()


async def hostile_store(node: DHTNode, victim: Directory, key: str, subkey: str, value: bytes) -> bool | None:
    """Store raw bytes at the victim, past every check of the sender."""
    stored = await node.protocol.call_store(
        PeerID.from_base58(victim.transport.identity.peer_id),
        keys=[DHTID.generate(key)],
        values=[value],
        expiration_time=[time.time() + 60],
        subkeys=[subkey],
    )
    return stored[0] if stored else None


async def test_a_peer_alone_sees_itself(start_directory: StartDirectory) -> None:
    directory = await start_directory()
    assert await directory.peers() == {}
    record = record_of(directory, owned=("expert-0",))
    assert await directory.publish(record)
    assert await directory.peers() == {record.peer: record}
    assert list(await directory.owners("expert-0")) == [record.peer]


async def test_records_are_seen_updated_and_withdrawn(start_directory: StartDirectory) -> None:
    a, b, c = [await start_directory() for _ in range(3)]
    await b.publish(record_of(b, owned=("expert-1", "shared-0"), round=7))
    await c.publish(record_of(c, owned=("expert-1",), round=5))
    for reader in (a, b, c):
        assert set(await reader.peers()) == {b.transport.identity.peer_id, c.transport.identity.peer_id}
        assert set(await reader.owners("expert-1")) == {b.transport.identity.peer_id, c.transport.identity.peer_id}
        assert set(await reader.owners("shared-0")) == {b.transport.identity.peer_id}
        assert await reader.newest_round() == 7
    await b.publish(record_of(b, owned=("shared-0",), round=8))
    assert set(await a.owners("expert-1")) == {c.transport.identity.peer_id}
    assert (await a.peers())[b.transport.identity.peer_id].round == 8
    await b.withdraw()
    assert set(await a.peers()) == {c.transport.identity.peer_id}
    assert await a.owners("shared-0") == {} and await a.newest_round() == 5


async def test_known_peers_survive_on_disk(start_directory: StartDirectory, tmp_path: Path) -> None:
    a, b = await start_directory(), await start_directory()
    await b.publish(record_of(b))
    await a.peers()
    assert KnownPeers(tmp_path / "known-0.json").addresses() == b.transport.addresses()
    (tmp_path / "known-0.json").write_text("{broken")
    assert KnownPeers(tmp_path / "known-0.json").addresses() == []


async def test_an_expired_record_is_not_seen(start_directory: StartDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await start_directory(), await start_directory()
    await b.publish(record_of(b, seconds=30))
    assert await a.peers() != {}
    later = time.time() + 31
    monkeypatch.setattr("spesd.swarm.directory.time.time", lambda: later)
    assert await a.peers() == {}


async def test_forged_moved_and_foreign_records_are_ignored(start_directory: StartDirectory, tmp_path: Path) -> None:
    a, b = await start_directory(), await start_directory()
    good, stranger = record_of(b, seconds=90), Identity.load_or_create(tmp_path / "stranger.key")
    claim = Claim(peer=good.peer, round=1, issued=good.issued, expires=good.expires)
    assert b._node is not None
    forged = {
        "signature": seal(RUN, PEERS, good, stranger),
        "other run": seal(OTHER_RUN, PEERS, good, b.transport.identity),
        "other key": seal(RUN, "owners/expert-0", claim, b.transport.identity),
        "other peer": seal(RUN, PEERS, good.model_copy(update={"peer": stranger.peer_id}), stranger),
        "kept too long": seal(RUN, PEERS, good.model_copy(update={"expires": time.time() + 5}), b.transport.identity),
        "expires too late": seal(
            RUN, PEERS, good.model_copy(update={"expires": time.time() + 1e6}), b.transport.identity
        ),
        "too large": b"\xc6" + (100_000).to_bytes(4, "big") + bytes(100_000),
        "not a list": msgpack.packb(5),
    }
    for reason, value in forged.items():
        stored = await hostile_store(b._node, a, dht_key(RUN, PEERS), good.peer, msgpack.packb(value))
        assert not stored, reason
    reasons = ("signature", "other key", "other peer", "kept too long", "expires too late", "shape")
    assert [a.rejected.pop(reason, 0) for reason in reasons] == [2, 1, 1, 1, 1, 1]
    assert [reason for reason in a.rejected if "bytes of msgpack" in reason] == list(a.rejected)
    assert await a.peers() == {}
    assert await hostile_store(
        b._node,
        a,
        dht_key(RUN, PEERS),
        good.peer,
        msgpack.packb(seal(RUN, PEERS, good, b.transport.identity)),
    )
    assert set(await a.peers()) == {good.peer}


async def test_a_deeply_nested_tuple_value_is_harmless(start_directory: StartDirectory) -> None:
    a, b = await start_directory(), await start_directory()
    assert b._node is not None
    nested = msgpack.packb([])
    for _ in range(300):
        nested = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + nested))
    dictionary = msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\xcb" + bytes(8) + b"\x91" + nested))
    for value in (nested, dictionary):
        assert not await hostile_store(b._node, a, dht_key(RUN, PEERS), b.transport.identity.peer_id, value)
    # a hostile node that keeps such values itself and hands them to whoever asks
    for key in (PEERS, "owners/expert-0"):
        b._node.protocol.storage.store(DHTID.generate(dht_key(RUN, key)), nested, time.time() + 60)
    assert await a.peers() == {} and await a.owners("expert-0") == {}
    await a.publish(record_of(a))
    assert set(await a.peers()) == {a.transport.identity.peer_id}


async def test_joining_through_a_dead_peer_fails_with_the_reason(start_directory: StartDirectory) -> None:
    a = await start_directory()
    dead = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    with pytest.raises(CannotJoin, match="/tcp/1/") as caught:
        await a.join([dead])
    assert list(caught.value.reasons) == [dead]
    with pytest.raises(CannotJoin, match="no address given"):
        await a.join([])


async def test_a_differing_clock_is_named(start_directory: StartDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await start_directory(), await start_directory()
    monkeypatch.setattr("hivemind.dht.protocol.get_dht_time", lambda: time.time() + 10)
    with pytest.raises(CannotJoin, match=r"clock differs from ours by \+1?\d\.\d s"):
        await b.join(a.transport.addresses())


async def test_the_directory_comes_back_after_p2pd_was_killed(start_directory: StartDirectory) -> None:
    a, b = await start_directory(), await start_directory()
    await a.publish(record_of(a))
    await b.publish(record_of(b))
    await b.peers()
    os.kill(b.transport.p2pd_pid, signal.SIGKILL)
    await b.transport.wait_restarted(1, timeout=20)
    await b.publish(record_of(b, seconds=60, round=9))

    async def seen() -> bool:
        return (await a.peers()).get(b.transport.identity.peer_id, record_of(b)).round == 9

    await eventually(seen)
    assert set(await b.peers()) == {a.transport.identity.peer_id, b.transport.identity.peer_id}


async def test_a_request_for_too_much_work_is_refused(start_directory: StartDirectory) -> None:
    a, b = await start_directory(), await start_directory()
    assert b._node is not None
    target = PeerID.from_base58(a.transport.peer_id)
    assert await b._node.protocol.call_find(target, [DHTID.generate() for _ in range(512)])
    assert await b._node.protocol.call_find(target, [DHTID.generate() for _ in range(513)]) is None
    assert a.rejected == {"too many keys": 1}


async def test_a_peer_that_did_not_answer_for_a_while_is_asked_again_once_it_has_been_joined(
    start_directory: StartDirectory,
) -> None:
    a, b = [await start_directory() for _ in range(2)]
    peer, blacklist = PeerID.from_base58(a.transport.peer_id), b._require_node().blacklist
    for _ in range(6):  # hivemind bans for longer each time, here for minutes
        blacklist.register_failure(peer)
        del blacklist.banned_peers[peer]
    blacklist.register_failure(peer)
    assert peer in blacklist
    await b.join(a.transport.addresses())
    assert peer not in blacklist


async def test_a_connection_that_died_without_a_word_is_not_used_for_the_next_dial(
    start_directory: StartDirectory,
) -> None:
    a, b = [await start_directory() for _ in range(2)]
    addresses = a.transport.addresses()

    async def connected() -> set[str]:
        return {str(peer.peer_id) for peer in await b.transport.p2p.list_peers()}

    assert a.transport.peer_id in await connected()
    os.kill(a.transport.p2pd_pid, signal.SIGSTOP)
    try:
        with pytest.raises(CannotJoin, match="no answer from the DHT"):
            await b.join(addresses)
        assert a.transport.peer_id not in await connected()
    finally:
        os.kill(a.transport.p2pd_pid, signal.SIGCONT)
    await b.join(addresses)


async def test_who_does_not_answer_does_not_hold_up_the_entry_through_another(
    start_directory: StartDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = [await start_directory() for _ in range(2)]
    silent, greet = "/ip4/10.0.0.1/tcp/1/p2p/Qmsilent", b._enter

    async def enter(address: str, timeout: float) -> str | None:
        await asyncio.Event().wait() if address == silent else None
        return await greet(address, timeout)

    monkeypatch.setattr(b, "_enter", enter)
    await b.join([silent, *a.transport.addresses()], timeout=3600)
