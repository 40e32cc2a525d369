"""Windows: how many payload bytes are on their way to a peer, and how their sender knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_harness import StartTransport, eventually, raw_stream

from spesd.swarm.kept_streams import MORE, RECEIPT_BYTES, RECEIVED
from spesd.swarm.streams import Reply
from spesd.swarm.traffic import Traffic
from spesd.swarm.window import FIRST_BYTES, LEAST_BYTES, MAX_PEERS, MOST_BYTES, QUICK_SECONDS, SLOW_SECONDS, Windows
from spesd.swarm.wire import encode_header, read_header

BLOB = "/spesd/1/test/blob"
SIZE = 10 * RECEIPT_BYTES

SLOW, QUICK = 2 * SLOW_SECONDS, QUICK_SECONDS / 2


class Clock:
    """Stands still but for `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def pass_through(windows: Windows, clock: Clock, size: int, seconds: float) -> None:
    async with windows.turn("x", size, True):
        clock.now += seconds


async def settled() -> None:
    """Let every task run until all wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@given(st.lists(st.tuples(st.integers(1, 3 * FIRST_BYTES), st.booleans(), st.booleans()), max_size=30))
def test_no_more_than_the_window_is_on_its_way_and_all_have_their_turn(rows: list[tuple[int, bool, bool]]) -> None:
    async def run() -> None:
        windows = Windows(Clock())
        window = windows._window("x")
        done, widest = 0, FIRST_BYTES

        async def send(size: int, urgent: bool) -> None:
            nonlocal done, widest
            async with windows.turn("x", size, urgent):
                assert size <= window.on_the_way <= widest or window.on_the_way == size, "a larger one goes alone"
                await asyncio.sleep(0)
                widest += size  # it came at once
            done += 1

        tasks = [(asyncio.create_task(send(size, urgent)), given_up) for size, urgent, given_up in rows]
        await asyncio.sleep(0)
        for task, given_up in tasks:
            if given_up:
                task.cancel()
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert not [result for result in results if isinstance(result, AssertionError)]
        assert done >= sum(1 for _, _, given_up in rows if not given_up)
        assert not windows.on_the_way and not window._queue

    asyncio.run(run())


async def test_a_window_narrows_once_a_second_while_payloads_are_slow_and_widens_when_they_are_quick() -> None:
    clock = Clock()
    windows = Windows(clock)
    window = windows._window("x")
    await pass_through(windows, clock, SIZE, SLOW)
    assert window.size == FIRST_BYTES // 2
    window.learn(SIZE, SLOW, clock.now + SLOW_SECONDS / 2)
    assert window.size == FIRST_BYTES // 2, "those that were sent together tell the same"
    for _ in range(40):
        await pass_through(windows, clock, SIZE, SLOW)
    assert window.size == LEAST_BYTES
    await pass_through(windows, clock, SIZE, QUICK)
    assert window.size == LEAST_BYTES + SIZE
    await pass_through(windows, clock, 2 * MOST_BYTES, QUICK)
    assert window.size == MOST_BYTES


@pytest.mark.parametrize(("seconds", "size"), [(QUICK, FIRST_BYTES), (SLOW, FIRST_BYTES // 2)])
async def test_what_was_refused_or_given_up_tells_something_only_if_it_took_long(seconds: float, size: int) -> None:
    clock = Clock()
    windows = Windows(clock)
    with pytest.raises(TimeoutError):
        async with windows.turn("x", SIZE, True):
            clock.now += seconds
            raise TimeoutError
    assert windows._window("x").size == size


async def test_what_is_urgent_overtakes_what_waits_and_other_peers_do_not_wait_at_all() -> None:
    windows, order = Windows(Clock()), []
    gate = asyncio.Event()

    async def send(name: str, peer: str, urgent: bool) -> None:
        async with windows.turn(peer, FIRST_BYTES, urgent):
            order.append(name)
            await gate.wait()

    names = [("first", "x", False), ("later", "x", False), ("urgent", "x", True), ("other", "y", False)]
    tasks = []
    for name, peer, urgent in names:
        tasks.append(asyncio.create_task(send(name, peer, urgent)))
        await settled()
    assert order == ["first", "other"]
    gate.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "other", "urgent", "later"]


async def test_idle_windows_are_forgotten_when_there_are_too_many() -> None:
    clock = Clock()
    windows = Windows(clock)
    async with windows.turn("busy", SIZE, True):
        for index in range(MAX_PEERS + 5):
            async with windows.turn(f"peer {index}", SIZE, True):
                pass
        assert len(windows._windows) <= MAX_PEERS + 6
    async with windows.turn("one more", SIZE, True):
        pass
    assert len(windows._windows) <= MAX_PEERS + 1


# Receipts ------------------------------------------------------------------------------------------------------------


async def serve_blob(peer: str, body: dict[str, Any], payload: bytes) -> Reply:
    return Reply({}, bytes(SIZE))


async def test_a_payload_is_on_its_way_until_the_other_end_has_said_that_it_came(
    start_transport: StartTransport,
) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(BLOB, serve_blob)
    reader, writer = await raw_stream(client, server, BLOB)
    request = encode_header({"body": {}, "payload": 0, "timeout": 10.0})
    writer.write(request)
    meter = Traffic().down(server.peer_id, BLOB, True)
    async with asyncio.timeout(10):
        await read_header(reader, meter)
        await reader.readexactly(SIZE)
    assert server.traffic.windows.on_the_way == {client.peer_id: SIZE}
    writer.write(RECEIVED)

    async def arrived() -> bool:
        return not server.traffic.windows.on_the_way

    await eventually(arrived)
    writer.write(MORE + request)
    async with asyncio.timeout(10):
        await read_header(reader, meter)
        await reader.readexactly(SIZE)
    writer.write(MORE)  # no receipt
    async with asyncio.timeout(10):
        assert await reader.read() == b"", "the stream is closed"
    assert not server.traffic.windows.on_the_way


async def test_our_own_requests_give_receipts(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(BLOB, serve_blob, max_payload=SIZE)
    for payload in (b"", bytes(SIZE)):
        reply = await client.request(server.peer_id, BLOB, {}, payload, timeout=10)
        assert len(reply.payload) == SIZE
        assert not client.traffic.windows.on_the_way

    async def arrived() -> bool:
        return not server.traffic.windows.on_the_way and server._admission.waiting_streams == {client.peer_id: 1}

    await eventually(arrived)


async def test_small_payloads_neither_wait_nor_count() -> None:
    traffic = Traffic()
    large, small = traffic.sending("x", FIRST_BYTES, True), traffic.sending("x", RECEIPT_BYTES, True)
    async with asyncio.timeout(5), large, small:
        assert traffic.windows.on_the_way == {"x": FIRST_BYTES}
    assert not traffic.windows.on_the_way


async def test_a_slow_payload_narrows_the_window_before_the_next_may_go() -> None:
    clock = Clock()
    windows, gates = Windows(clock), [asyncio.Event(), asyncio.Event()]
    began: list[int] = []

    async def send(index: int, size: int) -> None:
        async with windows.turn("x", size, True):
            began.append(index)
            if index < len(gates):
                await gates[index].wait()

    half = FIRST_BYTES // 2
    tasks = [asyncio.create_task(send(index, half)) for index in range(3)]
    await settled()
    assert began == [0, 1]
    clock.now = SLOW
    gates[0].set()
    await settled()
    assert began == [0, 1], "half of the window is left, and taken"
    gates[1].set()
    await asyncio.gather(*tasks)
    assert began == [0, 1, 2]
