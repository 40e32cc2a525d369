"""The exchange of blobs between peers: whoever has a chunk serves it, and it is fetched from several peers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import structlog
from blake3 import blake3

from spesd.swarm.blob_server import BlobServer
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.chunks import CHUNK_BYTES, HASH_BYTES, ChunkList, chunk_count
from spesd.swarm.download import Download
from spesd.swarm.errors import BlobUnavailable, PeerMisbehaved
from spesd.swarm.gate import Gate
from spesd.swarm.holders import Offer
from spesd.swarm.transport import Transport, protocol_name
from spesd.swarm.wire import WireError

log = structlog.get_logger(__name__)

MAX_BLOB_BYTES = 1 << 36
CHUNKS_AT_ONCE = 32
MAX_PEERS = 1024
"""Peer ids cost nothing to make, so no more are remembered."""

CHUNKS_PER_SOURCE = 4
"""Below the transport's bound for one peer and protocol, so that there is always a stream left to ask for an offer."""

_OFFER_SECONDS = 15.0
_CHUNK_SECONDS = 60.0
_SECONDS_ON_THE_WAY = 4.0
"""Under a cap no more chunks are asked for than come in so long: those that wait too long would be given up."""


@dataclass
class _Fetch:
    """A download under way, and how many wait for it."""

    task: asyncio.Task[None]
    download: Download
    waiting: int = 0


@dataclass(frozen=True)
class _BlobSources:
    """The peers of one run, as sources of one blob whose size lies in `sizes`."""

    transport: Transport
    protocol: str
    name: str
    sizes: range

    async def offer(self, peer: str) -> Offer:
        most = HASH_BYTES * chunk_count(self.sizes.stop - 1)
        body = {"hash": self.name}
        reply = await self.transport.request(peer, self.protocol, body, timeout=_OFFER_SECONDS, max_reply=most)
        try:
            return Offer.parse(reply.body, bytes(reply.payload), self.name, self.sizes)
        except WireError as error:
            raise PeerMisbehaved(peer, f"peer {peer} offers blob {self.name[:16]} wrongly: {error}") from None

    async def chunk(self, peer: str, offset: int, length: int, urgent: bool) -> bytes:
        body = {"hash": self.name, "offset": offset, "length": length, "urgent": urgent}
        reply = await self.transport.request(
            peer, self.protocol, body, timeout=_CHUNK_SECONDS, max_reply=length, urgent=urgent
        )
        return bytes(reply.payload)


class BlobExchange:
    """Serves the store's blobs to one run's peers and fetches theirs. Call :meth:`serve` once."""

    def __init__(self, transport: Transport, store: BlobStore, run_id: str) -> None:
        self.store = store
        self.liars: set[str] = set()
        """Peers proven to have lied about a blob; they are believed last from then on."""
        self._transport = transport
        self._protocol = protocol_name(run_id, "blob")
        self._gate = Gate(self._chunks_at_once, CHUNKS_PER_SOURCE)
        self._server = BlobServer(store, self._under_way, transport.traffic.up_limit)
        self._fetches: dict[str, _Fetch] = {}

    async def serve(self) -> None:
        """Start answering others."""
        await self._transport.serve(self._protocol, self._server.answer)

    async def fetch(
        self,
        hash: str,
        sources: Sequence[str],
        *,
        timeout: float,
        size: int | None = None,
        max_size: int = MAX_BLOB_BYTES,
        urgent: bool = True,
    ) -> Path:
        """Return the blob's file in the store, fetched from `sources` (peer ids) if it is not there yet.

        `size` is its exact size where known, else a source may say any size up to `max_size`. Chunks of `urgent` blobs
        go before all others. Fetching the same hash twice at once shares one download, which ends when nobody waits
        for it any more; a later fetch resumes it, also after a restart.
        Raises BlobUnavailable, naming every source and what was wrong with it; OSError when the disk is full.
        """
        sizes = range(max_size + 1) if size is None else range(size, size + 1)
        given_up: dict[str, str] = {}
        try:
            async with asyncio.timeout(timeout):
                while not self.store.has(hash):
                    joined = hash in self._fetches
                    try:
                        await self._join(hash, sources, sizes, urgent, given_up)
                    except BlobUnavailable:
                        if not joined:  # else it had ended before our sources could help
                            raise
        except TimeoutError:
            reasons = dict.fromkeys(sources, "still waited for") | given_up
            raise BlobUnavailable(hash, f"not complete after {timeout:.1f} s", reasons) from None
        return self.store.path(hash)

    async def _join(
        self, hash: str, sources: Sequence[str], sizes: range, urgent: bool, given_up: dict[str, str]
    ) -> None:
        """Wait for the fetch of `hash`, started here if there is none; `given_up` learns why sources were left."""
        while (fetch := self._fetches.get(hash)) and not fetch.waiting:
            await asyncio.wait([fetch.task])  # its last waiter left, it is letting go of the partial file
        if fetch is None:
            fetch = self._fetches[hash] = self._start(hash, sizes)
            fetch.task.add_done_callback(lambda _: self._fetches.pop(hash))
        fetch.download.add(sources)
        fetch.download.urgent |= urgent
        fetch.waiting += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.waiting -= 1
            given_up.update(fetch.download.reasons)
            if not fetch.waiting:
                fetch.task.cancel()
                await asyncio.gather(fetch.task, return_exceptions=True)

    def _start(self, hash: str, sizes: range) -> _Fetch:
        sources = _BlobSources(self._transport, self._protocol, hash, sizes)
        # each peer begins elsewhere, so that they soon have something to give to each other
        first = int.from_bytes(blake3(f"{self._transport.peer_id} {hash}".encode()).digest(8), "big")
        known = ChunkList.alone(hash, sizes.start) if len(sizes) == 1 and chunk_count(sizes.start) == 1 else None
        file = self.store.partial_path(hash)
        download = Download(hash, file, sources, self._gate, self.liars, first, self._heard, known)
        return _Fetch(asyncio.create_task(self._run(hash, download)), download)

    async def _run(self, hash: str, download: Download) -> None:
        try:
            await download.run()
            self.store.adopt(download.file, hash)
        finally:
            for peer, how in download.caught:
                log.warning("peer lied about a blob", peer=peer, blob=hash, how=how)
                if len(self.liars) >= MAX_PEERS:
                    self.liars.pop()
                self.liars.add(peer)

    def _heard(self, peer: str) -> float:
        return self._transport.traffic.heard.get((peer, self._protocol), -inf)

    def _under_way(self, hash: str) -> Download | None:
        fetch = self._fetches.get(hash)
        return fetch.download if fetch is not None else None

    def _chunks_at_once(self) -> int:
        rate = self._transport.traffic.down_limit.rate
        if rate is None:
            return CHUNKS_AT_ONCE
        return max(2, min(CHUNKS_AT_ONCE, int(rate * _SECONDS_ON_THE_WAY / CHUNK_BYTES)))
