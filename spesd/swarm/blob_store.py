"""Content-addressed files: a blob's name is the blake3 hash of its bytes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from spesd.swarm.errors import BlobMissing
from spesd.swarm.wire import Buffer

HASH = re.compile(r"[0-9a-f]{64}")


def hash_file(path: Path) -> str:
    """Hex blake3 hash of a file, read through a memory map on one thread."""
    return blake3().update_mmap(path).hexdigest()


class BlobStore:
    """A folder of blobs, `<first two digits>/<hash>`. One process at a time owns it; its threads may share it.

    A blob is visible only when it is complete. A damaged one is removed on reading and reported as missing.
    """

    def __init__(self, folder: Path, *, owner: bool = True) -> None:
        """Without `owner` the folder is only read: another process may be writing to it."""
        self._folder = folder
        self._temporary = folder / "temporary"
        self._partial = folder / "partial"
        if not owner:
            return
        shutil.rmtree(self._temporary, ignore_errors=True)  # what a killed process was writing
        for needed in (self._temporary, self._partial):
            needed.mkdir(parents=True, exist_ok=True)

    def put(self, data: Buffer, *, durable: bool = False) -> str:
        """Store bytes; returns their hash. Raises OSError.

        Only what is `durable` is sure to outlive a power cut; of the rest a damaged file is found out on reading.
        """
        hash = blake3(data).hexdigest()
        if not self.has(hash):
            with self._new_file() as file:
                file.write(data)
                self._finish(file, hash, durable)
        return hash

    def put_file(self, path: Path) -> str:
        """Store a copy of a file; returns its hash. Raises OSError."""
        with path.open("rb") as source, self._new_file() as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            hash = hash_file(Path(file.name))  # of the copy: the source may change meanwhile
            self._finish(file, hash, durable=True)
        return hash

    def adopt(self, path: Path, hash: str) -> Path:
        """Move a file of this store's file system in, its hash checked by the caller; returns where it is now."""
        target = self.path(hash)
        target.parent.mkdir(exist_ok=True)
        return path.replace(target)

    def get(self, hash: str) -> bytes:
        """The verified bytes of a blob. Raises BlobMissing."""
        try:
            data = self.path(hash).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"blob {hash} is not here") from None
        if blake3(data).hexdigest() != hash:
            raise self._damaged(hash)
        return data

    def open(self, hash: str) -> BinaryIO:
        """Open a blob after verifying the whole file. Raises BlobMissing."""
        try:
            if hash_file(self.path(hash)) != hash:
                raise self._damaged(hash)
            return self.path(hash).open("rb")
        except FileNotFoundError:
            raise BlobMissing(f"blob {hash} is not here") from None

    def path(self, hash: str) -> Path:
        """Where the blob lies or would lie. Raises ValueError for anything but a hash."""
        if not HASH.fullmatch(hash):
            raise ValueError(f"{hash[:80]!r} is not a hex blake3 hash")
        return self._folder / hash[:2] / hash

    def partial_path(self, hash: str) -> Path:
        """File for a download under way: some chunks of the blob, each at its place."""
        return self._partial / self.path(hash).name

    def has(self, hash: str) -> bool:
        """True when the blob is here, not verified."""
        return self.path(hash).is_file()

    def size(self, hash: str) -> int:
        """Bytes of a blob. Raises BlobMissing."""
        try:
            return self.path(hash).stat().st_size
        except FileNotFoundError:
            raise BlobMissing(f"blob {hash} is not here") from None

    def remove(self, hash: str) -> None:
        """Forget a blob, if it is here."""
        self.path(hash).unlink(missing_ok=True)

    def remove_partial(self, unwanted: Callable[[str], bool]) -> None:
        """Forget the downloads under way of blobs that are `unwanted`."""
        for path in self._partial.iterdir():
            if unwanted(path.name[:64]):
                path.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        """Hashes of all blobs, in no particular order."""
        return (path.name for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if HASH.fullmatch(path.name))

    def _damaged(self, hash: str) -> BlobMissing:
        self.remove(hash)
        return BlobMissing(f"blob {hash} was damaged and has been removed; it must be fetched again")

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile(dir=self._temporary, delete=False) as file:
            try:
                yield file  # type: ignore[misc]
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _finish(self, file: BinaryIO, hash: str, durable: bool) -> None:
        file.flush()
        if durable:
            os.fsync(file.fileno())
        self.adopt(Path(file.name), hash)
