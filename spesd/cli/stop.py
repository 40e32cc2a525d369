"""`spesd stop`: end the daemon."""

from __future__ import annotations

import time
from typing import Annotated

import psutil
import typer

from spesd.api.client import Client
from spesd.cli.console import talk
from spesd.cli.options import ConfigFile, StateDir, Timeout, client_for
from spesd.config.errors import ExpectedError

POLL_SECONDS = 0.1


class StillRunning(ExpectedError):
    """The daemon did not end by the deadline."""


def stop(
    state_dir: StateDir = None,
    config: ConfigFile = None,
    timeout: Timeout = 5.0,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait until the process is gone.")] = 30.0,
) -> None:
    """Let the daemon finish or leave its round, write its state and exit; return when the process is gone."""
    pid = stop_and_wait(client_for(state_dir, config, timeout), wait)
    talk(f"stopped (pid {pid})")


def stop_and_wait(client: Client, seconds: float) -> int:
    """Ask the daemon to stop, wait until its process is gone, return its pid.

    Raises NotRunning, ApiError, or StillRunning at the deadline.
    """
    pid = client.stop().pid
    deadline = time.monotonic() + seconds
    while _alive(pid):
        if time.monotonic() > deadline:
            raise StillRunning(
                f"the daemon (pid {pid}) is still draining after {seconds:g} s; wait, or end it with kill -9 {pid}"
            )
        time.sleep(POLL_SECONDS)
    return pid


def _alive(pid: int) -> bool:
    """A zombie is gone: in a container nobody may ever collect it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
