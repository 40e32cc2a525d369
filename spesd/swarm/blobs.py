"""The exchange of blobs between peers: served by chunks, fetched from several peers at once, verified by hash."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from spesd.swarm.blob_store import HASH, BlobStore, hash_file
from spesd.swarm.download import CHUNK_BYTES, Download, FetchChunk
from spesd.swarm.errors import BlobUnavailable, PeerMisbehaved, Refused, TransportError
from spesd.swarm.streams import Reply
from spesd.swarm.transport import Transport, protocol_name
from spesd.swarm.wire import Buffer

log = structlog.get_logger(__name__)

_CHUNK_SECONDS = 30.0
_SIZE_SECONDS = 10.0

Lookup = Callable[[str], Path | Buffer | None]
"""Finds blobs that live outside the store, by hash: a file, bytes, or None."""


@dataclass
class _Fetch:
    """A download under way, and how many wait for it."""

    task: asyncio.Task[None]
    reasons: dict[str, str]
    waiting: int = 0


class BlobExchange:
    """Serves the store's blobs to one run's peers and fetches theirs. Call :meth:`serve` once."""

    def __init__(self, transport: Transport, store: BlobStore, run_id: str, lookup: Lookup | None = None) -> None:
        self.store = store
        self.liars: set[str] = set()
        """Peers proven to have sent wrong bytes; they are asked last from then on."""
        self._transport = transport
        self._protocol = protocol_name(run_id, "blob")
        self._lookup = lookup
        self._fetches: dict[str, _Fetch] = {}

    async def serve(self) -> None:
        """Start answering requests {hash, offset, length} with {size} and a chunk."""
        await self._transport.serve(self._protocol, self._answer)

    async def fetch(
        self, hash: str, sources: Sequence[str], *, timeout: float, size: int | None = None, max_size: int = 1 << 40
    ) -> Path:
        """Return the blob's file in the store, fetched from `sources` (peer ids) if it is not there yet.

        `size` is its exact size where known, else a source may say any size up to `max_size`. Fetching the same hash
        twice at once shares one download, which ends when nobody waits for it any more; a later fetch resumes it.
        Raises BlobUnavailable, naming every source and what was wrong with it.
        """
        given_up: dict[str, str] = {}
        try:
            async with asyncio.timeout(timeout):
                while not self.store.has(hash):
                    joined = hash in self._fetches
                    try:
                        await self._join(hash, sources, size, max_size, given_up)
                    except BlobUnavailable:
                        if not joined:  # else it was others' sources that failed
                            raise
        except TimeoutError:
            reasons = dict.fromkeys(sources, "still waited for") | given_up
            raise BlobUnavailable(hash, f"not complete after {timeout:.1f} s", reasons) from None
        return self.store.path(hash)

    async def _join(
        self, hash: str, sources: Sequence[str], size: int | None, max_size: int, given_up: dict[str, str]
    ) -> None:
        """Wait for the fetch of `hash`, started here if there is none; `given_up` learns why sources were left."""
        while (fetch := self._fetches.get(hash)) and not fetch.waiting:
            await asyncio.wait([fetch.task])  # its last waiter left, it is letting go of the partial file
        if fetch is None:
            reasons: dict[str, str] = {}
            task = asyncio.create_task(self._fetch(hash, sources, size, max_size, reasons))
            fetch = self._fetches[hash] = _Fetch(task, reasons)
            task.add_done_callback(lambda _: self._fetches.pop(hash))
        fetch.waiting += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.waiting -= 1
            given_up.update(fetch.reasons)
            if not fetch.waiting:
                fetch.task.cancel()
                await asyncio.gather(fetch.task, return_exceptions=True)

    async def _fetch(
        self, hash: str, sources: Sequence[str], size: int | None, max_size: int, reasons: dict[str, str]
    ) -> None:
        """All sources together first. When their bytes do not add up: one after the other, then see who lied."""
        ordered = sorted(dict.fromkeys(sources), key=lambda peer: peer in self.liars)
        attempts = [[peer for peer in ordered if peer not in self.liars], *([peer] for peer in ordered)]
        suspects: list[tuple[Download, Path]] = []
        file = self.store.partial_path(hash)
        try:
            while attempts:
                peers = [peer for peer in attempts.pop(0) if peer not in reasons]
                known = size if size is not None else await self._agreed_size(hash, peers, max_size, reasons)
                if not peers or known is None:
                    continue
                download = Download(file, known, peers, self._chunk_fetcher(hash, known), reasons)
                if not await download.run():
                    continue
                if await asyncio.to_thread(hash_file, file) == hash:
                    await asyncio.to_thread(self._name_liars, hash, file, suspects)
                    self.store.adopt(file, hash)
                    return
                suspects.append((download, file.replace(file.with_suffix(f".{len(suspects)}"))))
                if 0 in download.writers:
                    self._name_sole_writer(hash, download, reasons)
                else:  # the prefix of an earlier attempt may be to blame
                    attempts.insert(0, peers)
        finally:
            for _, wrong in suspects:
                wrong.unlink(missing_ok=True)
        raise BlobUnavailable(hash, "no source delivered it" if sources else "no source is known", reasons)

    def _name_sole_writer(self, hash: str, download: Download, reasons: dict[str, str]) -> None:
        writers = set(download.writers.values())
        if len(writers) == 1:
            peer = writers.pop()
            self._name_liar(peer, hash)
            reasons[peer] = "its bytes have another hash"

    def _name_liars(self, hash: str, right: Path, suspects: Sequence[tuple[Download, Path]]) -> None:
        """Compare what did not add up with the verified file, chunk by chunk."""
        with right.open("rb") as truth:
            for download, wrong in suspects:
                with wrong.open("rb") as file:
                    for offset, peer in download.writers.items():
                        truth.seek(offset)
                        file.seek(offset)
                        if truth.read(CHUNK_BYTES) != file.read(CHUNK_BYTES):
                            self._name_liar(peer, hash)

    def _name_liar(self, peer: str, hash: str) -> None:
        if peer not in self.liars:
            log.warning("peer sent wrong bytes", peer=peer, blob=hash)
            self.liars.add(peer)

    async def _agreed_size(self, hash: str, peers: Sequence[str], max_size: int, reasons: dict[str, str]) -> int | None:
        """The size that all these peers name; None when they differ, and then each must be tried alone."""
        sizes: set[int] = set()

        async def ask(peer: str) -> None:
            try:
                size = (await self._request(peer, hash, 0, 0, _SIZE_SECONDS))[0]
                if size > max_size:
                    raise PeerMisbehaved(peer, f"it says {size} bytes, at most {max_size} are accepted")
                sizes.add(size)
            except TransportError as error:
                reasons[peer] = str(error)

        await asyncio.gather(*(ask(peer) for peer in peers))
        return sizes.pop() if len(sizes) == 1 else None

    def _chunk_fetcher(self, hash: str, expected: int) -> FetchChunk:
        async def fetch_chunk(peer: str, offset: int, length: int) -> bytes:
            size, chunk = await self._request(peer, hash, offset, length, _CHUNK_SECONDS)
            if size != expected or len(chunk) != length:
                raise PeerMisbehaved(
                    peer, f"peer {peer} sent {len(chunk)} of {length} bytes and size {size}, not {expected}"
                )
            return chunk

        return fetch_chunk

    async def _request(self, peer: str, hash: str, offset: int, length: int, timeout: float) -> tuple[int, bytes]:
        body = {"hash": hash, "offset": offset, "length": length}
        reply = await self._transport.request(peer, self._protocol, body, timeout=timeout, max_reply=length)
        match reply.body:
            case {"size": int() as size} if size >= 0:
                return size, bytes(reply.payload)
        raise PeerMisbehaved(peer, f"peer {peer} answered a blob request without a size")

    async def _answer(self, peer: str, body: dict[str, Any], payload: bytes) -> Reply:
        match body:
            case {"hash": str() as hash, "offset": int() as offset, "length": int() as length}:
                pass
            case _:
                raise Refused("bad-request", "hash, offset and length are needed")
        if not HASH.fullmatch(hash) or offset < 0 or not 0 <= length <= CHUNK_BYTES:
            raise Refused("bad-request", f"not a hash, or not a chunk of at most {CHUNK_BYTES} bytes")
        blob = self._lookup(hash) if self._lookup else None
        if blob is None and self.store.has(hash):
            blob = self.store.path(hash)
        if blob is None:
            raise Refused("not-found", f"blob {hash} is not here")
        if isinstance(blob, Path):
            try:
                size, chunk = await asyncio.to_thread(_read_chunk, blob, offset, length)
            except FileNotFoundError:
                raise Refused("not-found", f"blob {hash} is no longer here") from None
            return Reply({"size": size}, chunk)
        view = memoryview(blob).cast("B")
        return Reply({"size": len(view)}, view[offset : offset + length])


def _read_chunk(path: Path, offset: int, length: int) -> tuple[int, bytes]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), length, offset)
