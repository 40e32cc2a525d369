"""What the trainer counts: steps, tokens, losses, and where its time goes."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from spesd.train.link import Progress

TIMED = ("step", "snapshot", "load", "evaluate")
"""What the trainer's seconds are spent on."""


@dataclass
class Window:
    """Steps since something happened, and their mean loss."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    losses: int = 0

    @property
    def loss(self) -> float | None:
        """Mean loss of the steps whose gradient was finite, None without one."""
        return self.loss_sum / self.losses if self.losses else None


@dataclass
class Meters:
    """Totals since the process began, and windows since the last snapshot and the last report."""

    report_seconds: float = 1.0
    steps: int = 0
    skipped: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMED, 0.0))
    since_snapshot: Window = field(default_factory=Window)
    _since_report: Window = field(default_factory=Window)
    _reported_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of a block to `seconds[what]`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - began

    def count_step(self, tokens: int, loss: float | None) -> None:
        """Count a step; `loss` is None when it was skipped for a gradient that was not finite."""
        self.steps += 1
        self.tokens += tokens
        self.skipped += loss is None
        for window in (self.since_snapshot, self._since_report):
            window.steps += 1
            window.tokens += tokens
            if loss is not None:
                window.loss_sum += loss
                window.losses += 1

    def take_snapshot_window(self) -> Window:
        """Return the window since the last snapshot and begin a new one."""
        window, self.since_snapshot = self.since_snapshot, Window()
        return window

    def report(self, position: int) -> Progress | None:
        """Return a report when one is due, and begin the next one's window."""
        now = time.monotonic()
        elapsed = now - self._reported_at
        if elapsed < self.report_seconds:
            return None
        window, self._since_report, self._reported_at = self._since_report, Window(), now
        return Progress(
            step=self.steps,
            skipped=self.skipped,
            tokens=self.tokens,
            position=position,
            loss=window.loss,
            tokens_per_second=window.tokens / elapsed,
            seconds=self.seconds["step"],
            snapshot_seconds=self.seconds["snapshot"],
            load_seconds=self.seconds["load"],
            evaluate_seconds=self.seconds["evaluate"],
            peak_rss_bytes=peak_rss_bytes(),
        )


def peak_rss_bytes() -> int:
    """Largest resident memory that this process has had.

    On Linux from the process's own high-water mark: `ru_maxrss` outlives exec, and would tell the parent's.
    """
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
