"""One download of one blob: chunks from several sources at once, appended in order to a partial file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spesd.swarm.errors import PeerRefused, TransportError

CHUNK_BYTES = 1 << 20
_WINDOW_CHUNKS = 32
"""Chunks that may be held or on their way beyond the last one written: bounds memory."""
_IN_FLIGHT_PER_SOURCE = 3
HEDGE_SECONDS = 2.0
"""A chunk that one source has not delivered for so long may be asked of another one too."""

_TRIES_PER_SOURCE = 3
_PAUSE_SECONDS = 0.2

FetchChunk = Callable[[str, int, int], Awaitable[bytes]]
"""(source, offset, length) -> exactly `length` bytes; raises TransportError."""


@dataclass
class Download:
    """State of one attempt. `file` holds a prefix of the blob at any moment, so it can be resumed after any crash."""

    file: Path
    size: int
    sources: Sequence[str]
    fetch_chunk: FetchChunk
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a source was given up, by peer."""
    writers: dict[int, str] = field(default_factory=dict)
    """Source of each chunk written by this attempt, by offset."""
    _written: int = 0
    _arrived: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    _holders: dict[int, dict[str, float]] = field(default_factory=dict)
    _change: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> bool:
        """Fetch what is missing; returns False when no source is left. The file is not verified here."""
        self._written = self.file.stat().st_size if self.file.exists() else 0
        if self._written > self.size:
            self.file.unlink()
            self._written = 0
        workers = [
            asyncio.create_task(self._work(source)) for _ in range(_IN_FLIGHT_PER_SOURCE) for source in self.sources
        ]
        try:
            pending = set(workers)
            while pending and self._written < self.size:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._written == self.size

    async def _work(self, source: str) -> None:
        failures = 0
        while (offset := await self._next_offset(source)) is not None:
            try:
                chunk = await self.fetch_chunk(source, offset, min(CHUNK_BYTES, self.size - offset))
            except TransportError as error:
                failures += 1
                if failures == _TRIES_PER_SOURCE or (isinstance(error, PeerRefused) and error.code != "busy"):
                    self.reasons.setdefault(source, str(error))
                await self._let_go(source, offset)
                if source not in self.reasons:
                    await asyncio.sleep(_PAUSE_SECONDS * 2**failures)
            else:
                failures = 0
                await self._accept(source, offset, chunk)

    async def _next_offset(self, source: str) -> int | None:
        """Reserve the first chunk of the window that nobody fetches, else one that a slow source holds back."""
        async with self._change:
            while self._written < self.size and source not in self.reasons:
                now = asyncio.get_running_loop().time()
                end = min(self.size, self._written + _WINDOW_CHUNKS * CHUNK_BYTES)
                for offset in range(self._written, end, CHUNK_BYTES):
                    holders = self._holders.setdefault(offset, {})
                    slow = source not in holders and max(holders.values(), default=0.0) < now - HEDGE_SECONDS
                    if offset not in self._arrived and (slow or not holders):
                        holders[source] = now
                        return offset
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEDGE_SECONDS / 2):
                        await self._change.wait()
        return None

    async def _let_go(self, source: str, offset: int) -> None:
        async with self._change:
            self._holders.get(offset, {}).pop(source, None)
            self._change.notify_all()

    async def _accept(self, source: str, offset: int, chunk: bytes) -> None:
        async with self._change:
            if offset >= self._written:
                self._arrived.setdefault(offset, (source, chunk))
            while self._written in self._arrived:
                writer, data = self._arrived[self._written]
                await _uninterrupted(asyncio.to_thread(_append, self.file, data))
                del self._arrived[self._written]
                self._holders.pop(self._written, None)
                self.writers[self._written] = writer
                self._written += len(data)
            self._change.notify_all()


async def _uninterrupted(work: Coroutine[None, None, None]) -> None:
    """Await `work` to its end even when cancelled: a thread that still writes must not meet the next attempt."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
