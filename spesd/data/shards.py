"""Token shards: files of tokens behind a small header, read through a memory map.

Layout, little-endian: magic (8 bytes), format version u16, dtype code u16, zero u32, token count u64, then the tokens.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from spesd.config.manifest import Shard

MAGIC = b"SPESTOKN"
VERSION = 1
SUFFIX = ".shard"
_HEADER = struct.Struct("<8sHHIQ")
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}


class DataError(ValueError):
    """Text or tokens that cannot be used; the message says which, why, and what to do."""


def write_shard(folder: Path, tokens: np.ndarray, vocabulary: int) -> Shard:
    """Write integer tokens [n], n at least 1, to `<hash>.shard` in `folder`, whole or not at all."""
    code = 1 if vocabulary <= 1 << 16 else 2
    header = _HEADER.pack(MAGIC, VERSION, code, 0, tokens.size)
    payload = tokens.astype(_DTYPES[code]).view(np.uint8)
    digest = blake3(header).update(payload.data).hexdigest()
    unfinished = folder / f".{digest}.tmp"
    with unfinished.open("wb") as file:
        file.write(header)
        file.write(payload.data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / f"{digest}{SUFFIX}")
    return Shard(hash=digest, bytes=len(header) + payload.nbytes, tokens=tokens.size)


def open_shard(path: Path, expected: Shard | None = None) -> np.ndarray:
    """Map the tokens of a shard, uint16 or uint32 [tokens], read-only.

    Every header field is checked, and size and count against `expected` if given; the content's hash is not.
    Raises DataError naming the file and the field.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"shard {path}: cannot be read ({error.strerror}); fetch or prepare it again") from None
    if len(header) < _HEADER.size:
        raise DataError(f"shard {path}: {size} bytes, shorter than the header of {_HEADER.size}")
    magic, version, code, reserved, count = _HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"shard {path}: magic is {magic!r}, not {MAGIC!r}; it is no token shard")
    if version != VERSION:
        raise DataError(f"shard {path}: format version {version}, this program reads {VERSION}")
    if code not in _DTYPES or reserved:
        raise DataError(f"shard {path}: dtype code {code} and reserved field {reserved}; known codes are {[*_DTYPES]}")
    if count < 1 or size != _HEADER.size + count * _DTYPES[code].itemsize:
        raise DataError(f"shard {path}: {size} bytes do not fit its token count {count}; fetch or prepare it again")
    if expected is not None and (size, count) != (expected.bytes, expected.tokens):
        wanted = f"{expected.bytes} bytes and {expected.tokens} tokens"
        raise DataError(f"shard {path}: {size} bytes and {count} tokens, the manifest says {wanted}")
    return np.memmap(path, dtype=_DTYPES[code], mode="r", offset=_HEADER.size, shape=(count,))
