"""What the verbs share: stdout carries data, stderr carries talk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

WIDTH_OF_A_PIPE = 160
"""Columns of a table that does not go to a terminal."""

UNITS = ("B", "kB", "MB", "GB", "TB")


def console() -> Console:
    """A rich console on stdout."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE, highlight=False, soft_wrap=False)


def print_json(answer: BaseModel) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(answer.model_dump_json() + "\n")
    sys.stdout.flush()


def talk(message: str) -> None:
    """One message for people, on stderr."""
    sys.stderr.write(f"spesd: {message}\n")
    sys.stderr.flush()


def amount(count: float) -> str:
    """Bytes for people: `12.3 MB`, in powers of 1000."""
    for unit in UNITS[:-1]:
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {UNITS[-1]}"


def duration(seconds: float) -> str:
    """`3 d 4 h`, `4 h 12 min`, `12 min 5 s`, `5 s`."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2] if value or first == len(parts) - 1)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none yet."""
    return "–" if value is None else f"{value:.{digits}f}"
