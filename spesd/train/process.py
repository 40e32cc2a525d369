"""Entry of the trainer process: `python -m spesd.train.process`, started by the daemon with exec, never fork.

Commands come on standard input, events go to standard output, logs are JSON lines on standard error. The end of
standard input means that the daemon is gone: the process ends at once, in the middle of a step if need be.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO

import structlog

from spesd.train.link import Command, Event, FailureReason, LinkError, Start, Stop, encode, read_command

START_SECONDS = 60.0
EXIT_OK, EXIT_FAILED, EXIT_ORPHANED = 0, 1, 3


def main() -> int:
    """Run the trainer; return the process's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach whole groups of processes; the daemon decides
        signal.signal(number, signal.SIG_IGN)
    source, sink = take_pipes()
    configure_logging()
    log = structlog.get_logger("trainer")
    commands: SimpleQueue[Command | Exception] = SimpleQueue()
    Thread(target=read_commands, args=(source, commands), daemon=True).start()

    def send(event: Event) -> None:
        try:
            sink.write(encode(event))
            sink.flush()
        except BrokenPipeError:
            os._exit(EXIT_ORPHANED)

    # Imported only now, so that nothing that torch prints can get into the pipe.
    from spesd.train.failure import describe_failure
    from spesd.train.loop import Trainer

    try:
        Trainer(wait_for_start(commands), commands, send).run()
    except Exception as error:
        failed = describe_failure(error)
        unforeseen = failed.reason is FailureReason.INTERNAL
        log.error("trainer failed", reason=failed.reason, detail=failed.detail, exc_info=unforeseen)
        send(failed)
        return EXIT_FAILED
    return EXIT_OK


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Set the pipes aside and point descriptors 0 and 1 elsewhere, so that a stray print or input cannot touch them."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


def read_commands(source: BinaryIO, commands: SimpleQueue[Command | Exception]) -> None:
    """Queue commands until `Stop`; end the process at the end of the stream."""
    while True:
        try:
            command = read_command(source)
        except LinkError as error:
            commands.put(error)
            return
        if command is None:
            structlog.get_logger("trainer").warning("the daemon is gone, the trainer ends with it")
            os._exit(EXIT_ORPHANED)
        commands.put(command)
        if isinstance(command, Stop):
            return


def wait_for_start(commands: SimpleQueue[Command | Exception]) -> Start:
    """Return the first command. Raises LinkError when it is not `Start` or does not come in time."""
    try:
        command = commands.get(timeout=START_SECONDS)
    except Empty:
        raise LinkError(f"the daemon sent no start command in {START_SECONDS:.0f} s") from None
    if isinstance(command, Exception):
        raise command
    if not isinstance(command, Start):
        raise LinkError(f"the first command is {command.type}, not start")
    return command


def configure_logging() -> None:
    """JSON lines on standard error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the reading thread may be blocked in a read, which an ordinary exit could wait for
