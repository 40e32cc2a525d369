"""Expected failures and the exit codes that a script may rely on."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `spesd`. Stable: a number never changes its meaning."""

    OK = 0
    RUNTIME = 1
    USAGE = 2
    NOT_RUNNING = 3
    ALREADY_RUNNING = 4
    CONFIG = 5
    CANNOT_JOIN = 6


class ExpectedError(Exception):
    """A failure that a person can understand and mend: printed as it is, without a traceback.

    Subclasses set `exit_code`. The message names what failed, the value at fault and the remedy.
    """

    exit_code: ExitCode = ExitCode.RUNTIME


class ConfigError(ExpectedError):
    """Something that a person wrote is wrong. `lines` holds one line for each mistake."""

    exit_code = ExitCode.CONFIG

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
