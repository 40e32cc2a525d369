"""Which tokens a peer trains on, and which everybody is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from spesd.data.shards import DataError

_WORDS = 4
"""64-bit words that Philox yields for one value of its counter."""


class Sampler:
    """Draws blocks of consecutive tokens, a pure function of (run, peer, position).

    Block p starts at a place drawn uniformly from all windows of all shards by the p-th value of a counter-based
    generator keyed by run and peer, so `position` is all that a restart needs, and peers draw different blocks.
    """

    def __init__(
        self, shards: Sequence[np.ndarray], run_id: str, peer_id: str, sequence_length: int, position: int = 0
    ) -> None:
        self.position = position
        self._windows = _Windows(shards, sequence_length)
        digest = blake3(f"{run_id}|{peer_id}".encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)

    def batch(self, sequences: int) -> np.ndarray:
        """Return the next blocks, int64 [sequences, sequence_length + 1], and advance the position."""
        random = np.random.Philox(key=self._key, counter=self.position)
        starts = random.random_raw(_WORDS * sequences)[::_WORDS] % np.uint64(self._windows.count)
        self.position += sequences
        return self._windows.take(starts.astype(np.int64))


def held_out_blocks(shards: Sequence[np.ndarray], sequences: int, sequence_length: int) -> np.ndarray:
    """Return evenly spaced blocks, int64 [at most sequences, sequence_length + 1]: the same on every peer."""
    windows = _Windows(shards, sequence_length)
    wanted = min(sequences, windows.count)
    return windows.take(np.arange(wanted, dtype=np.int64) * windows.count // wanted)


class _Windows:
    """All windows of sequence_length + 1 tokens that lie within one shard, numbered through."""

    def __init__(self, shards: Sequence[np.ndarray], sequence_length: int) -> None:
        self._length = sequence_length + 1
        self._shards = shards
        self._ends = np.cumsum([max(0, len(shard) - sequence_length) for shard in shards])
        self.count = int(self._ends[-1]) if shards else 0
        if not self.count:
            longest = max((len(shard) for shard in shards), default=0)
            need = f"a sequence needs {self._length}; use a smaller data.sequence_length or more text"
            raise DataError(f"the longest of {len(shards)} shard(s) has {longest} tokens, {need}")

    def take(self, windows: np.ndarray) -> np.ndarray:
        """Copy windows int64 [n] to int64 [n, sequence_length + 1]."""
        out = np.empty((len(windows), self._length), dtype=np.int64)
        for row, window in zip(out, windows, strict=True):
            shard = int(np.searchsorted(self._ends, window, side="right"))
            start = int(window) - (int(self._ends[shard - 1]) if shard else 0)
            row[:] = self._shards[shard][start : start + self._length]
        return out
