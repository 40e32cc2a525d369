"""Frames and messages between daemon and trainer."""

import asyncio
import io
import subprocess
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spesd.train.link import (
    LENGTH,
    MAX_FRAME_BYTES,
    Failed,
    FailureReason,
    LinkError,
    Load,
    Pause,
    SnapshotTaken,
    Start,
    decode_command,
    decode_event,
    encode,
    read_command,
    read_event,
)


def test_messages_come_back_in_order():
    start = Start(
        manifest=b"{}",
        peer_id="p",
        owned=("expert-1",),
        round=0,
        position=5,
        shards={"a": "/x"},
        inbound="i",
        snapshot="s",
    )
    load = Load(units=("shared-0", "expert-2"), mode="add", round=3)
    stream = io.BytesIO(encode(start) + encode(load) + encode(Pause()))
    assert [read_command(stream) for _ in range(4)] == [start, load, Pause(), None]


async def test_events_are_read_from_a_stream():
    taken = SnapshotTaken(round=1, steps=2, tokens=3, position=4, loss=None, units=("shared-0",))
    failed = Failed(reason=FailureReason.NON_FINITE, detail="x")
    reader = asyncio.StreamReader()
    reader.feed_data(encode(taken) + encode(failed))
    reader.feed_eof()
    assert await read_event(reader) == taken
    assert await read_event(reader) == failed
    with pytest.raises(asyncio.IncompleteReadError):
        await read_event(reader)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"type": "nonsense"}, "type"),
        ({}, "type"),
        ({"type": "snapshot"}, "round"),
        ({"type": "snapshot", "round": -1}, "round"),
        ({"type": "load", "units": [], "mode": "multiply", "round": 0}, "mode"),
        ({"type": "pause", "more": 1}, "more"),
        ([1, 2], "not a map"),
        (msgpack.ExtType(5, b""), "not msgpack"),
        ({"type": msgpack.ExtType(5, b"x")}, "not msgpack"),
    ],
)
def test_what_is_no_message_is_refused(fields, complaint):
    with pytest.raises(LinkError, match=complaint):
        decode_command(msgpack.packb(fields))


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_link_error(payload):
    for decode in (decode_command, decode_event):
        try:
            decode(payload)
        except LinkError as error:
            assert str(error)


def test_a_frame_that_is_too_long_or_cut_short_is_refused_before_it_is_read():
    with pytest.raises(LinkError, match="at most"):
        read_command(io.BytesIO(LENGTH.pack(MAX_FRAME_BYTES + 1)))
    whole = encode(Pause())
    for size in (2, len(whole) - 1):
        with pytest.raises(LinkError, match="ended inside"):
            read_command(io.BytesIO(whole[:size]))
    with pytest.raises(LinkError, match="load of"):
        encode(Load(units=("x" * MAX_FRAME_BYTES,), mode="add", round=0))


def test_the_daemon_side_needs_no_torch():
    code = "import sys, spesd.train.link, spesd.train.exchange; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
