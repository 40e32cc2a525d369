"""The serving side of one stream, without a network."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import create_autospec

from spesd.swarm.streams import Admission, Service, StreamLimits
from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import encode_header


async def test_an_answered_stream_stays_open_until_the_caller_closes_it() -> None:
    async def answer(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {}

    reader, sent, closed = asyncio.StreamReader(), asyncio.Event(), asyncio.Event()
    writer = create_autospec(asyncio.StreamWriter, instance=True)
    writer.write.side_effect = lambda data: sent.set()
    writer.close.side_effect = closed.set
    reader.feed_data(encode_header({"body": {}, "payload": 0, "timeout": 5.0}))
    service = Service("/echo", answer, 0, Admission(StreamLimits()), Traffic())
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.serve("peer", reader, writer))
        await sent.wait()
        for _ in range(10):  # all that the server can do without the caller
            await asyncio.sleep(0)
        assert not closed.is_set()
        reader.feed_eof()
        await closed.wait()
