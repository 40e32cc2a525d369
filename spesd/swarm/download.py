"""One blob's way here: chunks from several sources at once into a partial file, each checked before it is kept."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Set
from pathlib import Path

from spesd.swarm.blob_store import hash_file
from spesd.swarm.chunks import CHUNK_BYTES, HEDGE_SECONDS, ChunkList, ChunkPlan
from spesd.swarm.errors import BlobUnavailable, PeerRefused, TransportError
from spesd.swarm.gate import Gate
from spesd.swarm.holders import TRIES, Holders, News, Sources

_WORKERS_PER_SOURCE = 4
_PAUSE_SECONDS = 0.25
_GRACE_SECONDS = 0.25
"""Once one chunk list is here, those of the other sources may take so much longer before the choice is made."""


class Download:
    """A blob under way into `file`, which is sparse: after a crash, those of its chunks that fit a list are there."""

    def __init__(
        self,
        name: str,
        file: Path,
        sources: Sources,
        gate: Gate,
        liars: Set[str],
        first_chunk: int,
        heard: Callable[[str], float],
        known: ChunkList | None = None,
    ) -> None:
        """`liars` are believed last. Two peers that begin at different chunks can give theirs to each other.

        `heard` tells when the last byte of any chunk came from a source. The chunk list may be `known` before anybody
        is asked: that of a blob of one chunk is its name.
        """
        self.file = file
        self.urgent = False
        self.chunks: ChunkList | None = None
        self.plan: ChunkPlan | None = None
        self.caught: list[tuple[str, str]] = []
        """Who was proven to have lied, and how."""
        self._name = name
        self._sources = sources
        self._gate = gate
        self._liars = liars
        self._first_chunk = first_chunk
        self._heard = heard
        self._news = News()
        self._holders = Holders(sources, self._news, known)
        self._failures: dict[str, int] = {}
        self._requests: dict[int, set[asyncio.Task[bytes]]] = {}

    def add(self, peers: Iterable[str]) -> None:
        """These may have it too."""
        self._holders.add(peers)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each source did not deliver, as far as it is known."""
        return self._holders.excuses()

    async def run(self) -> None:
        """Bring the blob into `file`, its hash verified. Raises BlobUnavailable and OSError."""
        try:
            while (chunks := await self._choose()) is not None:
                if await self._gather(chunks):
                    if await asyncio.to_thread(hash_file, self.file) == self._name:
                        return
                    for peer in self._holders.lists()[chunks]:
                        self._catch(peer, "its chunk list has another hash")
        finally:
            await self._holders.close()
        reasons = self.reasons
        raise BlobUnavailable(self._name, "no source delivered it" if reasons else "no source is known", reasons)

    async def _choose(self) -> ChunkList | None:
        """The list that most sources gave, liars apart; None when there is none left."""
        while not (lists := self._holders.lists()) and self._holders.pending:
            await self._news.wait(HEDGE_SECONDS)
        deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while self._holders.pending and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await self._news.wait(left)
        lists = self._holders.lists()
        return max(lists, key=lambda one: (len(set(lists[one]) - self._liars), len(lists[one])), default=None)

    async def _gather(self, chunks: ChunkList) -> bool:
        """Fetch the chunks of this list that are not there; False when nobody is left who has them."""
        present = await asyncio.to_thread(_prepare, self.file, chunks)
        self.chunks = chunks
        self.plan = plan = ChunkPlan(chunks.count, self._first_chunk % chunks.count, present, self._heard)
        workers: dict[str, list[asyncio.Task[None]]] = {}
        try:
            while not plan.complete:
                for worker in (worker for started in workers.values() for worker in started if worker.done()):
                    worker.result()
                serving = self._holders.serving(chunks)
                for peer in serving:
                    if all(worker.done() for worker in workers.get(peer, [])):
                        count = min(_WORKERS_PER_SOURCE, chunks.count)
                        workers[peer] = [asyncio.create_task(self._work(peer, chunks, plan)) for _ in range(count)]
                useful = any(plan.wants_from(self._holders.part(peer)) for peer in serving)
                if not (useful or self._holders.pending or plan.on_the_way):
                    return False
                await self._news.wait(HEDGE_SECONDS)
            return True
        finally:
            tasks = [worker for started in workers.values() for worker in started]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, peer: str, chunks: ChunkList, plan: ChunkPlan) -> None:
        try:
            while self._holders.serves(peer) and not plan.complete:
                pause = 0.0
                async with self._gate.slot(peer, self.urgent):
                    index = plan.ask(peer, self._holders.part(peer), asyncio.get_running_loop().time())
                    if index is not None:
                        pause = await self._get(peer, index, chunks, plan)
                if index is None:
                    await self._news.wait(HEDGE_SECONDS / 2)
                await asyncio.sleep(pause)
        finally:
            self._news.tell()

    async def _get(self, peer: str, index: int, chunks: ChunkList, plan: ChunkPlan) -> float:
        """Fetch one chunk, check it and keep it. Returns how long `peer` is to be left alone afterwards."""
        offset = index * CHUNK_BYTES
        request = asyncio.create_task(self._sources.chunk(peer, offset, chunks.length(index), self.urgent))
        rivals = self._requests.setdefault(index, set())
        rivals.add(request)
        try:
            await asyncio.wait({request})
            if request.cancelled():  # a rival was faster
                return 0.0
            chunk = request.result()
            if not chunks.fits(index, chunk):
                self._distrust(peer)
                return 0.0
            await _uninterrupted(asyncio.to_thread(_write, self.file, offset, chunk))
            plan.arrived(peer, index, asyncio.get_running_loop().time())
            self._failures.pop(peer, None)
            for rival in rivals - {request}:
                rival.cancel()
            return 0.0
        except TransportError as error:
            return self._blame(peer, error)
        finally:
            plan.failed(peer, index)  # says nothing about a chunk that has arrived
            rivals.discard(request)
            request.cancel()
            await asyncio.wait({request})
            self._news.tell()

    def _blame(self, peer: str, error: TransportError) -> float:
        """How long to leave `peer` alone; it is given up when it will not, or fails again and again."""
        if isinstance(error, PeerRefused):
            if error.code == "not-found":
                self._holders.lacks(peer, str(error))
            elif error.code not in ("busy", "not-yet"):
                self._holders.give_up(peer, str(error))
            return _PAUSE_SECONDS * random.uniform(1, 4)
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        if failures >= TRIES:
            self._holders.give_up(peer, str(error))
        return _PAUSE_SECONDS * 2.0**failures

    def _distrust(self, peer: str) -> None:
        """A chunk does not fit the list. Who gave the list has lied; who did not may have been lied to."""
        if self._holders.vouches(peer):
            self._catch(peer, "its chunk does not fit its own chunk list")
        else:
            self._holders.give_up(peer, "its chunk does not fit the chunk list of the others")

    def _catch(self, peer: str, how: str) -> None:
        self.caught.append((peer, how))
        self._holders.give_up(peer, how)


async def _uninterrupted(work: Coroutine[None, None, None]) -> None:
    """Await `work` to its end even when cancelled: a thread that still writes must not meet the next attempt."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _prepare(path: Path, chunks: ChunkList) -> set[int]:
    """Make the file as long as the blob; tells which chunks it has already, for which their hashes are the proof."""
    present = set()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        if os.fstat(file.fileno()).st_size:
            for index in range(chunks.count):
                if chunks.fits(index, os.pread(file.fileno(), chunks.length(index), index * CHUNK_BYTES)):
                    present.add(index)
        elif chunks.size == 0:
            present.add(0)
        file.truncate(chunks.size)
    return present


def _write(path: Path, offset: int, chunk: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(chunk)
