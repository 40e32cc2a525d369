"""Caps on traffic: a token bucket, a fair order among transfers that wait for it, and the wait itself."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spesd.swarm.wire import FRAME_BYTES

T = TypeVar("T")

BURST_BYTES = FRAME_BYTES
"""What a bucket holds: by so much a cap may be exceeded at any moment."""

LATER_COST = 8
"""A byte that is not urgent counts as so many in the fair order: it gets a ninth of the link beside an urgent one, and
is never starved, so that no stream dies of it."""

BYTES_PER_MBIT = 125_000


class TokenBucket:
    """At most `rate * t + burst` bytes in any window of `t` seconds. The clock is handed in, and may not run back."""

    def __init__(self, rate: float, now: float, burst: int = BURST_BYTES) -> None:
        """`rate` is in bytes per second, above 0. The bucket begins full."""
        self.rate = rate
        self.burst = burst
        self._tokens = float(burst)
        self._stamp = now

    def seconds_until(self, size: int, now: float) -> float:
        """How long until `size` bytes may pass, 0 if they may now. `size` is at most `burst`."""
        self._refill(now)
        return max(0.0, (size - self._tokens) / self.rate)

    def take(self, size: int, now: float) -> bool:
        """Let `size` bytes pass if they may."""
        self._refill(now)
        if size > self._tokens:
            return False
        self._tokens -= size
        return True

    def change(self, rate: float, now: float) -> None:
        """Go on at another rate."""
        self._refill(now)
        self.rate = rate

    def _refill(self, now: float) -> None:
        self._tokens = min(float(self.burst), self._tokens + (now - self._stamp) * self.rate)
        self._stamp = now


@dataclass(order=True)
class _Waiting(Generic[T]):
    finish: float
    order: int
    transfer: Hashable = field(compare=False)
    size: int = field(compare=False)
    item: T = field(compare=False)


class FairQueue(Generic[T]):
    """Who is next: self-clocked fair queueing (Golestani 1994), in which each transfer gets the same share of bytes."""

    def __init__(self) -> None:
        self._heap: list[_Waiting[T]] = []
        self._order = itertools.count()
        self._clock = 0.0
        self._finish: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, transfer: Hashable, size: int, cost: int, item: T) -> None:
        """Queue `size` bytes of `transfer`, each of which counts as `cost` bytes."""
        finish = max(self._clock, self._finish.get(transfer, 0.0)) + size * cost
        self._finish[transfer] = finish
        heapq.heappush(self._heap, _Waiting(finish, next(self._order), transfer, size, item))

    def first(self) -> tuple[int, T]:
        """Size and item that are next. Raises IndexError when nobody waits."""
        head = self._heap[0]
        return head.size, head.item

    def pop(self) -> T:
        """Remove and return the item that is next. Raises IndexError when nobody waits."""
        head = heapq.heappop(self._heap)
        self._clock = head.finish
        if self._finish[head.transfer] == head.finish:  # its last one: forgetting it changes nothing from here on
            del self._finish[head.transfer]
        return head.item


class Limiter:
    """One direction's cap, which can be changed at any time. Use it from one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bucket: TokenBucket | None = None
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._promised = 0

    @property
    def rate(self) -> float | None:
        """Bytes per second, None without a cap."""
        return self._bucket.rate if self._bucket else None

    def limit(self, rate: float | None) -> None:
        """Cap at `rate` bytes per second from now on; None lifts the cap. Raises ValueError unless it is above 0."""
        if rate is not None and not rate > 0:
            raise ValueError(f"a cap of {rate} bytes per second would stop all traffic; None lifts it")
        now = self._clock()
        if rate is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(rate, now)
        else:
            self._bucket.change(rate, now)
        self._pump()

    @contextmanager
    def promise(self, size: int) -> Iterator[None]:
        """Count `size` bytes as work to be done, until they have passed or have been given up."""
        self._promised += size
        try:
            yield
        finally:
            self._promised -= size

    def backlog_seconds(self) -> float:
        """How long it takes until all that is promised now has passed."""
        return self._promised / self._bucket.rate if self._bucket else 0.0

    async def wait(self, size: int, transfer: Hashable, urgent: bool) -> None:
        """Return when `size` more bytes of `transfer` may pass; those of one transfer keep their order."""
        for left in range(size, 0, -FRAME_BYTES):
            if self._bucket is None:
                return
            turn = asyncio.get_running_loop().create_future()
            self._queue.push(transfer, min(left, FRAME_BYTES), 1 if urgent else LATER_COST, turn)
            self._pump()
            await turn

    def _pump(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            size, turn = self._queue.first()
            if not turn.done():  # else its waiter has been cancelled
                now = self._clock()
                if self._bucket is not None and not self._bucket.take(size, now):
                    pause = self._bucket.seconds_until(size, now)
                    self._timer = asyncio.get_running_loop().call_later(pause, self._pump)
                    return
                turn.set_result(None)
            self._queue.pop()
