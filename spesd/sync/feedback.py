"""Error feedback of a reducer: what encoding loses of its packets comes with a later one.

A contributor needs no such account: what its codec lost stays in its `theta - agreed`. A reducer makes no packet of the
same unit for some rounds, so it keeps what is owed: 4 bytes per value, of the units that it has lately reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spesd.sync.codec import Values
from spesd.sync.ledger import UnitId


@dataclass(frozen=True, slots=True)
class _Debt:
    """Float32 [size] that the packet of round `version` should have brought and did not."""

    version: int
    values: Values


class Feedback:
    """What this reducer's committed packets owe to their units. A debt older than `stale_rounds` is dropped."""

    def __init__(self, stale_rounds: int) -> None:
        self._stale_rounds = stale_rounds
        self._owed: dict[UnitId, _Debt] = {}
        self._made: dict[UnitId, tuple[str, _Debt | None]] = {}

    def owed(self, unit: UnitId, round_: int) -> Values | None:
        """What a packet of `unit` made in `round_` has to bring besides its contributions: float32 [size]."""
        debt = self._owed.get(unit)
        return None if debt is None or round_ - debt.version > self._stale_rounds else debt.values

    def made(self, unit: UnitId, version: int, packet: str, lost: Values) -> None:
        """A packet was made that falls short of its target by `lost`; it includes what was owed before."""
        self._made[unit] = packet, _Debt(version, lost) if np.any(lost) else None

    def committed(self, unit: UnitId, version: int, packet: str) -> None:
        """The unit took this packet, perhaps another reducer's. A packet of ours that was not taken owes nothing."""
        made, debt = self._made.pop(unit, ("", None))
        if made != packet:
            debt = self._owed.get(unit)
        if debt is None or version - debt.version >= self._stale_rounds:
            self._owed.pop(unit, None)
        else:
            self._owed[unit] = debt

    def forget(self, unit: UnitId) -> None:
        """The unit's state came from elsewhere: nobody knows what it lacks."""
        self._owed.pop(unit, None)
        self._made.pop(unit, None)
