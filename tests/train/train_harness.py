"""A tiny run, and a trainer driven in this process or over real pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from blake3 import blake3

from spesd.config.manifest import Draft, Manifest
from spesd.data.prepare import PreparedData, prepare, stdlib_documents
from spesd.model.genesis import initial_state
from spesd.model.units import UnitLayout
from spesd.train.exchange import UnitFile
from spesd.train.link import LENGTH, Command, Event, Start, decode_event, encode
from spesd.train.loop import Commands, Trainer

DRAFT: dict[str, Any] = {
    "name": "tiny",
    "model": {"layers": 2, "width": 32, "heads": 2, "expert_width": 32, "experts": 4, "top_k": 2, "vocabulary": 256},
    "optimizer": {"learning_rate": 3e-3, "total_rounds": 10, "sequences": 4, "accumulate": 2},
    "data": {"sequence_length": 32, "held_out_share": 0.1, "held_out_sequences": 6},
    "sync": {"shared_shards": 3, "local_steps": 5},
}


@dataclass
class TinyRun:
    """A founded run: manifest, data and exchange files under `folder`."""

    folder: Path
    manifest: Manifest
    layout: UnitLayout
    data: PreparedData
    inbound: UnitFile
    snapshot: UnitFile

    def start(self, *owned: str, **changes: Any) -> Start:
        """A start command for a peer that trains `owned`."""
        shards = (*self.data.train, *self.data.held_out)
        fields = {
            "manifest": self.manifest.canonical_bytes(),
            "peer_id": "peer",
            "owned": owned,
            "round": 0,
            "position": 0,
            "shards": {shard.hash: str(self.folder / f"{shard.hash}.shard") for shard in shards},
            "inbound": str(self.inbound.path),
            "snapshot": str(self.snapshot.path),
            "device": "cpu",
        }
        return Start(**(fields | changes))

    def fill_inbound(self, values: np.ndarray) -> None:
        """Write fp32 [layout.total_size] as the daemon does."""
        for unit in self.layout.units:
            at = self.layout.offsets[unit.id]
            self.inbound.values(unit.id)[:] = values[at : at + unit.size]


def found_run(folder: Path, **sections: dict[str, Any]) -> TinyRun:
    """Found a run on a little of the standard library; `sections` change fields of DRAFT's sections."""
    draft = Draft.model_validate(DRAFT | {name: DRAFT[name] | fields for name, fields in sections.items()})
    data = prepare(stdlib_documents()[:60], folder, draft.data.held_out_share)
    layout = UnitLayout(draft.model, draft.sync.shared_shards)
    state = initial_state(layout)
    genesis = {
        u.id: blake3(state[(at := layout.offsets[u.id]) : at + u.size].tobytes()).hexdigest() for u in layout.units
    }
    manifest = draft.seal(data.train, data.held_out, genesis)
    files = [UnitFile.create(folder / name, layout) for name in ("inbound", "snapshot")]
    run = TinyRun(folder, manifest, layout, data, *files)
    run.fill_inbound(state)
    return run


@dataclass
class LocalTrainer:
    """A trainer in this process, stepped by hand."""

    start: Start
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commands: Commands = SimpleQueue()
        self.trainer = Trainer(self.start, self.commands, self.events.append)

    def tell(self, *commands: Command) -> list[Event]:
        """Hand over commands, let them be obeyed, and return the answers."""
        before = len(self.events)
        for command in commands:
            self.commands.put(command)
        self.trainer.obey()
        return self.events[before:]

    def values(self, unit_id: str) -> np.ndarray:
        """Copy of a unit's values."""
        return self.trainer.weights.values(unit_id).numpy().copy()


class TrainerProcess:
    """The real process over real pipes."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "spesd.train.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.log = log

    def tell(self, *commands: Command) -> None:
        """Write commands to the pipe."""
        assert self.popen.stdin is not None
        for command in commands:
            self.popen.stdin.write(encode(command))
        self.popen.stdin.flush()

    def read(self) -> Event:
        """Read one event."""
        assert self.popen.stdout is not None
        prefix = self.popen.stdout.read(LENGTH.size)
        assert len(prefix) == LENGTH.size, f"the trainer ended: {self.log.read_text()}"
        return decode_event(self.popen.stdout.read(*LENGTH.unpack(prefix)))

    def wait_for(self, kind: type[Event], accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """Read events until one of this kind is accepted."""
        while True:
            event = self.read()
            if isinstance(event, kind) and accept(event):
                return event

    def close(self) -> None:
        """End the process, however the test went."""
        self.popen.kill()
        self.popen.wait(timeout=10)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
