"""The daemon's care of its trainer, with a link that only writes down: no work is lost, none counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spesd.config.manifest import DataConfig, Draft, ModelConfig, OptimizerConfig, Shard, SyncConfig
from spesd.config.peer import PeerConfig
from spesd.daemon import trainer as module
from spesd.daemon.state_dir import StateDir
from spesd.daemon.store import Store, StoredBlobs
from spesd.daemon.trainer import LAST_SNAPSHOT, Trainer, TrainerState
from spesd.model.units import UnitLayout
from spesd.sync.ledger import Chain, Head
from spesd.sync.peer import SyncPeer
from spesd.sync.toys import ToySigner
from spesd.sync.workshop import Workshop, state_hash
from spesd.train import link

OWN, FOREIGN = "expert-0", "expert-1"


class WrittenLink:
    """Stands for a trainer process: keeps what it is told, answers when the test says so."""

    def __init__(self, layout: UnitLayout, inbound: Path, snapshot: Path, on_event: Any, on_exit: Any) -> None:
        self.on_event, self.on_exit = on_event, on_exit
        self.pid = 1
        self.started: dict[str, np.ndarray] = {}
        self.loads: list[tuple[dict[str, np.ndarray], str]] = []
        self.commands: list[link.Command] = []
        self.snapshots: dict[str, np.ndarray] = {}

    async def start(self, command: link.Start, values: dict[str, np.ndarray]) -> None:
        self.started = {unit: data.copy() for unit, data in values.items()}

    def load(self, values: dict[str, np.ndarray], mode: str, round_: int) -> None:
        self.loads.append((values, mode))

    def send(self, command: link.Command) -> None:
        self.commands.append(command)

    def snapshot(self, unit: str) -> np.ndarray:
        return self.snapshots[unit]

    async def stop(self) -> None: ...

    def ready(self) -> None:
        self.on_event(link.Ready(pid=1, device="cpu", trained_values=1, frozen_values=1, position=0))


class Bench:
    """A trainer with everything around it, and the links that it made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links: list[WrittenLink] = []
        monkeypatch.setattr(module, "TrainerLink", self._make_link)
        monkeypatch.setattr(module, "RESTART_SECONDS", (0.0, 0.0))
        draft = Draft(
            name="test",
            model=ModelConfig(layers=1, width=8, heads=2, expert_width=4, experts=2, top_k=1, vocabulary=256),
            optimizer=OptimizerConfig(learning_rate=1e-3, total_rounds=10, sequences=1),
            data=DataConfig(sequence_length=8),
            sync=SyncConfig(local_steps=1, shared_shards=1),
        )
        self.layout = UnitLayout(draft.model, 1)
        self.agreed = {unit.id: np.zeros(unit.size, np.float32) for unit in self.layout.units}
        heads = {unit: Head(0, state_hash(values), 0) for unit, values in self.agreed.items()}
        shard = (Shard(hash="d" * 64, bytes=1, tokens=1),)
        manifest = draft.seal(shard, shard, {unit: head.hash for unit, head in heads.items()})
        sizes = {unit.id: unit.size for unit in self.layout.units}
        state_dir = StateDir(folder)
        state_dir.acquire()
        self.store = Store(state_dir, manifest.run_id)
        self.peer = SyncPeer("me", manifest.run_id, sizes, manifest.sync, ToySigner("me"), seed=0)
        self.workshop = Workshop(manifest.run_id, sizes, manifest.sync, StoredBlobs(self.store.blobs))
        for unit, head in heads.items():
            self.workshop.restore(unit, head, self.agreed[unit])
        self.peer.restore({unit: Chain([head]) for unit, head in heads.items()})
        self.peer.on_owned([OWN])
        self.trainer = Trainer(
            PeerConfig(), manifest, state_dir, self.store, self.peer, self.workshop, lambda event: event(0.0)
        )

    def _make_link(self, *args: Any) -> WrittenLink:
        self.links.append(WrittenLink(*args))
        return self.links[-1]

    def agree(self, unit: str, value: float) -> tuple[np.ndarray, np.ndarray]:
        """Move the agreed state of a unit to `value` everywhere; returns the change and the new state."""
        old = self.workshop.agreed[unit]
        new = np.full_like(old, value)
        self.workshop.agreed[unit] = new
        return new - old, new

    async def die(self) -> None:
        """The process ends, and the next one is started."""
        count = len(self.links)
        self.links[-1].on_exit(1, None)
        async with asyncio.timeout(10):
            while len(self.links) == count or not self.links[-1].started:
                await asyncio.sleep(0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "state", monkeypatch)


async def test_a_shift_that_takes_account_of_lost_work_is_replaced_by_the_plain_change(bench: Bench) -> None:
    trainer = bench.trainer
    await trainer.begin({})
    bench.links[0].ready()
    life = trainer.life
    await bench.die()
    bench.links[1].ready()
    change, new = bench.agree(OWN, 3.0)
    trainer.moved(OWN, change - 1.0, new, round_=1, life=life)  # worked out before the trainer died
    (values, mode), = bench.links[1].loads  # fmt: skip
    assert mode == "add"
    np.testing.assert_array_equal(values[OWN], change)
    change, new = bench.agree(OWN, 5.0)
    trainer.moved(OWN, change - 1.0, new, round_=2, life=trainer.life)
    np.testing.assert_array_equal(bench.links[1].loads[1][0][OWN], change - 1.0)


async def test_a_change_that_the_new_trainer_was_started_with_is_not_added_again(bench: Bench) -> None:
    trainer = bench.trainer
    await trainer.begin({})
    life = trainer.life
    change, new = bench.agree(OWN, 3.0)
    await bench.die()
    np.testing.assert_array_equal(bench.links[1].started[OWN], new)
    trainer.moved(OWN, change, new, round_=1, life=life)
    assert bench.links[1].loads == []


async def test_foreign_experts_are_replaced(bench: Bench) -> None:
    await bench.trainer.begin({})
    change, new = bench.agree(FOREIGN, 2.0)
    bench.trainer.moved(FOREIGN, change, new, round_=1, life=bench.trainer.life)
    (values, mode), = bench.links[0].loads  # fmt: skip
    assert (mode, values[FOREIGN] is new) == ("replace", True)


async def test_unaccepted_work_waits_until_a_trainer_has_taken_it_up(bench: Bench) -> None:
    work = {OWN: np.full_like(bench.agreed[OWN], 0.5)}
    await bench.trainer.begin(work)
    await bench.die()  # before it was ready
    np.testing.assert_array_equal(bench.links[1].started[OWN], work[OWN])
    await bench.trainer.finish(1.0, keep=set())
    kept = bench.store.take_unaccepted(0, 10)
    np.testing.assert_array_equal(kept[OWN], work[OWN])


async def test_the_last_snapshot_is_held_against_the_states_it_was_made_from(bench: Bench) -> None:
    trainer = bench.trainer
    await trainer.begin({})
    process = bench.links[0]
    process.ready()
    assert trainer.state is TrainerState.TRAINING
    ending = asyncio.create_task(trainer.finish(10.0, keep={OWN}))
    async with asyncio.timeout(10):
        while not any(isinstance(command, link.Snapshot) for command in process.commands):
            await asyncio.sleep(0)
    process.snapshots = {OWN: np.full_like(bench.agreed[OWN], 0.25)}
    change, new = bench.agree(OWN, 8.0)
    trainer.moved(OWN, change, new, round_=1, life=trainer.life)  # committed while the snapshot is waited for
    process.on_event(
        link.SnapshotTaken(round=LAST_SNAPSHOT, steps=1, tokens=8, position=1, loss=None, units=(OWN,))
    )  # fmt: skip
    async with asyncio.timeout(10):
        while not isinstance(process.commands[-1], link.Checkpoint):
            await asyncio.sleep(0)
    process.on_event(link.Checkpointed(round=0, path="", error=None))
    await ending
    np.testing.assert_array_equal(bench.store.take_unaccepted(0, 10)[OWN], process.snapshots[OWN])
