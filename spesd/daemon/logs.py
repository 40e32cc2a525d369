"""Logs: for people on a terminal, JSON lines otherwise; always on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure_logs(level: str, form: Literal["auto", "human", "json"]) -> None:
    """Set up structlog, and route what libraries log through the standard module at warning level into it."""
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
    ]
    if human:
        render: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
