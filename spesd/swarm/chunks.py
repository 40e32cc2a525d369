"""A blob as chunks: the list of their hashes, and the plan of who is asked for which. Pure: no IO, the clock handed in.

A blob's name is the blake3 of the whole, from which no chunk can be checked. So a peer that has the whole blob gives
its *chunk list*, and is bound to it: every chunk is checked against the list before it is used, and when all chunks of
a list together do not have the blob's name, the list was a lie, told by everybody who gave it. No honest peer can come
under suspicion, and what two lists have in common is fetched once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from math import inf

from blake3 import blake3

from spesd.swarm.wire import Buffer, WireError

CHUNK_BYTES = 256 << 10
HASH_BYTES = 32

HEDGE_SECONDS = 2.0
"""A chunk that is on its way for so long may be asked of another source too, when there is nothing else to ask for,
and when not a byte of any chunk has come from its own source for as long: a full line is slow, but not dead."""

HEDGE_FACTOR = 4.0
"""... and only when it takes so many times longer than usual."""

_MAX_HOLDERS = 2
_SMOOTHING = 0.2


def chunk_count(size: int) -> int:
    """Chunks of a blob of `size` bytes. An empty blob has one, which is empty."""
    return max(1, -(-size // CHUNK_BYTES))


def chunk_hash(chunk: Buffer) -> bytes:
    """The 32 bytes by which a chunk is known."""
    return blake3(chunk).digest()


@dataclass(frozen=True, slots=True)
class ChunkList:
    """What a peer says of a blob: its size, and the hashes of its chunks one after the other."""

    size: int
    hashes: bytes

    @classmethod
    def checked(cls, size: int, hashes: bytes, name: str) -> ChunkList:
        """A list from outside. Raises WireError unless it has the right length and, for a single chunk, the name."""
        if len(hashes) != HASH_BYTES * chunk_count(size):
            raise WireError(f"{len(hashes)} bytes of chunk hashes for a blob of {size} bytes")
        if chunk_count(size) == 1 and hashes.hex() != name:
            raise WireError("the only chunk has another hash than the blob")
        return cls(size, hashes)

    @classmethod
    def alone(cls, name: str, size: int) -> ChunkList:
        """The list of a blob of a single chunk, whose hash is the blob's name."""
        return cls(size, bytes.fromhex(name))

    @property
    def count(self) -> int:
        """Number of chunks."""
        return chunk_count(self.size)

    def length(self, index: int) -> int:
        """Bytes of one chunk."""
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)

    def fits(self, index: int, chunk: Buffer) -> bool:
        """Whether these bytes are the chunk."""
        return chunk_hash(chunk) == self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def bitmap(present: Set[int], count: int) -> bytes:
    """Which of `count` chunks are there, one bit each, the lowest first."""
    bits = bytearray(-(-count // 8))
    for index in present:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def read_bitmap(bits: bytes, count: int) -> frozenset[int]:
    """Inverse of :func:`bitmap`, for bytes from outside. Raises WireError."""
    if len(bits) != -(-count // 8):
        raise WireError(f"a bitmap of {len(bits)} bytes for {count} chunks")
    return frozenset(index for index in range(count) if bits[index // 8] >> index % 8 & 1)


class ChunkPlan:
    """Which chunk is asked for next, and of whom; each is asked for once unless its source fails or is very slow."""

    def __init__(
        self, count: int, first: int, present: Collection[int] = (), heard: Callable[[str], float] = lambda source: -inf
    ) -> None:
        """`first` is where to begin: peers that begin at different chunks have something to give to each other.

        `heard` tells when the last byte of any chunk came from a source.
        """
        self._heard = heard
        self.present = set(present)
        rotated = (index % count for index in range(first, first + count))
        self._waiting = dict.fromkeys(index for index in rotated if index not in self.present)
        self._asked: dict[int, dict[str, float]] = {}
        self._usual_seconds = 0.0

    @property
    def complete(self) -> bool:
        return not self._waiting and not self._asked

    @property
    def on_the_way(self) -> bool:
        """Whether any chunk is."""
        return bool(self._asked)

    def wants_from(self, offered: Set[int] | None) -> bool:
        """Whether a source that has `offered` (None: all) has anything that is missing."""
        missing = not self.complete
        return missing if offered is None else missing and any(self._is_missing(index) for index in offered)

    def ask(self, source: str, offered: Set[int] | None, now: float) -> int | None:
        """The next chunk to ask `source` for, now on its way; None if there is nothing for it at the moment."""
        index = next((index for index in self._waiting if offered is None or index in offered), None)
        if index is None:
            index = self._late(source, offered, now)
        if index is not None:
            self._waiting.pop(index, None)
            self._asked.setdefault(index, {})[source] = now
        return index

    def arrived(self, source: str, index: int, now: float) -> bool:
        """The chunk is here and checked. False if it was here already."""
        holders = self._asked.pop(index, None)
        if holders is None:
            return False
        seconds = now - holders[source]
        usual = self._usual_seconds or seconds
        self._usual_seconds = usual + _SMOOTHING * (seconds - usual)
        self.present.add(index)
        return True

    def failed(self, source: str, index: int) -> None:
        """`source` did not deliver the chunk."""
        holders = self._asked.get(index, {})
        holders.pop(source, None)
        if index in self._asked and not holders:
            del self._asked[index]
            self._waiting = {index: None, **self._waiting}

    def _is_missing(self, index: int) -> bool:
        return index in self._waiting or index in self._asked

    def _late(self, source: str, offered: Set[int] | None, now: float) -> int | None:
        """A chunk that another source takes much too long for."""
        before = now - max(HEDGE_SECONDS, HEDGE_FACTOR * self._usual_seconds)
        for index, holders in self._asked.items():
            heard = (max(asked, self._heard(holder)) for holder, asked in holders.items())
            slow = len(holders) < _MAX_HOLDERS and max(heard) < before
            if slow and source not in holders and (offered is None or index in offered):
                return index
        return None
