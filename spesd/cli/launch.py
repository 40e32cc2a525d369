"""Daemons as child processes: for `spesd start --detach` and for the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from spesd.api.client import ApiError, Client, NotRunning
from spesd.api.headline import headline
from spesd.api.schema import State, Status
from spesd.config.errors import ExitCode, ExpectedError
from spesd.config.peer import ENVIRONMENT_PREFIX, PeerConfig, flag_of

LOG = "daemon.log"
POLL_SECONDS = 0.2
KILL_SECONDS = 10.0
"""Bound on how long the kernel takes to end a killed process."""

LOG_TAIL_LINES = 5
NOT_READY = frozenset({State.STARTING, State.JOINING})


class DaemonExited(ExpectedError):
    """A daemon ended before it should. The exit code is its own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) - {ExitCode.OK} else ExitCode.RUNTIME


class NotReady(ExpectedError):
    """A daemon is alive, but not ready by the deadline."""


def command(config: PeerConfig) -> list[str]:
    """The command that starts a daemon with exactly this configuration, whatever file or environment there is."""
    argv = [sys.executable, "-m", "spesd.cli.main", "start", "--config", os.devnull]
    for name in PeerConfig.model_fields:
        value = getattr(config, name)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for one in values:
            if isinstance(one, bool):
                argv.append(flag_of(name) if one else flag_of(f"no_{name}"))
                continue
            argv += [flag_of(name), str(one.absolute() if isinstance(one, Path) else one)]
    return argv


@dataclass
class Daemon:
    """A running `spesd start`, in a session of its own: Ctrl-C in our terminal does not reach it."""

    process: subprocess.Popen[bytes]
    client: Client
    log: Path
    log_start: int = field(default=0, repr=False)

    @classmethod
    def spawn(
        cls, config: PeerConfig, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
    ) -> Daemon:
        """Start a daemon that writes to `daemon.log` in its state dir.

        `argv` replaces the command, `environ` is added to our own environment.
        """
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = config.state_dir / LOG
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        with log.open("ab") as file:
            start = file.tell()
            process = subprocess.Popen(
                argv or command(config),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, **(environ or {})},
            )
        return cls(process, Client(config.state_dir), log, start)

    def wait_ready(self, seconds: float, pause: Callable[[float], None] = time.sleep) -> Status:
        """Return the first status of a daemon that takes part. `pause` waits between two looks, and may raise.

        Raises DaemonExited when it ended, NotReady at the deadline; it then goes on trying.
        """
        deadline = time.monotonic() + seconds
        last = "its API does not answer yet"
        while time.monotonic() < deadline:
            self.check_alive()
            status = self.status()
            if status is not None:
                if status.state not in NOT_READY:
                    return status
                last = headline(status)
            pause(POLL_SECONDS)
        raise NotReady(
            f"the daemon (pid {self.process.pid}) is not ready after {seconds:g} s: {last}; "
            f"it goes on trying, see {self.log}; `spesd stop --state-dir {self.client.state_dir}` ends it"
        )

    def status(self) -> Status | None:
        """Its status, or None while it does not answer."""
        try:
            status = self.client.status()
        except (NotRunning, ApiError):
            return None
        # Another daemon on the same state dir may answer, while ours is about to say so and end.
        return status if status.pid == self.process.pid else None

    def check_alive(self) -> None:
        """Raise DaemonExited with the end of its log when the process is gone."""
        code = self.process.poll()
        if code is not None:
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            tail = self.tail() or "it wrote nothing"
            raise DaemonExited(f"the daemon ended {how}; the end of {self.log}:\n{tail}", code)

    def tail(self) -> str:
        """The last lines that this daemon wrote."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.log_start)
            return "".join(deque(file, LOG_TAIL_LINES)).rstrip()

    def terminate(self) -> None:
        """Ask it to drain and end; returns at once."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> list[str]:
        """End it and whatever is left of its session; return the names of what was still there."""
        left = session_members(self.process.pid)
        names = [f"{_name(member)} (pid {member.pid})" for member in left]
        deadline = time.monotonic() + KILL_SECONDS
        while left and time.monotonic() < deadline:
            for member in left:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            time.sleep(0.02)
            left = session_members(self.process.pid)
        self.process.wait(KILL_SECONDS)
        return names


def session_members(leader: int) -> list[psutil.Process]:
    """All live processes of the session that `leader` founded, also when it is gone itself."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "process"
