"""The serving side of the blob exchange: what we have of a blob, and its chunks."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from spesd.swarm.blob_store import HASH, BlobStore
from spesd.swarm.chunks import CHUNK_BYTES, ChunkList, bitmap, chunk_count, chunk_hash
from spesd.swarm.download import Download
from spesd.swarm.errors import Refused
from spesd.swarm.rate import Limiter
from spesd.swarm.streams import Reply
from spesd.swarm.wire import WireError

URGENT_BACKLOG_SECONDS, LATER_BACKLOG_SECONDS = 8.0, 4.0
"""Under a cap, work for so long is taken on; beyond it the caller is told to come back, instead of timing out."""

_KEPT_LISTS = 1024


class BlobServer:
    """Answers requests {hash} with an offer, and {hash, offset, length, urgent} with a chunk."""

    def __init__(self, store: BlobStore, under_way: Callable[[str], Download | None], up: Limiter) -> None:
        self._store = store
        self._under_way = under_way
        self._up = up
        self._lists: OrderedDict[str, ChunkList] = OrderedDict()

    async def answer(self, peer: str, body: dict[str, Any], payload: bytes) -> Reply:
        """The handler of the protocol. Raises Refused."""
        match body:
            case {"hash": str() as name} if not HASH.fullmatch(name):
                raise Refused("bad-request", "not a hex blake3 hash")
            case {
                "hash": str() as name,
                "offset": int() as offset,
                "length": int() as length,
                "urgent": bool() as urgent,
            }:
                if offset < 0 or offset % CHUNK_BYTES or not 0 <= length <= CHUNK_BYTES:
                    raise Refused("bad-request", f"a chunk begins at a multiple of {CHUNK_BYTES} and is no longer")
                return await self._chunk(name, offset, length, urgent)
            case {"hash": str() as name, **rest} if not rest:
                return await self._offer(name)
        raise Refused("bad-request", "hash is needed, and for a chunk offset, length and urgent")

    async def _offer(self, name: str) -> Reply:
        if self._store.has(name):
            chunks = await self._chunk_list(name)
            return Reply({"size": chunks.size}, chunks.hashes)
        download = self._under_way(name)
        if download is None or download.plan is None or download.chunks is None:
            raise Refused("not-found", f"blob {name} is not here")
        return Reply({"size": download.chunks.size, "part": bitmap(download.plan.present, download.chunks.count)})

    async def _chunk_list(self, name: str) -> ChunkList:
        """The list of a blob in the store, which is verified when it is first asked for: we are bound to our list."""
        chunks = self._lists.get(name)
        if chunks is None:
            try:
                chunks = await asyncio.to_thread(_read_list, self._store.path(name), name)
            except FileNotFoundError:
                raise Refused("not-found", f"blob {name} is no longer here") from None
            except WireError:
                self._store.remove(name)
                raise Refused("not-found", f"blob {name} was damaged here") from None
        self._lists[name] = chunks
        self._lists.move_to_end(name)
        if len(self._lists) > _KEPT_LISTS:
            self._lists.popitem(last=False)
        return chunks

    async def _chunk(self, name: str, offset: int, length: int, urgent: bool) -> Reply:
        if self._up.backlog_seconds() > (URGENT_BACKLOG_SECONDS if urgent else LATER_BACKLOG_SECONDS):
            raise Refused("busy", "our uplink is capped and has enough to do; retry later")
        path, download = self._store.path(name), self._under_way(name)
        if download is not None and download.plan is not None and not self._store.has(name):
            if offset // CHUNK_BYTES not in download.plan.present:
                raise Refused("not-yet", "this chunk is not here yet")
            path = download.file
        try:
            return Reply({}, await asyncio.to_thread(_read_chunk, path, offset, length), urgent)
        except FileNotFoundError:
            raise Refused("not-found", f"blob {name} is not here") from None


def _read_list(path: Path, name: str) -> ChunkList:
    """Raises WireError when the file is not what its name says."""
    whole = blake3()
    hashes = bytearray()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(chunk_count(size)):
            chunk = file.read(CHUNK_BYTES)
            whole.update(chunk)
            hashes += chunk_hash(chunk)
    if whole.hexdigest() != name:
        raise WireError(f"the file of blob {name} holds other bytes")
    return ChunkList(size, bytes(hashes))


def _read_chunk(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), length, offset)
