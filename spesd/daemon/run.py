"""Entry of the daemon: event loop, signals, logs and exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from spesd.config.errors import ExitCode, ExpectedError
from spesd.config.peer import PeerConfig
from spesd.daemon.daemon import Daemon
from spesd.daemon.logs import configure_logs
from spesd.data.shards import DataError
from spesd.swarm.errors import SwarmError

log = structlog.get_logger(__name__)


def run(config: PeerConfig) -> int:
    """Be a daemon until told to stop; return the exit code. Raises ExpectedError for what a person has to mend."""
    configure_logs(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_live(config))
    except (SwarmError, DataError) as error:
        raise ExpectedError(str(error)) from None
    except OSError as error:
        raise ExpectedError(f"{error.strerror or error}: {error.filename or 'network or disk'}") from None
    return ExitCode.OK


async def _live(config: PeerConfig) -> None:
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        """Drain on the first; end at once on the second."""
        signals.append(number)
        if len(signals) == 1:
            log.info("stopping: finishing the round and keeping the work; a second signal ends at once")
            daemon.request_stop()
        else:
            daemon.kill()
            sys.stderr.write("spesd: ended at once, the open round is left\n")
            sys.stderr.flush()
            os._exit(ExitCode.RUNTIME)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await daemon.run()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
