"""The reader's side of the local API. Synchronous and light: `spesd status` must answer at once."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from spesd.api.schema import Answer, Error, Experts, LimitChange, Limits, Losses, Peers, Rounds, Status, Stop
from spesd.api.socket_path import find_socket_path
from spesd.config.errors import ExitCode, ExpectedError

MAX_ANSWER_BYTES = 64 << 20
"""4096 experts with their histories take 11 MB."""

A = TypeVar("A", bound=Answer)


class NotRunning(ExpectedError):
    """No daemon answers for this state dir."""

    exit_code = ExitCode.NOT_RUNNING

    def __init__(self, state_dir: Path) -> None:
        super().__init__(f"no daemon is running on {state_dir}; start one with `spesd start`, or give its --state-dir")


class ApiError(ExpectedError):
    """The daemon is there, but did not give a proper answer."""


class Client:
    """Asks the daemon of `state_dir`. Every wait ends after `timeout` seconds.

    All methods raise NotRunning or ApiError.
    """

    def __init__(self, state_dir: Path, timeout: float = 5.0) -> None:
        self.state_dir = state_dir
        self.timeout = timeout

    def status(self) -> Status:
        return self._ask("GET", "status", Status)

    def peers(self) -> Peers:
        return self._ask("GET", "peers", Peers)

    def experts(self) -> Experts:
        return self._ask("GET", "experts", Experts)

    def rounds(self) -> Rounds:
        return self._ask("GET", "rounds", Rounds)

    def loss(self) -> Losses:
        return self._ask("GET", "loss", Losses)

    def limit(self, change: LimitChange) -> Limits:
        """Change the caps on traffic; those that were not set in `change` stay."""
        return self._ask("POST", "limit", Limits, change.model_dump_json(exclude_unset=True))

    def stop(self) -> Stop:
        """Ask the daemon to drain and exit; returns at once."""
        return self._ask("POST", "stop", Stop)

    def _ask(self, method: str, name: str, answer: type[A], question: str | None = None) -> A:
        path = find_socket_path(self.state_dir)
        if path is None:
            raise NotRunning(self.state_dir)
        connection = _UnixConnection(path, self.timeout)
        try:
            connection.request(method, f"/v1/{name}", question)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES + 1)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotRunning(self.state_dir) from None
        except TimeoutError:
            raise ApiError(f"the daemon on {self.state_dir} did not answer {name} within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"the daemon on {self.state_dir} broke off while answering {name}: {error!r}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ApiError(f"the daemon on {self.state_dir} refused {name}: {_reason(response.status, body)}")
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            wrong = ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())
            raise ApiError(f"the answer to {name} does not fit this version of spesd: {wrong}") from None


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _reason(status: int, body: bytes) -> str:
    try:
        error = Error.model_validate_json(body)
    except ValidationError:
        return f"HTTP {status}"
    return f"{error.error}: {error.detail}" if error.detail else error.error
