"""Contributions that came when their packet was made already: a later packet of the unit takes them up.

A peer with a slow line would else hardly ever be in time. What it sent is a part of its unaccepted work, whichever
round accepts it, as long as nothing else of it was accepted since: its next contribution holds the same work again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spesd.sync.effects import Origin
from spesd.sync.ledger import Ledger, PeerId, UnitId

MAX_AGE = 4
"""Turns of a unit after which a contribution is too old."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A contribution, and for what it was made."""

    origin: Origin
    blob: str


class Belated:
    """The newest of each peer and unit. `max_age` in rounds. What is dropped is returned, to be discarded."""

    def __init__(self, ledger: Ledger, max_age: int) -> None:
        self._ledger, self._max_age = ledger, max_age
        self._kept: dict[tuple[UnitId, PeerId], Kept] = {}

    def keep(self, unit: UnitId, peer: PeerId, origin: Origin, blob: str) -> list[str]:
        """It came too late for its own packet."""
        old = self._kept.get((unit, peer))
        if old is not None and old.origin.round >= origin.round:
            return [blob] if blob != old.blob else []
        self._kept[unit, peer] = Kept(origin, blob)
        return [old.blob] if old is not None and old.blob != blob else []

    def usable(self, unit: UnitId, peers: Iterable[PeerId]) -> dict[PeerId, Kept]:
        """What may go into the next packet of `unit`, by peer."""
        rows = ((peer, self._kept.get((unit, peer))) for peer in peers)
        return {peer: kept for peer, kept in rows if kept is not None and self._is_open(unit, peer, kept)}

    def forget(self, newest: int) -> list[str]:
        """Drop what has been accepted or overtaken, and what is too old in round `newest`."""
        gone = [
            key
            for key, kept in self._kept.items()
            if kept.origin.round < newest - self._max_age or not self._is_open(*key, kept)
        ]
        return [self._kept.pop(key).blob for key in gone]

    def _is_open(self, unit: UnitId, peer: PeerId, kept: Kept) -> bool:
        """Whether its base is on our chain, and nothing of `peer` was accepted since."""
        since = self._ledger[unit].after(kept.origin.base)
        return since is not None and not any(entry.has(peer) for entry in since)
