"""Bytes between peers: strict msgpack, and messages of one small header and one raw payload.

A message is a 4-byte big-endian header length, the header (a msgpack map), and as many raw payload bytes as the header
says. Everything read here is hostile until proven otherwise: lengths are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Protocol

import msgpack

MAX_HEADER_BYTES = 256 << 10
MAX_DEPTH = 8
FRAME_BYTES = 64 << 10
"""A payload is written in frames of this size; each must go through within the idle deadline."""

MAX_DHT_RECORDS = 8192
_DICTIONARY_EXT = 0x50
_PREFIX_BYTES = 4

Buffer = bytes | bytearray | memoryview


class Meter(Protocol):
    """Asked before bytes pass, told when they have: caps and counts one direction of one stream."""

    async def wait(self, size: int) -> None:
        """Return when `size` more bytes may pass."""
        ...

    def count(self, size: int) -> None:
        """So many bytes have passed."""
        ...


class WireError(ValueError):
    """Bytes that no honest peer sends."""


def pack(value: Any) -> bytes:
    """Msgpack bytes of None, bool, int, float, str, bytes, and lists, tuples and dicts of them.

    Raises TypeError for anything else.
    """
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: Buffer, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Inverse of :func:`pack` for bytes from outside: no ext types, str keys only, bounded size and nesting.

    Raises WireError.
    """
    if len(data) > max_bytes:
        raise WireError(f"{len(data)} bytes of msgpack, at most {max_bytes} are accepted")
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse_ext)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack as spesd writes it: {error}") from None
    _check_plain(value, max_depth)
    return value


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack ext type {code} ({len(data)} bytes) is not accepted")


def _check_plain(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, list):
                below.extend(item)
            elif isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise WireError("a msgpack map has a key that is not a string")
                below.extend(item.values())
            elif item is not None and not isinstance(item, (bool, int, float, str, bytes)):
                raise WireError(f"msgpack value of type {type(item).__name__} is not accepted")
        if not below:
            return
        level = below
    raise WireError(f"msgpack nested deeper than {max_depth}")


def encode_header(header: dict[str, Any]) -> bytes:
    """A header with its length before it. Raises TypeError or ValueError for what may not be sent: our own mistake."""
    packed = pack(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"body of {len(packed)} bytes, at most {MAX_HEADER_BYTES} may be sent; use the payload")
    return len(packed).to_bytes(_PREFIX_BYTES, "big") + packed


async def write_message(writer: asyncio.StreamWriter, header: bytes, payload: Buffer, idle: float, sent: Meter) -> None:
    """Write an encoded header and a payload, as fast as `sent` allows.

    `idle` is the most seconds that one frame may take once it may go. Raises TimeoutError and ConnectionError.
    """
    frame: Buffer = header
    view = memoryview(payload).cast("B")
    for end in range(0, len(view) + FRAME_BYTES, FRAME_BYTES):
        if end:
            frame = view[end - FRAME_BYTES : end]
        await sent.wait(len(frame))
        writer.write(frame)
        async with asyncio.timeout(idle):
            await writer.drain()
        sent.count(len(frame))


async def read_header(reader: asyncio.StreamReader, received: Meter) -> dict[str, Any]:
    """Read a message's header. The caller sets the deadline.

    Raises WireError, asyncio.IncompleteReadError and ConnectionError.
    """
    size = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "big")
    received.count(_PREFIX_BYTES)
    if not 0 < size <= MAX_HEADER_BYTES:
        raise WireError(f"header length {size} is not in 1..{MAX_HEADER_BYTES}")
    await received.wait(_PREFIX_BYTES + size)
    header = unpack(await reader.readexactly(size), MAX_HEADER_BYTES)
    received.count(size)
    if not isinstance(header, dict):
        raise WireError(f"header is a {type(header).__name__}, not a map")
    return header


async def read_payload(reader: asyncio.StreamReader, size: int, idle: float, received: Meter) -> bytes:
    """Read `size` raw bytes, already checked by the caller, as fast as `received` allows.

    Memory grows with what has arrived, not with the promise. `idle` is the most seconds without a byte. Raises
    TimeoutError, asyncio.IncompleteReadError and ConnectionError.
    """
    payload = bytearray()
    allowed = 0
    while len(payload) < size:
        if len(payload) == allowed:
            more = min(FRAME_BYTES, size - allowed)
            await received.wait(more)
            allowed += more
        try:
            async with asyncio.timeout(idle):
                frame = await reader.read(allowed - len(payload))
        except TimeoutError:
            raise TimeoutError(f"no byte for {idle:.1f} s, {size - len(payload)} still to come") from None
        if not frame:
            raise asyncio.IncompleteReadError(b"", size - len(payload))
        received.count(len(frame))
        payload += frame
    return bytes(payload)


def harden_hivemind() -> None:
    """Make hivemind's DHT refuse every msgpack ext type but its own flat dictionary, for this whole process.

    Its tuple ext type recurses in C: a 1.4 kB value nested 300 deep ends any reader with SIGSEGV. Call this before
    anything is read from the network. Calling it again changes nothing.
    """
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    def decode(cls: type[MSGPackSerializer], code: int, data: bytes) -> DictionaryDHTValue:
        if code != _DICTIONARY_EXT:
            raise WireError(f"DHT value with msgpack ext type {code} is not accepted")
        maxsize, latest, records = _read_dht_dictionary(data)
        with DictionaryDHTValue(maxsize).freeze() as dictionary:
            for subkey, value, expires in records:
                dictionary.store(subkey, value, expires)
            dictionary.latest_expiration_time = latest
        return dictionary

    MSGPackSerializer._decode_ext_types = classmethod(decode)


def _read_dht_dictionary(data: bytes) -> tuple[int | None, float, list[tuple[str, bytes, float]]]:
    """Check hivemind's packed dictionary: [maxsize, latest expiry, [[subkey, value, expiry], ...]]."""
    match unpack(data, max_bytes=4 << 20, max_depth=3):
        case [int() | float() | None as maxsize, int() | float() as latest, list() as items]:
            pass
        case _:
            raise WireError("DHT dictionary has an unknown shape")
    if len(items) > MAX_DHT_RECORDS:
        raise WireError(f"DHT dictionary of {len(items)} records, at most {MAX_DHT_RECORDS} are accepted")
    records = []
    for item in items:
        match item:
            case [str() as subkey, bytes() as value, int() | float() as expires] if math.isfinite(expires):
                records.append((subkey, value, float(expires)))
            case _:
                raise WireError("DHT dictionary holds a record of unknown shape")
    if not math.isfinite(latest):
        raise WireError("DHT dictionary has no finite expiry")
    bounded = isinstance(maxsize, int) and 0 < maxsize < MAX_DHT_RECORDS
    return (int(maxsize) if bounded else MAX_DHT_RECORDS), float(latest), records  # type: ignore[arg-type]
