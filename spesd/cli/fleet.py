"""Several daemons on this machine that start and end together, whatever happens in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from spesd.api.schema import Status
from spesd.api.socket_path import remove_socket
from spesd.cli.launch import Daemon, command
from spesd.config.peer import PeerConfig
from spesd.daemon.state_dir import StateDir
from spesd.swarm.socket_files import remove_stale_sockets

DRAIN_SECONDS = 20.0
"""A daemon drains this long before it is killed."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked us to end; `exit_code` is what a shell expects then."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Interruptible:
    """Context in which signals only end the waits made with `pause`, so that no clean-up is cut short."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Interrupted when a signal has come, before or meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            if self.received:
                raise Interrupted(self.received[0])
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


class Fleet:
    """Daemons with state dirs `peer-0`, `peer-1`, … under `folder`. Leaving the context ends them all."""

    def __init__(
        self,
        folder: Path,
        signals: Interruptible,
        argv: Callable[[PeerConfig], Sequence[str]] = command,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self.folder = folder
        self.signals = signals
        self.daemons: list[Daemon] = []
        self.faults: list[str] = []
        self._argv = argv
        self._drain_seconds = drain_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def spawn(self, **settings: Any) -> Daemon:
        """Start one more daemon. `settings` are fields of PeerConfig."""
        config = PeerConfig(state_dir=self.folder / f"peer-{len(self.daemons)}", **settings)
        # What a killed daemon leaves in its temp folder goes away with our own folder.
        temp = self.folder / "tmp"
        temp.mkdir(exist_ok=True)
        daemon = Daemon.spawn(config, self._argv(config), {"TMPDIR": str(temp)})
        self.daemons.append(daemon)
        return daemon

    def statuses(self) -> list[Status | None]:
        """One status for each daemon. Raises DaemonExited when one is gone."""
        for daemon in self.daemons:
            daemon.check_alive()
        return [daemon.status() for daemon in self.daemons]

    def stop(self) -> None:
        """Let all drain; what is left after the deadline, or at a second signal, is killed. `faults` names it."""
        draining = [daemon for daemon in self.daemons if daemon.process.poll() is None]
        for daemon in draining:
            daemon.terminate()
        deadline = time.monotonic() + self._drain_seconds
        while any(daemon.process.poll() is None for daemon in draining):
            if time.monotonic() > deadline or len(self.signals.received) > 1:
                break
            time.sleep(0.1)
        for number, daemon in enumerate(self.daemons):
            if daemon in draining and daemon.process.poll():
                self.faults.append(f"peer {number} ended with exit code {daemon.process.returncode}")
            self.faults += [f"peer {number} left {name}, which was killed" for name in daemon.kill()]
            remove_socket(daemon.client.state_dir)
            remove_stale_sockets(StateDir(daemon.client.state_dir).identity)
        self.daemons.clear()
