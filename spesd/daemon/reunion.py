"""When to look for known peers that are not here. Pure: the clock is handed in."""

from __future__ import annotations

from collections.abc import Iterable

from spesd.sync.ledger import PeerId

SHORTEST, LONGEST = 5.0, 60.0
"""Seconds between two dials of those who are absent."""

SHARE = 0.1
"""The pause grows to this share of the time since a peer was last lost: a short split is over soon after it heals."""


class Reunion:
    """Tells when absent peers are to be dialled again."""

    def __init__(self, now: float) -> None:
        self._lost = self._dialled = now
        self._present: frozenset[PeerId] = frozenset()

    def saw(self, now: float, present: Iterable[PeerId]) -> None:
        """These are here, as the directory says."""
        present = frozenset(present)
        if self._present - present:
            self._lost = now
        self._present = present

    def dialled(self, now: float) -> None:
        """The absent have just been dialled."""
        self._dialled = now

    def seconds_left(self, now: float) -> float:
        """Until they are to be dialled again, unless another peer is lost before; not above 0 when it is time."""
        pause = min(LONGEST, max(SHORTEST, SHARE * (self._dialled - self._lost)))
        return self._dialled + pause - now
