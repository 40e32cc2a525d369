"""Fetches the blobs that the protocol asks for, so many at a time, and of each unit only what it asked for last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from spesd.swarm.blobs import BlobExchange
from spesd.swarm.errors import BlobUnavailable
from spesd.sync.effects import Fetch
from spesd.sync.ledger import UnitId

log = structlog.get_logger(__name__)

FETCHERS = 8
"""Blobs that are fetched at once of those that are urgent, and of the others."""

SLOWEST_LINK = 50_000
"""Bytes a second that a fetch must at least bring, beside `packet_seconds` to begin with."""


class Fetcher:
    """Tells `fetched` how each fetch ended, but for those that were overtaken by another of the same unit."""

    def __init__(self, exchange: BlobExchange, packet_seconds: float, fetched: Callable[[Fetch, bool], None]) -> None:
        self._exchange, self._packet_seconds, self._fetched = exchange, packet_seconds, fetched
        self._queues: dict[bool, asyncio.Queue[Fetch]] = {True: asyncio.Queue(), False: asyncio.Queue()}
        self._newest: dict[UnitId, Fetch] = {}
        self._running: dict[UnitId, asyncio.Task[bool]] = {}
        self._workers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to work."""
        self._workers = [
            asyncio.create_task(self._work(queue)) for queue in self._queues.values() for _ in range(FETCHERS)
        ]

    async def close(self) -> None:
        """Give up everything under way."""
        for task in (*self._workers, *self._running.values()):
            task.cancel()
        await asyncio.gather(*self._workers, *self._running.values(), return_exceptions=True)

    def ask(self, effect: Fetch) -> None:
        """Fetch this; what is still fetched for the same unit is of no use any more."""
        self._newest[effect.unit] = effect
        if effect.unit in self._running:
            self._running[effect.unit].cancel()
        self._queues[effect.urgent].put_nowait(effect)

    async def _work(self, queue: asyncio.Queue[Fetch]) -> None:
        """One blob after the other. The exchange lets those that this peer's own units wait for go first."""
        while True:
            effect = await queue.get()
            if effect.unit in self._running:
                await asyncio.wait([self._running[effect.unit]])  # it was cancelled, and is letting go
            if self._newest.get(effect.unit) is not effect:
                continue
            task = self._running[effect.unit] = asyncio.create_task(self._fetch(effect))
            await asyncio.wait([task])
            del self._running[effect.unit]
            if self._newest.get(effect.unit) is effect:
                del self._newest[effect.unit]
                self._fetched(effect, task.result())

    async def _fetch(self, effect: Fetch) -> bool:
        """Whether the blob is here."""
        seconds = self._packet_seconds + effect.size / SLOWEST_LINK
        try:
            await self._exchange.fetch(
                effect.blob, effect.sources, timeout=seconds, size=effect.size, urgent=effect.urgent
            )
        except (BlobUnavailable, OSError) as error:
            log.info("blob not fetched", unit=effect.unit, reason=str(error))
            return False
        except Exception:
            log.exception("blob not fetched", unit=effect.unit)
            return False
        return True
