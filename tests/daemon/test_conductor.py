"""The conductor between protocol and world: nothing that fails outside may stop its loops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spesd.config.manifest import SyncConfig
from spesd.daemon.conductor import Conductor
from spesd.daemon.fetcher import FETCHERS, Fetcher
from spesd.daemon.state_dir import StateDir
from spesd.daemon.store import Store, StoredBlobs
from spesd.swarm.errors import PeerTimeout, PeerUnreachable, TransportError
from spesd.swarm.traffic import Traffic
from spesd.sync import effects as fx
from spesd.sync.messages import Ready
from spesd.sync.peer import SyncPeer
from spesd.sync.toys import ToySigner
from spesd.sync.workshop import Workshop

RUN, SIZES = "a" * 64, {"shared-0": 4, "expert-0": 4}


class Nobody:
    """A transport that registers handlers and reaches no one, and a trainer that does nothing."""

    life = 0

    def __init__(self) -> None:
        self.traffic = Traffic()

    async def serve(self, *_: Any, **__: Any) -> None: ...

    def take_snapshot(self, round_: int) -> None: ...

    def snapshot(self, round_: int, unit: str) -> None:
        return None

    def moved(self, *_: Any) -> None: ...

    def round_ended(self, report: fx.RoundEnded) -> None: ...


class Exchange:
    """Blobs that cannot be had: each fetch fails in its own way."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.sizes: list[int | None] = []

    async def fetch(self, *_: Any, size: int | None = None, **__: Any) -> None:
        self.sizes.append(size)
        if self.errors:
            raise self.errors.pop()


async def make(tmp_path: Path, errors: list[Exception], transport: Any = None) -> Conductor:
    state_dir = StateDir(tmp_path / "state")
    state_dir.acquire()
    store = Store(state_dir, RUN)
    settings = SyncConfig(local_steps=1)
    peer = SyncPeer("me", RUN, SIZES, settings, ToySigner("me"), seed=0)
    workshop = Workshop(RUN, SIZES, settings, StoredBlobs(store.blobs))
    nobody: Any = Nobody()
    blobs: Any = Exchange(errors)
    conductor = Conductor(peer, workshop, store, transport or nobody, blobs, nobody, keep=())
    await conductor.serve()
    return conductor


async def test_fetchers_survive_whatever_a_fetch_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3 * FETCHERS
    conductor = await make(tmp_path, [ValueError("a source that is no peer id") for _ in range(count)])
    seen: list[bool] = []
    monkeypatch.setattr(conductor.peer, "on_fetched", lambda now, effect, ok: seen.append(ok))
    for index in range(count + 1):
        conductor.peer.context.emit(fx.Fetch(f"expert-{index}", f"{index:064x}", 8, ("x",), False))
    conductor.drain()
    async with asyncio.timeout(10):
        while len(seen) <= count:
            await asyncio.sleep(0)
    await conductor.close()
    assert seen == [False] * count + [True]


class Slow:
    """Blobs that never come, but for the last ones asked for."""

    def __init__(self) -> None:
        self.open: list[str] = []

    async def fetch(self, blob: str, *_: Any, **__: Any) -> None:
        self.open.append(blob)
        try:
            if not blob.startswith("last"):
                await asyncio.Event().wait()
        finally:
            self.open.remove(blob)


async def test_what_a_unit_does_not_wait_for_any_more_takes_nobody_s_place() -> None:
    slow: Any = Slow()
    ended: list[tuple[str, bool]] = []
    fetcher = Fetcher(slow, 1.0, lambda effect, ok: ended.append((effect.blob, ok)))
    fetcher.start()
    units = [f"expert-{index}" for index in range(FETCHERS)]
    for blob in ("first", "second", "last"):
        for unit in units:
            fetcher.ask(fx.Fetch(unit, f"{blob} {unit}", 8, ("x",), False))
        if blob == "first":
            async with asyncio.timeout(10):
                while len(slow.open) < FETCHERS:
                    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while len(ended) < FETCHERS:
            await asyncio.sleep(0)
    await fetcher.close()
    assert sorted(ended) == [(f"last {unit}", True) for unit in units]
    assert not slow.open


async def test_no_time_is_spent_on_asking_for_a_size_that_is_known(tmp_path: Path) -> None:
    conductor = await make(tmp_path, [])
    seen: list[bool] = []
    conductor.peer.on_fetched = lambda now, unit, ok: seen.append(ok)  # type: ignore[method-assign]
    conductor.peer.context.emit(fx.Fetch("expert-0", "0" * 64, 8, ("x",), False))
    conductor.drain()
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0)
    await conductor.close()
    assert conductor._blobs.sizes == [8]  # type: ignore[attr-defined]


@pytest.mark.parametrize("heard", [False, True])
async def test_who_does_not_answer_in_time_is_gone_unless_bytes_came_from_it_meanwhile(
    tmp_path: Path, heard: bool
) -> None:
    class Line(Nobody):
        async def request(self, peer: str, *_: Any, **__: Any) -> None:
            if heard:
                self.traffic.down(peer, "blob", False).count(1)
            raise PeerTimeout(peer, "no answer within 3.0 s")

    conductor = await make(tmp_path, [], Line())
    lost: list[str] = []
    conductor.peer.on_unreachable = lambda now, peer: lost.append(peer)  # type: ignore[method-assign]
    conductor.peer.context.send("x", Ready(round=1))
    conductor.drain()
    await asyncio.gather(*conductor._tasks)
    await conductor.close()
    assert lost == ([] if heard else ["x"])


async def test_an_event_that_fails_does_not_stop_the_clock(tmp_path: Path) -> None:
    conductor = await make(tmp_path, [])

    def event(now: float) -> None:
        conductor.peer.context.emit(fx.Strike("other", "reason"))
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        conductor.tell(event)
    await conductor.close()
    assert conductor.strikes == {"other": 1}


class Failing(Nobody):
    """A transport on which every request fails in the same way."""

    def __init__(self, error: TransportError) -> None:
        self.error = error

    async def request(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "lost"),
    [(PeerTimeout("x", "too slow"), []), (PeerUnreachable("x", "gone"), ["x"])],
    ids=["slow", "gone"],
)
async def test_a_reducer_to_which_a_contribution_takes_too_long_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TransportError, lost: list[str]
) -> None:
    conductor = await make(tmp_path, [], Failing(error))
    seen: list[str] = []
    monkeypatch.setattr(conductor.peer, "on_unreachable", lambda now, peer: seen.append(peer))
    blob = conductor.store.blobs.put(b"contribution")
    await conductor._send_contribution(fx.SendContribution("x", 1, "roster", "expert-0", blob))
    await asyncio.sleep(0)
    assert seen == lost
    await conductor.close()
