"""Two memory-mapped files through which daemon and trainer hand over units, without torch.

Both hold fp32 [layout.total_size], little-endian, each unit at its offset in the layout. `inbound` is written by the
daemon and read by the trainer, `snapshot` the other way; the snapshot file is sparse, since only trained units are
written. A unit's values belong to one side at a time; see `link`.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from spesd.model.units import UnitLayout

_VALUE_BYTES = 4


class ExchangeError(OSError):
    """An exchange file that is missing, has the wrong size, or has no room on disk."""


class UnitFile:
    """One of the two files, mapped for reading and writing."""

    def __init__(self, path: Path, layout: UnitLayout) -> None:
        """Map an existing file. Raises ExchangeError."""
        if sys.byteorder != "little":
            raise ExchangeError("exchange files are little-endian, this machine is not")
        wanted = layout.total_size * _VALUE_BYTES
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size != wanted:
                    raise ExchangeError(f"{path}: {size} bytes, the layout needs {wanted}; remove it and start again")
                self._map = mmap.mmap(file.fileno(), wanted)
        except FileNotFoundError:
            raise ExchangeError(f"{path}: no such file") from None
        self.path = path
        self._layout = layout
        self._values = np.frombuffer(self._map, dtype=np.float32)

    @classmethod
    def create(cls, path: Path, layout: UnitLayout) -> UnitFile:
        """Make the file anew, sparse and readable by this user only, and map it."""
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        os.truncate(path, layout.total_size * _VALUE_BYTES)
        return cls(path, layout)

    def values(self, unit_id: str) -> np.ndarray:
        """View of a unit, fp32 [unit.size]. Raises KeyError for an unknown unit."""
        at = self._layout.offsets[unit_id]
        return self._values[at : at + self._layout.by_id[unit_id].size]

    def release(self, unit_id: str) -> None:
        """Unmap a unit's pages, so that they no longer count as this process's memory. The file keeps its values."""
        start, size = self._byte_range(unit_id)
        start -= (slack := start % mmap.PAGESIZE)
        self._map.madvise(mmap.MADV_DONTNEED, start, size + slack)

    def reserve(self, unit_ids: Iterable[str]) -> None:
        """Allocate disk blocks for units, since a full disk under a memory map would end the process with SIGBUS.

        Raises ExchangeError. Does nothing on systems without posix_fallocate.
        """
        if not hasattr(os, "posix_fallocate"):
            return
        with self.path.open("r+b") as file:
            for unit_id in unit_ids:
                try:
                    os.posix_fallocate(file.fileno(), *self._byte_range(unit_id))
                except OSError as error:
                    raise ExchangeError(f"{self.path}: no room for {unit_id}: {error.strerror}") from None

    def _byte_range(self, unit_id: str) -> tuple[int, int]:
        unit = self._layout.by_id[unit_id]
        return self._layout.offsets[unit_id] * _VALUE_BYTES, unit.size * _VALUE_BYTES
