"""Strict msgpack: what we write comes back, anything else is one kind of error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import MAX_DEPTH, WireError, pack, read_header, read_payload, unpack

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars | st.binary(), lambda below: st.lists(below) | st.dictionaries(st.text(), below), max_leaves=8
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max((depth(item) for item in value), default=-1) if isinstance(value, list) else 0


@given(plain)
def test_what_we_pack_comes_back(value: Any) -> None:
    if depth(value) <= MAX_DEPTH:
        assert unpack(pack(value), 1 << 20) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    try:
        unpack(data, 100)
    except WireError:
        return
    assert len(data) <= 100


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pack(bytes(100)), "at most 50"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "ext type 5"),
        (msgpack.packb(msgpack.Timestamp(1)), "Timestamp"),
        (msgpack.packb({1: 2}), "int is not allowed"),
        (msgpack.packb({b"k": 2}), "not a string"),
        (b"\x91" * 20 + b"\xc0", "nested deeper than 8"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\xa1\xff", "not msgpack"),
        (pack([1]) + b"\x00", "not msgpack"),
    ],
)
def test_what_we_never_write_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(data, 50)


def test_things_without_a_plain_form_are_not_packed() -> None:
    with pytest.raises(TypeError):
        pack({1, 2})


async def test_a_short_stream_is_an_end_of_file_and_a_long_header_an_error() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data((1 << 30).to_bytes(4, "big"))
    with pytest.raises(WireError, match="header length 1073741824"):
        await read_header(reader, Traffic().down("peer", "protocol", True))
    reader.feed_data(b"1234")
    reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await read_payload(reader, 1 << 40, 5, Traffic().down("peer", "protocol", True))


HOSTILE_VALUE = """
import sys, msgpack
from hivemind.utils.serializer import MSGPackSerializer
value = msgpack.packb([])
for _ in range(20000):
    value = msgpack.packb(msgpack.ExtType(0x40, bytes([0x91]) + value))
if sys.argv[1] == "hardened":
    from spesd.swarm.wire import harden_hivemind
    harden_hivemind()
try:
    MSGPackSerializer.loads(value)
except ValueError as error:
    sys.exit(0 if "ext type 64" in str(error) else 3)
"""


def test_hivemind_dies_of_nested_tuples_unless_hardened() -> None:
    codes = [
        subprocess.run([sys.executable, "-c", HOSTILE_VALUE, how], check=False, timeout=60, capture_output=True)
        for how in ("hardened", "bare")
    ]
    assert codes[0].returncode == 0
    assert codes[1].returncode != 0
