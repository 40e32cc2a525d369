"""Owning few experts saves memory: peak memory of real trainer processes, beside what the formula predicts.

A trainer of a model so small that it weighs nothing is the baseline: interpreter, torch, buffers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from bench.drafts import demo_draft
from bench.report import BenchError, Result
from spesd.cli.fleet import Interruptible
from spesd.config.manifest import Manifest
from spesd.daemon.budget import FROZEN_BYTES, TRAINED_BYTES
from spesd.daemon.trainer_link import TrainerLink
from spesd.data.prepare import PreparedData, prepare, stdlib_documents
from spesd.model.units import UnitLayout
from spesd.train import link

if TYPE_CHECKING:
    from rich.table import Table

E = TypeVar("E", bound=link.Event)

MODEL: dict[str, Any] = {"layers": 8, "width": 512, "heads": 8, "expert_width": 512, "experts": 8}
"""59 million values, 85 % of them in experts."""

TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "expert_width": 32}
OWNED = 2
STEPS = 3
"""Optimizer steps before the snapshot; memory has reached its peak after two."""

WAIT_SECONDS = 120.0
"""Bound on each wait for the trainer."""

LEAST_RATIO = 0.9
"""Share of the predicted saving that must be real."""


class Peak(BaseModel):
    """One trainer process. `predicted_bytes` counts weights, gradients and moments; `peak_bytes` is everything."""

    model_config = ConfigDict(frozen=True)

    owned: int
    trained_values: int
    frozen_values: int
    peak_bytes: int
    predicted_bytes: int


class MemoryResult(Result):
    """A trainer that owns few experts, one that owns all, and what of both is only the process itself."""

    baseline_bytes: int
    few: Peak
    all: Peak
    saved_bytes: int
    predicted_saved_bytes: int
    ratio: float

    def table(self) -> Table:
        from rich.table import Table

        table = Table("experts owned", "peak", "above baseline", "predicted", "ratio", title="memory of the trainer")
        table.add_row("none to speak of: the baseline", _mb(self.baseline_bytes), "", "", "")
        for peak in (self.few, self.all):
            above = peak.peak_bytes - self.baseline_bytes
            ratio = f"{above / peak.predicted_bytes:.3f}"
            row = (_mb(peak.peak_bytes), _mb(above), _mb(peak.predicted_bytes), ratio)
            table.add_row(f"{peak.owned} of {self.all.owned}", *row)
        saved = (_mb(self.saved_bytes), _mb(self.predicted_saved_bytes), f"{self.ratio:.3f}")
        table.add_row("saved", "", *saved)
        table.add_row("wanted", "", "", "", f">= {LEAST_RATIO}")
        return table


def run(signals: Interruptible, model: dict[str, Any] | None = None) -> MemoryResult:
    """Measure three trainers, one after the other. Raises Interrupted and BenchError."""
    model = MODEL if model is None else model
    with tempfile.TemporaryDirectory(prefix="spesd-bench-") as name:
        folder = Path(name)
        data = prepare(stdlib_documents()[:20], folder, held_out_share=0.1)
        # The baseline comes first: on some systems a process inherits the peak of the one that started it.
        baseline = asyncio.run(measure(signals, folder, data, TINY, 1))
        few = asyncio.run(measure(signals, folder, data, model, OWNED))
        everything = asyncio.run(measure(signals, folder, data, model, model["experts"]))
    return compare(baseline.peak_bytes, few, everything)


def compare(baseline_bytes: int, few: Peak, everything: Peak) -> MemoryResult:
    """What owning few experts saves, measured and predicted."""
    saved, predicted = everything.peak_bytes - few.peak_bytes, everything.predicted_bytes - few.predicted_bytes
    return MemoryResult(
        targets={"saving": saved >= LEAST_RATIO * predicted},
        baseline_bytes=baseline_bytes,
        few=few,
        all=everything,
        saved_bytes=saved,
        predicted_saved_bytes=predicted,
        ratio=saved / predicted,
    )


def predicted_bytes(trained_values: int, frozen_values: int) -> int:
    """Weights, gradients and moments of a trainer; see `spesd.daemon.budget`."""
    return TRAINED_BYTES * trained_values + FROZEN_BYTES * frozen_values


class Watched:
    """A trainer process driven without a daemon. Use as an asynchronous context, which ends the process."""

    def __init__(self, signals: Interruptible, layout: UnitLayout, folder: Path) -> None:
        self._signals = signals
        self._events: list[link.Event] = []
        self._ends: list[str] = []
        self.link = TrainerLink(layout, folder / "inbound", folder / "snapshot", self._events.append, self._on_exit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nobody wants its last words
            self.link.kill()
        await self.link.stop()

    async def next(self, kind: type[E], accept: Callable[[E], bool] = lambda _: True) -> E:
        """Return the first new event of a kind that is accepted. Raises Interrupted and BenchError."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self._signals.pause(0)
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind) and accept(event):
                    return event
            if self._ends:
                raise BenchError(f"the trainer of the memory bench ended: {self._ends[0]}")
            if time.monotonic() > deadline:
                raise BenchError(f"the trainer of the memory bench said no {kind.__name__} in {WAIT_SECONDS:.0f} s")
            await asyncio.sleep(0.05)

    def _on_exit(self, code: int, failed: link.Failed | None) -> None:
        self._ends.append(failed.detail if failed else f"exit code {code}")


async def measure(signals: Interruptible, folder: Path, data: PreparedData, model: dict[str, Any], owned: int) -> Peak:
    """Start a trainer that owns the first `owned` experts, let it step and take a snapshot, and end it."""
    short = {"sequence_length": 64, "held_out_sequences": 1}
    draft = demo_draft(model=model, data=short, optimizer={"sequences": 2})
    layout = UnitLayout(draft.model, draft.sync.shared_shards)
    manifest = draft.seal(data.train, data.held_out, {unit.id: "0" * 64 for unit in layout.units})
    async with Watched(signals, layout, folder) as trainer:
        await trainer.link.start(_start_command(manifest, folder, data, owned), _values(layout))
        ready = await trainer.next(link.Ready)
        await trainer.next(link.Progress, lambda progress: progress.step >= STEPS)
        trainer.link.send(link.Snapshot(round=1))
        await trainer.next(link.SnapshotTaken)
        progress = await trainer.next(link.Progress)
    return Peak(
        owned=owned,
        trained_values=ready.trained_values,
        frozen_values=ready.frozen_values,
        peak_bytes=progress.peak_rss_bytes,
        predicted_bytes=predicted_bytes(ready.trained_values, ready.frozen_values),
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _values(layout: UnitLayout) -> dict[str, np.ndarray]:
    """Noise for every unit, float32 [unit.size]: views of one array, so that this process stays small."""
    noise = np.random.default_rng(0).standard_normal(max(unit.size for unit in layout.units), dtype=np.float32) * 0.02
    return {unit.id: noise[: unit.size] for unit in layout.units}


def _start_command(manifest: Manifest, folder: Path, data: PreparedData, owned: int) -> link.Start:
    return link.Start(
        manifest=manifest.canonical_bytes(),
        peer_id="bench",
        owned=tuple(f"expert-{index}" for index in range(owned)),
        round=0,
        position=0,
        shards={shard.hash: str(folder / f"{shard.hash}.shard") for shard in (*data.train, *data.held_out)},
        inbound=str(folder / "inbound"),
        snapshot=str(folder / "snapshot"),
        device="cpu",
    )
