"""What every bench returns: figures for scripts, a table for people, and which targets were met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from spesd.config.errors import ExpectedError

if TYPE_CHECKING:
    from rich.table import Table


class BenchError(ExpectedError):
    """A bench could not measure what it should: nothing is claimed then."""


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
