"""The daemon's end of the trainer: a process started by exec, a command pipe, and units in shared memory.

Commands go out strictly in order. A unit's part of the `inbound` file belongs to the trainer from the command that
hands it over until the trainer has answered, and a command that needs it again waits for that in its place in the
queue; so a snapshot always has in it every shift that was asked for before.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

from spesd.model.units import UnitLayout
from spesd.sync.codec import Values
from spesd.sync.ledger import UnitId
from spesd.train import link
from spesd.train.exchange import UnitFile

log = structlog.get_logger(__name__)

EXIT_SECONDS = 5.0
"""Time that a stopped trainer has to end, before it is killed."""

Mode = Literal["add", "replace"]


@dataclass(slots=True)
class _Load:
    """Values that wait until their units' parts of `inbound` are free."""

    mode: Mode
    round: int
    values: dict[UnitId, Values] = field(default_factory=dict)


class TrainerLink:
    """One run of the trainer process. `on_event` gets its events, `on_exit` its exit code and what it last said."""

    def __init__(
        self,
        layout: UnitLayout,
        inbound: Path,
        snapshot: Path,
        on_event: Callable[[link.Event], None],
        on_exit: Callable[[int, link.Failed | None], None],
    ) -> None:
        self._layout = layout
        self._inbound = UnitFile.create(inbound, layout)
        self._inbound.reserve(unit.id for unit in layout.units)  # a full disk is an error here, and a SIGBUS later
        self._snapshot = UnitFile.create(snapshot, layout)
        self._on_event, self._on_exit = on_event, on_exit
        self._queue: deque[_Load | link.Command] = deque()
        self._lent: set[UnitId] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, command: link.Start, values: Mapping[UnitId, Values]) -> None:
        """Start the process with these values of all units. Raises OSError."""
        for unit, data in values.items():
            self._inbound.values(unit)[:] = data
        self._lent = set(values)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spesd.train.process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._task = asyncio.create_task(self._listen(self._process))
        self._write(command)

    def load(self, values: Mapping[UnitId, Values], mode: Mode, round_: int) -> None:
        """Add to, or replace, the trainer's values of these units."""
        last = self._queue[-1] if self._queue else None
        if isinstance(last, _Load) and (last.mode, last.round) == (mode, round_) and not last.values.keys() & values:
            last.values |= values
        else:
            self._queue.append(_Load(mode, round_, dict(values)))
        self._pump()

    def send(self, command: link.Command) -> None:
        """Queue any other command."""
        self._queue.append(command)
        self._pump()

    def snapshot(self, unit: UnitId) -> Values:
        """View of the trainer's values of a unit at its last snapshot, float32 [size]."""
        return self._snapshot.values(unit)

    async def stop(self, seconds: float = EXIT_SECONDS) -> None:
        """Ask the process to end; kill it if it has not by then."""
        if self._process is None or self._task is None:
            return
        self.send(link.Stop())
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            log.warning("trainer did not stop in time and is killed", pid=self.pid, seconds=seconds)
        self.kill()
        await self._task

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Write queued commands, up to one whose units are still lent to the trainer."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Load):
                if self._lent & head.values.keys():
                    return
                for unit, values in head.values.items():
                    self._inbound.values(unit)[:] = values
                self._lent |= head.values.keys()
                self._write(link.Load(units=tuple(head.values), mode=head.mode, round=head.round))
            else:
                self._write(head)
            self._queue.popleft()

    def _write(self, command: link.Command) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):  # its end is noticed by the listener
                self._process.stdin.write(link.encode(command))

    def _give_back(self, units: Iterable[UnitId]) -> None:
        self._lent -= set(units)
        self._pump()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        failed: link.Failed | None = None
        stream = process.stdout
        assert stream is not None
        try:
            while True:
                event = await link.read_event(stream)
                match event:
                    case link.Ready():
                        self._on_event(event)
                        self._give_back(self._layout.by_id)
                        continue
                    case link.Loaded():
                        self._give_back(event.units)
                    case link.Stopped():
                        self._stopped.set()
                    case link.Failed():
                        failed = event
                self._on_event(event)
        except asyncio.IncompleteReadError:
            pass
        except link.LinkError as error:
            log.error("trainer said something unreadable and is killed", reason=str(error))
            self.kill()
        code = await process.wait()
        self._stopped.set()
        self._on_exit(code, failed)
