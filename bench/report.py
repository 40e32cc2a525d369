"""What every bench returns: figures for scripts, a table for people, and which targets were met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from spesd.cli.console import talk
from spesd.cli.fleet import Interrupted
from spesd.config.errors import ExpectedError

if TYPE_CHECKING:
    from rich.table import Table


class BenchError(ExpectedError):
    """A bench could not measure what it should: nothing is claimed then."""


def exit_code(work: Callable[[], int]) -> int:
    """The exit code of a bench's work; what ends it early is told in a line."""
    try:
        return work()
    except Interrupted as interrupted:
        talk(f"{interrupted}; everything that was started is stopped")
        return interrupted.exit_code
    except ExpectedError as error:
        talk(str(error))
        return error.exit_code


class Result(BaseModel, ABC):
    """Figures of one bench. Fields are keys of the JSON object and stable; see `bench/README.md`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    targets: dict[str, bool]
    """Each promise that was checked, and whether it was kept."""

    @property
    def met(self) -> bool:
        return all(self.targets.values())

    @abstractmethod
    def table(self) -> Table:
        """The figures for people."""
