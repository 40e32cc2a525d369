"""How long a peer waits for the others, from how long they took before; and how many steps a round is worth."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

from spesd.config.manifest import SyncConfig

KEPT, LEAST = 64, 8
"""Times that are remembered, and how many must be known before they count."""

SPREADS = 6.0
"""Deviations beyond the median that are still waited for: about four standard deviations of a normal distribution."""

FLOOR = 0.2
"""Share of a setting of the manifest that is always waited for."""

PACKET_FLOOR = 0.5
"""The same for packets: a second packet made while the first is on its way is a fork, which costs somebody a round."""

REMEMBERED = 8
"""Rounds over whose time the pace is reckoned."""


class Patience:
    """Seconds to wait: median plus SPREADS times the median deviation of recent times, from `least` to `limit`."""

    def __init__(self, limit: float, least: float) -> None:
        self.limit, self._least = limit, least
        self._times: deque[float] = deque(maxlen=KEPT)

    def saw(self, seconds: float) -> None:
        """Something came after so long."""
        self._times.append(seconds)

    @property
    def seconds(self) -> float:
        """The limit itself until enough is known."""
        if len(self._times) < LEAST:
            return self.limit
        middle = median(self._times)
        deviation = median(abs(time - middle) for time in self._times)
        return min(self.limit, max(self._least, middle + SPREADS * deviation))


class Pace:
    """How many local steps a peer takes before it asks for a round.

    As many as keep the time of a round's traffic under `comm_share` of the time between rounds, from `local_steps` to
    `max_local_steps`.
    """

    def __init__(self, settings: SyncConfig) -> None:
        self._settings = settings
        self._traffic: deque[float] = deque(maxlen=REMEMBERED)
        self._clock: deque[tuple[float, int]] = deque(maxlen=KEPT)
        self._steps = 0

    def stepped(self, now: float, steps: int) -> None:
        """The trainer has taken so many more steps."""
        self._steps += steps
        self._clock.append((now, self._steps))

    def ended(self, seconds: float) -> None:
        """A round took so long from its roster to the last commit here."""
        self._traffic.append(seconds)

    @property
    def needed(self) -> int:
        """Steps that make this peer ready for the next round."""
        least, most = self._settings.local_steps, self._settings.max_local_steps
        if most <= least or len(self._traffic) < REMEMBERED or len(self._clock) < 2:
            return least
        (first, before), (last, after) = self._clock[0], self._clock[-1]
        if last <= first or after <= before:
            return least
        wanted = median(self._traffic) / self._settings.comm_share * (after - before) / (last - first)
        return max(least, min(most, ceil(wanted)))
