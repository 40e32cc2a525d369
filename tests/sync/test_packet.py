"""Packets: what is written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import digest

from spesd.sync import packet
from spesd.sync.codec import Fp16, Fp32, Values
from spesd.sync.ledger import Contributor
from spesd.sync.packet import NO_HASH, Header, Kind, Malformed

COUNT = 5
HEADER_BYTES = 212
NAMES_SIZE_AT = 48
CODEC = Fp32()
VALUES = np.arange(COUNT, dtype=np.float32)
NAMES = (Contributor("alice", 7, digest("a")), Contributor("bob", 9, digest("b")))
HEADER = Header(Kind.PACKET, digest("run"), 3, 4, 5, COUNT, digest("roster"), digest("x"), digest("y"), NAMES)
DATA = packet.write(HEADER, CODEC, CODEC.encode(VALUES))

contributors = st.builds(
    Contributor,
    st.text(min_size=1, max_size=40),
    st.integers(1, 1 << 62),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)


def read(data: bytes, **changes: Any) -> tuple[Header, Values]:
    expected = {"kind": Kind.PACKET, "run": HEADER.run, "unit": 3, "count": COUNT, "codec": CODEC} | changes
    return packet.read(data, **expected)


def with_names(names: bytes) -> bytes:
    """A packet whose list of contributors is these bytes, its lengths put right."""
    payload = CODEC.encode(VALUES)
    fixed = bytearray(DATA[:HEADER_BYTES])
    struct.pack_into("<I", fixed, NAMES_SIZE_AT, len(names))
    return bytes(fixed) + names + payload


@given(
    st.sampled_from([Fp32(), Fp16()]),
    st.lists(st.floats(-100, 100, width=16), max_size=20),
    st.lists(contributors, max_size=5),
    st.integers(0, 2**40),
)
def test_what_is_written_is_read(codec: Any, values: list[float], names: list[Contributor], version: int) -> None:
    vector = np.array(values, np.float32)
    header = dataclasses.replace(
        HEADER, count=vector.size, contributors=tuple(names), from_version=version, round=version + 1
    )
    data = packet.write(header, codec, codec.encode(vector))
    got, decoded = read(data, count=vector.size, codec=codec)
    assert got == header
    np.testing.assert_array_equal(decoded, vector)
    assert len(data) <= packet.max_size(codec.payload_size(vector.size))


def test_the_largest_list_of_contributors_fits() -> None:
    names = tuple(Contributor(f"{index:096d}", 1 << 62, NO_HASH) for index in range(packet.MAX_CONTRIBUTORS))
    data = packet.write(dataclasses.replace(HEADER, contributors=names), CODEC, CODEC.encode(VALUES))
    assert len(read(data)[0].contributors) == packet.MAX_CONTRIBUTORS
    assert len(data) <= packet.max_size(CODEC.payload_size(COUNT))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": Kind.CONTRIBUTION}, "kind"),
        ({"run": digest("another")}, "run"),
        ({"unit": 4}, "unit"),
        ({"count": COUNT + 1}, "count"),
        ({"codec": Fp16()}, "codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_packet_of_something_else_is_refused_and_the_field_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Malformed, match=f"^{field} is"):
        read(DATA, **changes)


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (0, "magic"),
        (4, "format"),
        (6, "kind"),
        (7, "codec"),
        (8, "unit"),
        (12, "block"),
        (32, "count"),
        (40, "payload size"),
        (52, "run"),
    ],
)
def test_each_corrupt_field_is_named(at: int, field: str) -> None:
    data = bytearray(DATA)
    data[at] ^= 0x40
    with pytest.raises(Malformed, match=field):
        read(bytes(data))


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_packet_is_refused(size: int) -> None:
    with pytest.raises(Malformed):
        read(DATA[:size])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_only_the_told_account(at: int, mask: int) -> None:
    data = bytearray(DATA)
    data[at] ^= mask
    try:
        header, values = read(bytes(data))
    except Malformed:
        return
    # versions, hashes and names are compared with the entry, and their hash is the packet's name
    np.testing.assert_array_equal(values, VALUES)
    assert header != HEADER


@given(st.binary(max_size=600))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read(data)
    with pytest.raises(Malformed):
        read(DATA[:HEADER_BYTES] + data + b"x")


@given(st.binary(max_size=200))
def test_any_bytes_for_contributors_are_refused_or_read_as_contributors(names: bytes) -> None:
    try:
        header, _ = read(with_names(names))
    except Malformed:
        return
    assert all(c.weight > 0 and len(bytes.fromhex(c.blob)) == 32 for c in header.contributors)


HOSTILE = {
    "too many": msgpack.packb([("a", 1, b"0" * 32)] * 1025),
    "map": msgpack.packb({"a": 1}),
    "ext": msgpack.packb([msgpack.ExtType(5, b"x" * 40)]),
    "timestamp": b"\x91\xd6\xff\x00\x00\x00\x00",
    "deep": b"\x91" * 5000 + b"\x01",
    "promises 4 Gi elements": b"\xdd\xff\xff\xff\xff",
    "promises 4 GiB of bytes": b"\x91\x93\xa1a\x01\xc6\xff\xff\xff\xff",
    "weight zero": msgpack.packb([("a", 0, b"0" * 32)]),
    "weight negative": msgpack.packb([("a", -1, b"0" * 32)]),
    "weight float": msgpack.packb([("a", 1.5, b"0" * 32)]),
    "short hash": msgpack.packb([("a", 1, b"0" * 31)]),
    "hash is text": msgpack.packb([("a", 1, "0" * 64)]),
    "peer is bytes": msgpack.packb([(b"a", 1, b"0" * 32)]),
    "peer is no UTF-8": b"\x91\x93\xa1\xff\x01\xc4\x20" + b"0" * 32,
    "trailing": msgpack.packb([]) + b"\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("names", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_contributors_are_refused_without_a_large_allocation(names: bytes) -> None:
    data = with_names(names)
    tracemalloc.start()
    with pytest.raises(Malformed, match="contributor"):
        read(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_payload_that_is_not_what_was_hashed_is_refused() -> None:
    with pytest.raises(Malformed, match="hash"):
        read(DATA[:-1] + b"\x01")
    assert blake3(CODEC.encode(VALUES)).digest() in DATA
