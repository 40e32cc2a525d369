"""Bounded concurrency with an order: so many at once in all and of each source, those that are urgent first."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(order=True)
class _Waiting:
    later: bool
    order: int
    source: str = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Gate:
    """Lets at most `capacity()` through at once, and `per_source` of them for one source."""

    def __init__(self, capacity: Callable[[], int], per_source: int) -> None:
        self._capacity = capacity
        self._per_source = per_source
        self._inside: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def slot(self, source: str, urgent: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        waiting = _Waiting(not urgent, next(self._order), source, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiting)
        self._admit()
        try:
            await waiting.turn
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._inside[source] -= 1
                self._inside += Counter()  # forgets sources of which none is inside
            self._admit()

    def _admit(self) -> None:
        room = self._capacity() - self._inside.total()
        for waiting in list(self._waiting):
            if room <= 0:
                return
            if not waiting.turn.done() and self._inside[waiting.source] < self._per_source:  # done: cancelled just now
                self._waiting.remove(waiting)
                self._inside[waiting.source] += 1
                waiting.turn.set_result(None)
                room -= 1
