"""The demo's swarm beside a single daemon that takes as many steps as each member did: real processes, real network."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from bench.report import BenchError, Result
from spesd.api.schema import Status
from spesd.cli.console import number, talk
from spesd.cli.demo import READY_SECONDS, run_demo
from spesd.cli.demo_report import summarise
from spesd.cli.fleet import Fleet, Interruptible
from spesd.config.files import load_draft

if TYPE_CHECKING:
    from rich.table import Table

MANIFEST = Path("peer_configs/demo.toml")
PEERS, TRAIN_EXPERTS, SECONDS = 4, 3, 180.0

ALONE_SECONDS = 900.0
"""A single daemon that has not taken its steps by then is on a machine that measures nothing."""


class LiveResult(Result):
    """Held-out loss in nats per token: the swarm's is the mean of what its members show."""

    swarm_loss: float
    alone_loss: float
    ratio: float
    tokens: int
    rounds: int
    hashes_agree: bool

    def table(self) -> Table:
        from rich.table import Table

        table = Table("", "held-out loss", title=f"after {self.tokens} tokens of each peer, {self.rounds} rounds")
        table.add_row(f"each of {PEERS} peers, {TRAIN_EXPERTS} experts trained", number(self.swarm_loss))
        table.add_row("one daemon alone, all experts trained", number(self.alone_loss))
        return table


def run(
    signals: Interruptible, manifest: Path = MANIFEST, seconds: float = SECONDS, alone_seconds: float = ALONE_SECONDS
) -> LiveResult:
    """Train the swarm, then the single daemon. Raises Interrupted, BenchError, and what the demo raises."""
    tracks = run_demo(manifest, PEERS, TRAIN_EXPERTS, seconds)
    summary = summarise(tracks)
    losses = [loss for loss in summary.loss_last if loss is not None]
    if not losses:
        raise BenchError("no member of the swarm has a held-out loss")
    tokens = round(mean(track.status.trainer.tokens for track in tracks if track.status is not None))
    talk(f"one daemon alone, until it has trained on {tokens} tokens")
    alone = _alone(signals, manifest, tokens, alone_seconds)
    swarm = mean(losses)
    agree = summary.hashes_agree
    return LiveResult(
        targets={"better": swarm < alone, "agree": agree},
        swarm_loss=swarm,
        alone_loss=alone,
        ratio=swarm / alone,
        tokens=tokens,
        rounds=min(summary.rounds),
        hashes_agree=agree,
    )


def _alone(signals: Interruptible, manifest: Path, tokens: int, seconds: float) -> float:
    """Held-out loss of one daemon that trains every expert, at its first evaluation after `tokens`."""
    experts = load_draft(manifest).model.experts
    with tempfile.TemporaryDirectory(prefix="spesd-bench-") as folder, Fleet(Path(folder), signals) as fleet:
        daemon = fleet.spawn(manifest=manifest, listen=("/ip4/127.0.0.1/tcp/0",), train_experts=experts, threads=1)
        daemon.wait_ready(READY_SECONDS, signals.pause)
        deadline = time.monotonic() + seconds
        reached: int | None = None
        while time.monotonic() < deadline:
            (status,) = fleet.statuses()
            if status is not None and status.trainer.tokens >= tokens and status.trainer.held_out is not None:
                reached = _round(status) if reached is None else reached
                if _round(status) > reached:
                    return status.trainer.held_out.loss
            signals.pause(0.2)
    raise BenchError(f"the single daemon did not train on {tokens} tokens in {seconds:.0f} s")


def _round(status: Status) -> int:
    """Round of the newest evaluation."""
    held_out = status.trainer.held_out
    return held_out.round if held_out is not None else -1
