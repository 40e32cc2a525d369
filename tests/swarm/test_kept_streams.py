"""Streams that carry one request after the other, and what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import create_autospec

import pytest
from swarm_harness import RUN, StartTransport, eventually

from spesd.swarm import kept_streams
from spesd.swarm.errors import PeerRefused, PeerTimeout, Refused
from spesd.swarm.kept_streams import GOODBYE, KEPT_STREAMS, RECEIPT_BYTES, KeptStreams, Stream
from spesd.swarm.streams import Reply, StreamLimits
from spesd.swarm.transport import Transport, protocol_name
from spesd.swarm.window import FIRST_BYTES

ECHO = protocol_name(RUN, "echo")
KEY = ("peer", ECHO)
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"


async def echo(peer: str, body: dict[str, Any], payload: bytes) -> Reply:
    if body.get("refuse"):
        raise Refused("not-wanted", "no")
    return Reply(body, payload)


def count_streams(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with each stream that `transport` opens."""
    opened: list[object] = []
    new_stream = transport._new_stream

    async def counted(target: Any, protocol: str) -> Stream:
        opened.append(target)
        return await new_stream(target, protocol)

    monkeypatch.setattr(transport, "_new_stream", counted)
    return opened


async def ask(client: Transport, server: Transport, body: dict[str, Any], payload: bytes = b"") -> Reply:
    return await client.request(server.peer_id, ECHO, body, payload, timeout=10)


async def test_one_stream_carries_requests_and_refusals(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=100)
    opened = count_streams(client, monkeypatch)
    for number in range(5):
        assert (await ask(client, server, {"n": number}, b"payload")).body == {"n": number}
        with pytest.raises(PeerRefused, match="no"):
            await ask(client, server, {"refuse": True}, b"payload")
    assert len(opened) == 1
    with pytest.raises(PeerRefused, match="at most 100"):  # its payload is never read, so that stream is of no more use
        await ask(client, server, {}, bytes(1 << 20))
    assert (await ask(client, server, {"n": 9})).body == {"n": 9}
    assert len(opened) == 2


@pytest.mark.parametrize(("kept", "requests"), [(0, 4000), (KEPT_STREAMS, 100)])
async def test_streams_over_quic_do_not_run_out(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch, kept: int, requests: int
) -> None:
    monkeypatch.setattr(kept_streams, "KEPT_STREAMS", kept)
    server, client = await start_transport(listen=QUIC), await start_transport(listen=QUIC)
    await server.serve(ECHO, echo)
    opened = count_streams(client, monkeypatch)
    for number in range(requests):  # of those that quic-go does not forget, libp2p allows 256
        if number % 3:
            await ask(client, server, {})
        else:
            with pytest.raises(PeerRefused):
                await ask(client, server, {"refuse": True})
    assert len(opened) == (1 if kept else requests)


async def test_a_stream_that_the_other_end_has_closed_is_replaced(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await start_transport(StreamLimits(waiting_seconds=0.05)), await start_transport()
    await server.serve(ECHO, echo)
    opened = count_streams(client, monkeypatch)
    await ask(client, server, {})

    async def closed() -> bool:
        return not server._admission.waiting_streams

    await eventually(closed)
    assert (await ask(client, server, {"n": 2})).body == {"n": 2}
    assert len(opened) == 2


async def test_a_stream_is_given_up_when_no_request_follows(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "KEPT_SECONDS", 0.1)
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo)
    await ask(client, server, {})
    assert server._admission.waiting_streams == {client.peer_id: 1}

    async def closed() -> bool:
        return not server._admission.waiting_streams and not client._outbound._kept._farewells

    await eventually(closed, seconds=3)


async def test_no_more_streams_wait_than_a_peer_may_have(start_transport: StartTransport) -> None:
    server, client = await start_transport(StreamLimits(waiting_per_peer=2)), await start_transport()
    await server.serve(ECHO, echo)
    await asyncio.gather(*(ask(client, server, {"n": number}) for number in range(8)))

    async def bounded() -> bool:
        return server._admission.waiting_streams == {client.peer_id: 2} and not server._admission.open_streams

    await eventually(bounded)


async def test_a_request_that_waits_for_its_turn_in_vain_leaves_the_kept_stream_to_others(
    start_transport: StartTransport,
) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=RECEIPT_BYTES + 1)
    await ask(client, server, {"n": 1})
    async with client.traffic.windows.turn(server.peer_id, FIRST_BYTES, True):
        with pytest.raises(PeerTimeout, match="no answer within"):
            await client.request(server.peer_id, ECHO, {}, bytes(RECEIPT_BYTES + 1), timeout=0.1)
    assert len(client._outbound._kept) == 1
    assert not client.traffic.windows.on_the_way
    assert (await ask(client, server, {"n": 2}, bytes(RECEIPT_BYTES + 1))).body == {"n": 2}


async def test_a_new_handler_serves_the_streams_that_are_open(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo)
    await ask(client, server, {"n": 1})

    async def other(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {"other": True}

    await server.serve(ECHO, other)
    assert (await ask(client, server, {"n": 1})).body == {"other": True}


def stream() -> tuple[Stream, list[bytes]]:
    """A stream that records what is written to it."""
    writer, written = create_autospec(asyncio.StreamWriter, instance=True), []
    writer.is_closing.return_value = False
    writer.write.side_effect = written.append
    return Stream(asyncio.StreamReader(), writer), written


async def test_the_one_used_last_is_taken_first_and_closed_ones_never() -> None:
    kept = KeptStreams()
    streams = [stream()[0] for _ in range(3)]
    for one in streams:
        kept.keep(KEY, one)
    streams[2].reader.feed_eof()
    assert kept.take(KEY) is streams[1]
    assert kept.take(("other", ECHO)) is None
    assert (kept.take(KEY), kept.take(KEY)) == (streams[0], None)
    assert len(kept) == 0


async def test_too_many_are_dismissed_with_a_goodbye() -> None:
    kept = KeptStreams()
    streams = [stream() for _ in range(KEPT_STREAMS + 1)]
    for one, _ in streams:
        kept.keep(KEY, one)
    await asyncio.sleep(0)
    assert len(kept) == KEPT_STREAMS
    assert [written for _, written in streams if written] == [[GOODBYE]] and streams[-1][1] == [GOODBYE]
    await kept.close()
    assert all(one.writer.close.called for one, _ in streams)
