"""How many payload bytes may be on their way to a peer: about as many as reach it within a second.

What is handed to p2pd waits in its buffers and the kernel's, where nothing overtakes it: on a thin line a message of a
round would wait for megabytes of blobs, and of a dozen blobs sent at once none would come in time. So each peer has a
window, which grows while payloads come through quickly, and is halved when they do not.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

from spesd.swarm.rate import LATER_COST, FairQueue

FIRST_BYTES, LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 10, 64 << 20
"""A window at first, and its bounds. A payload that is larger goes alone."""

QUICK_SECONDS, SLOW_SECONDS = 0.5, 1.0
"""Payloads that took less widen the window, those that took more narrow it, once a second at most."""

MAX_PEERS = 1024
"""Peer ids cost nothing to make, so no more idle windows are remembered."""


class Window:
    """The window of one peer. Use it from one event loop."""

    def __init__(self) -> None:
        self.size = FIRST_BYTES
        self.on_the_way = 0
        self._narrowed = -inf
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    async def enter(self, size: int, urgent: bool) -> None:
        """Return when `size` more bytes may go. What is not urgent gets a ninth beside what is."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.push(urgent, size, 1 if urgent else LATER_COST, turn)
        self._pump()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        """`size` bytes have come, or have been given up."""
        self.on_the_way -= size
        self._pump()

    def learn(self, size: int, seconds: float, now: float) -> None:
        """`size` bytes took so long. Call before they `leave`, which lets others go."""
        if seconds < QUICK_SECONDS:
            self.size = min(MOST_BYTES, self.size + size)
        elif seconds > SLOW_SECONDS and now > self._narrowed + SLOW_SECONDS:
            self.size, self._narrowed = max(LEAST_BYTES, self.size // 2), now

    def _pump(self) -> None:
        while self._queue:
            size, turn = self._queue.first()
            if not turn.done():  # else its waiter has been cancelled
                if self.on_the_way and self.on_the_way + size > self.size:
                    return
                self.on_the_way += size
                turn.set_result(None)
            self._queue.pop()


class Windows:
    """The windows of all peers, by `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: OrderedDict[str, Window] = OrderedDict()

    @asynccontextmanager
    async def turn(self, peer: str, size: int, urgent: bool) -> AsyncIterator[None]:
        """Wait until `size` payload bytes may go to `peer`; they are on their way until the block ends.

        From a block that ends with an error nothing is learned, unless it took long.
        """
        window = self._window(peer)
        await window.enter(size, urgent)
        began, least = self._clock(), QUICK_SECONDS
        try:
            yield
            least = 0.0
        finally:
            now = self._clock()
            window.learn(size, max(now - began, least), now)
            window.leave(size)

    @property
    def on_the_way(self) -> dict[str, int]:
        """Payload bytes on their way to each peer. Where some wait for their turn, others are on their way."""
        return {peer: window.on_the_way for peer, window in self._windows.items() if window.on_the_way}

    def _window(self, peer: str) -> Window:
        window = self._windows.setdefault(peer, Window())
        self._windows.move_to_end(peer)
        while len(self._windows) > MAX_PEERS and not (oldest := next(iter(self._windows.items())))[1].on_the_way:
            del self._windows[oldest[0]]
        return window
