"""The trainer never waits for the network: its speed with rounds, beside its speed without them.

The same two daemons run several times in turn, with rounds and with a `local_steps` that is never reached, so that slow
changes of the machine fall on both. The trainer that is measured has a core of its own; its daemon, p2pd, the other
peer and this process share the rest. Held-out evaluation is left out of both: it is work of its own, not a cost of
rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from bench.cores import bind, one_core_apart, wanting_seconds
from bench.drafts import demo_draft, write_draft
from bench.report import BenchError, Result
from spesd.api.schema import RoundRecord, Status, UnitResult
from spesd.cli.console import talk
from spesd.cli.fleet import Fleet, Interruptible
from spesd.cli.launch import Daemon

if TYPE_CHECKING:
    from rich.table import Table

WINDOW_SECONDS, PAIRS = 20.0, 3
"""How long each measurement lasts, and how many there are of each kind."""

READY_SECONDS = 120.0
SETTLE_SECONDS = 5.0
"""Between the moment that both peers train and the measurement."""

POLL_SECONDS = 0.1
NEVER = 1 << 40
"""More local steps, and more rounds between evaluations, than there will ever be."""

OWNED = 3
"""Experts that each peer trains, as in the demo."""

SLOW_TOKENS_PER_SECOND = 1500.0
"""Pace of the other peer, which shares its core with both daemons."""

LEAST_RATIO, MOST_SHARE, LEAST_ROUNDS = 0.95, 0.02, 3
"""Speed with rounds over speed without; share of time for snapshots and shifts; rounds that each window must commit."""

MOST_WAITING = 0.01
"""Share of the time that the trainer may wait for anything but its core."""


class Window(BaseModel):
    """One measurement. Shares of snapshots and shifts are of the trainer's time since it started.

    `waiting_share` is the share of the window in which the trainer neither ran nor was ready to: the share that it
    waited for anything but its core. None where the system does not count it.
    """

    model_config = ConfigDict(frozen=True)

    tokens_per_s: float
    rounds: int
    snapshot_share: float
    load_share: float
    waiting_share: float | None


class TrainerResult(Result):
    """Both kinds of windows, in the order in which they ran."""

    without_rounds: tuple[Window, ...]
    with_rounds: tuple[Window, ...]
    ratio: float
    snapshot_share: float
    load_share: float
    rounds: int
    pinned: bool

    def table(self) -> Table:
        from rich.table import Table

        title = "the trainer, on a core of its own" if self.pinned else "the trainer, cores NOT kept apart"
        table = Table("", "tokens/s", "ratio", "rounds", "snapshots", "shifts", "waiting", title=title)
        for index, (alone, together) in enumerate(zip(self.without_rounds, self.with_rounds, strict=True), 1):
            table.add_row(
                f"without rounds {index}",
                f"{alone.tokens_per_s:.0f}",
                "",
                f"{alone.rounds}",
                "",
                "",
                _percent(alone.waiting_share),
            )
            shares = [_percent(s) for s in (together.snapshot_share, together.load_share, together.waiting_share)]
            table.add_row(f"with rounds {index}", f"{together.tokens_per_s:.0f}", "", f"{together.rounds}", *shares)
        shares = [_percent(self.snapshot_share), _percent(self.load_share)]
        table.add_row("all", "", f"{self.ratio:.3f}", f"{self.rounds}", *shares)
        wanted = (
            f">= {LEAST_RATIO}",
            f">= {LEAST_ROUNDS} each",
            f"< {MOST_SHARE:.0%}",
            "with these",
            f"< {MOST_WAITING:.0%}",
        )
        table.add_row("wanted", "", *wanted)
        return table


class Speed:
    """Tokens per second between the first and the last change of a counter that is looked at often."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def observe(self, tokens: int, at: float) -> None:
        """Take in the counter at `at` (seconds). Its first value is of unknown age: it counts from its first change."""
        changed = self._seen is not None and tokens != self._seen
        self._seen = tokens
        if changed:
            self._last = (at, tokens)
            self._first = self._first or self._last

    @property
    def is_known(self) -> bool:
        """Whether two changes were seen."""
        return self._first != self._last

    def tokens_per_second(self) -> float:
        """Raises BenchError when fewer than two changes were seen."""
        if self._first is None or self._last is None or not self.is_known:
            raise BenchError("the trainer reported no progress while it was measured; is the machine busy?")
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def run(signals: Interruptible, seconds: float = WINDOW_SECONDS, pairs: int = PAIRS) -> TrainerResult:
    """Measure in turn without and with rounds. Raises Interrupted, BenchError, and ExpectedError of the daemons."""
    without: list[Window] = []
    together: list[Window] = []
    with one_core_apart() as core:
        for _ in range(pairs):
            for rounds, windows in ((False, without), (True, together)):
                windows.append(measure(signals, core, rounds, seconds))
                talk(f"{'with' if rounds else 'without'} rounds: {windows[-1].tokens_per_s:.0f} tokens/s")
    return compare(without, together, pinned=core is not None)


def compare(without: Sequence[Window], together: Sequence[Window], pinned: bool) -> TrainerResult:
    """The figures over all windows, which last equally long."""
    ratio = median(w.tokens_per_s for w in together) / median(w.tokens_per_s for w in without)
    snapshots, loads = fmean(w.snapshot_share for w in together), fmean(w.load_share for w in together)
    return TrainerResult(
        targets={
            "ratio": ratio >= LEAST_RATIO,
            "share": snapshots + loads < MOST_SHARE,
            "waiting": all((w.waiting_share or 0.0) < MOST_WAITING for w in together),
            "rounds": all(w.rounds >= LEAST_ROUNDS for w in together) and not any(w.rounds for w in without),
        },
        without_rounds=tuple(without),
        with_rounds=tuple(together),
        ratio=ratio,
        snapshot_share=snapshots,
        load_share=loads,
        rounds=sum(w.rounds for w in together),
        pinned=pinned,
    )


def measure(signals: Interruptible, core: int | None, rounds: bool, seconds: float) -> Window:
    """Start two daemons, watch the first one's trainer on `core`, and end them."""
    sync = {"evaluate_rounds": NEVER} | ({} if rounds else {"local_steps": NEVER})
    with tempfile.TemporaryDirectory(prefix="spesd-bench-") as folder:
        draft = Path(folder, "draft.toml")
        write_draft(demo_draft(sync=sync), draft)
        fleet = Fleet(Path(folder), signals)
        with fleet:
            founder = _start(fleet, draft)
            pid = _trainer_pid(founder)
            if core is not None:
                bind(pid, core)
            signals.pause(SETTLE_SECONDS)
            window = _watch(fleet, founder, pid, seconds)
    if fleet.faults:
        raise BenchError(f"the daemons did not stop cleanly: {'; '.join(fleet.faults)}")
    return window


def _start(fleet: Fleet, draft: Path) -> Daemon:
    """Start two peers, wait until both train and know each other, and return the founder."""
    local: dict[str, Any] = {"listen": ("/ip4/127.0.0.1/tcp/0",), "train_experts": OWNED, "threads": 1, "device": "cpu"}
    founder = fleet.spawn(manifest=draft, **local)
    addresses = founder.wait_ready(READY_SECONDS, fleet.signals.pause).addresses
    volunteer = fleet.spawn(join=addresses[:1], max_tokens_per_second=SLOW_TOKENS_PER_SECOND, **local)
    volunteer.wait_ready(READY_SECONDS, fleet.signals.pause)
    deadline = time.monotonic() + READY_SECONDS
    while not all(status and status.trainer.tokens and status.peers_live == 2 for status in fleet.statuses()):
        if time.monotonic() > deadline:
            raise BenchError(f"the two peers do not both train and know each other after {READY_SECONDS:.0f} s")
        fleet.signals.pause(POLL_SECONDS)
    return founder


def _watch(fleet: Fleet, founder: Daemon, pid: int, seconds: float) -> Window:
    speed, before = Speed(), _newest_round(founder)
    began, wanted_before = time.monotonic(), wanting_seconds(pid)
    while (now := time.monotonic()) < began + seconds:
        for daemon in fleet.daemons:
            daemon.check_alive()
        if status := founder.status():
            speed.observe(status.trainer.tokens, now)
        fleet.signals.pause(POLL_SECONDS)
    if _trainer_pid(founder) != pid:
        raise BenchError(f"the trainer was restarted while it was measured; its daemon says:\n{founder.tail()}")
    waiting = None
    if (wanted := wanting_seconds(pid)) is not None and wanted_before is not None:
        waiting = max(0.0, 1 - (wanted - wanted_before) / (time.monotonic() - began))
    trainer = _status(founder).trainer
    return Window(
        tokens_per_s=speed.tokens_per_second(),
        rounds=sum(_is_shared(record) for record in founder.client.rounds().rounds if record.number > before),
        snapshot_share=trainer.snapshot_share,
        load_share=trainer.load_share,
        waiting_share=waiting,
    )


def _trainer_pid(daemon: Daemon) -> int:
    pid = _status(daemon).trainer.pid
    if pid is None:
        raise BenchError(f"the daemon (pid {daemon.process.pid}) has no trainer; it says:\n{daemon.tail()}")
    return pid


def _is_shared(record: RoundRecord) -> bool:
    """Whether both peers took part in a round and something was committed."""
    return len(record.members) > 1 and any(one.result is UnitResult.COMMITTED for one in record.results.values())


def _newest_round(daemon: Daemon) -> int:
    return max((record.number for record in daemon.client.rounds().rounds), default=0)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def _status(daemon: Daemon) -> Status:
    status = daemon.status()
    if status is None:
        daemon.check_alive()
        raise BenchError(f"the daemon (pid {daemon.process.pid}) does not answer; see {daemon.log}")
    return status
