"""Packets and contributions as bytes: a fixed header, the list of contributors, the encoded payload.

A contribution carries one owner's delta to the reducer; a packet carries the result of a round to everybody. They
share one form. Every length follows from the manifest, so that nothing from outside decides how much is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgpack
from blake3 import blake3

from spesd.sync.codec import Codec, Values
from spesd.sync.ledger import Contributor
from spesd.sync.messages import MAX_CONTRIBUTORS

MAGIC = b"SPES"
FORMAT = 1
MAX_CONTRIBUTORS_BYTES = MAX_CONTRIBUTORS * 192
NO_HASH = "0" * 64

# magic, format, kind, codec | unit, block | from version, round, count, payload bytes | contributors bytes | hashes
_HEADER = struct.Struct("<4sHBBIIQQQQI32s32s32s32s32s")


class Kind(IntEnum):
    """What the bytes are."""

    CONTRIBUTION = 1
    PACKET = 2


class Malformed(ValueError):
    """Bytes that are no valid packet of this run; the message names the field."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part. Hashes are hex; `after` and contributors are empty (zero) in a contribution."""

    kind: Kind
    run: str
    unit: int
    from_version: int
    round: int
    count: int
    roster: str
    before: str
    after: str
    contributors: tuple[Contributor, ...] = ()


def max_size(payload: int) -> int:
    """Most bytes that a contribution or packet with a payload of so many may have."""
    return _HEADER.size + MAX_CONTRIBUTORS_BYTES + payload


def write(header: Header, codec: Codec, payload: bytes) -> bytes:
    """Join header and payload (`codec.encode` of `header.count` values)."""
    names = msgpack.packb([(c.peer, c.weight, bytes.fromhex(c.blob)) for c in header.contributors])
    fixed = _HEADER.pack(
        MAGIC, FORMAT, header.kind, codec.id, header.unit, codec.block, header.from_version, header.round,
        header.count, len(payload), len(names), bytes.fromhex(header.run), bytes.fromhex(header.roster),
        blake3(payload).digest(), bytes.fromhex(header.before), bytes.fromhex(header.after),
    )  # fmt: skip
    return b"".join((fixed, names, payload))


def read(data: bytes, *, kind: Kind, run: str, unit: int, count: int, codec: Codec) -> tuple[Header, Values]:
    """Check `data` against what is expected and decode it.

    Returns the header and float32 [count] (not yet checked for NaN: see `aggregate.check`).
    Raises Malformed for anything else than a well-formed packet of this run, unit, size and codec.
    """
    if len(data) < _HEADER.size:
        raise Malformed(f"{len(data)} bytes are too few for a header of {_HEADER.size}")
    (
        magic, version, got_kind, codec_id, got_unit, block, from_version, round_, got_count, payload_size, names_size,
        got_run, roster, payload_hash, before, after,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    expected = {
        "magic": (magic, MAGIC),
        "format": (version, FORMAT),
        "kind": (got_kind, kind),
        "codec": (codec_id, codec.id),
        "block": (block, codec.block),
        "run": (got_run.hex(), run),
        "unit": (got_unit, unit),
        "count": (got_count, count),
        "payload size": (payload_size, codec.payload_size(count)),
    }
    for name, (got, want) in expected.items():
        if got != want:
            raise Malformed(f"{name} is {got!r}, expected {want!r}")
    if names_size > MAX_CONTRIBUTORS_BYTES or len(data) != _HEADER.size + names_size + payload_size:
        raise Malformed(f"{len(data)} bytes do not match the header's lengths")
    names = _read_contributors(data[_HEADER.size : _HEADER.size + names_size])
    payload = memoryview(data)[_HEADER.size + names_size :]
    if blake3(payload).digest() != payload_hash:
        raise Malformed("payload does not match its hash")
    header = Header(kind, run, unit, from_version, round_, count, roster.hex(), before.hex(), after.hex(), names)
    try:
        return header, codec.decode(payload, count)
    except ValueError as error:
        raise Malformed(str(error)) from None


def _read_contributors(data: bytes) -> tuple[Contributor, ...]:
    try:
        rows = msgpack.unpackb(data, max_ext_len=0, max_array_len=MAX_CONTRIBUTORS, max_map_len=0)
        names = tuple(Contributor(peer, weight, blob.hex()) for peer, weight, blob in rows)
    except Exception as error:
        raise Malformed(f"contributors cannot be read: {error}") from None
    for name in names:
        valid = isinstance(name.peer, str) and isinstance(name.weight, int) and name.weight > 0 and len(name.blob) == 64
        if not valid:
            raise Malformed(f"contributor {name!r} is not (peer, positive weight, hash)")
    return names
