"""The state dir: where one daemon keeps everything, and the lock that makes it one daemon."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from spesd.config.errors import ExitCode, ExpectedError


class AlreadyRunning(ExpectedError):
    """Another daemon holds the state dir."""

    exit_code = ExitCode.ALREADY_RUNNING


class StateDir:
    """Paths inside a state dir (mode 0700), and its lock. Hold the lock before you write anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / "lock", is_singleton=False)

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def manifest(self) -> Path:
        """Canonical bytes of the manifest of the run to which this state dir belongs."""
        return self.path / "manifest.json"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def ledger(self) -> Path:
        """Folder of the units' chains."""
        return self.path / "ledger"

    @property
    def known_peers(self) -> Path:
        return self.path / "known_peers.json"

    @property
    def traffic(self) -> Path:
        """Bytes per day."""
        return self.path / "traffic.json"

    @property
    def progress(self) -> Path:
        """What this peer trained, and where it was."""
        return self.path / "progress.json"

    @property
    def unaccepted(self) -> Path:
        """Work that the swarm had not accepted when the daemon was stopped."""
        return self.path / "unaccepted.safetensors"

    @property
    def checkpoint(self) -> Path:
        """The trainer's optimizer moments."""
        return self.path / "optimizer.safetensors"

    @property
    def inbound(self) -> Path:
        return self.path / "inbound.f32"

    @property
    def snapshot(self) -> Path:
        return self.path / "snapshot.f32"

    def acquire(self) -> None:
        """Make the folder and take the lock. Raises AlreadyRunning with the holder's pid, or ExpectedError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise AlreadyRunning(
                f"a daemon (pid {self._holder()}) already runs on {self.path}; stop it with "
                f"`spesd stop --state-dir {self.path}`, or give this one another --state-dir"
            ) from None
        except OSError as error:
            reason = f"cannot use state dir {self.path}: {error.strerror}; choose another --state-dir"
            raise ExpectedError(reason) from None
        self._pid_file.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Give the lock back."""
        self._pid_file.unlink(missing_ok=True)
        self._lock.release()

    @property
    def _pid_file(self) -> Path:
        return self.path / "pid"

    def _holder(self) -> str:
        try:
            return self._pid_file.read_text().strip() or "unknown"
        except OSError:
            return "unknown"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, also when the power fails. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
