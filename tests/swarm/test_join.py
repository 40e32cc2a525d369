"""A joiner who knows only an address learns which run it leads to."""

from __future__ import annotations

import time
from typing import Any

import pytest
from swarm_harness import RUN, StartTransport

from spesd.swarm.errors import PeerMisbehaved, PeerRefused
from spesd.swarm.join import HelloInfo, differences, hello, serve_hello
from spesd.swarm.transport import HELLO_PROTOCOL

INFO = HelloInfo(run_id=RUN, manifest_hash=RUN, manifest_bytes=1234, version="0.1")


async def test_hello_tells_the_run_and_the_clock(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, joiner = await start_transport(), await start_transport(connect=False)
    await serve_hello(server, lambda: INFO)
    answer = await hello(joiner, server.addresses()[0], timeout=10)
    assert answer.info == INFO and answer.peer == server.peer_id and answer.clock_agrees

    async def ahead(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {"info": INFO.model_dump(), "time": time.time() + 60}

    await server.serve(HELLO_PROTOCOL, ahead)
    answer = await hello(joiner, server.addresses()[0], timeout=10)
    assert not answer.clock_agrees and 55 < answer.clock_skew < 65


async def test_a_malformed_hello_names_the_field(start_transport: StartTransport) -> None:
    server, joiner = await start_transport(), await start_transport()
    with pytest.raises(PeerRefused, match="does not serve"):
        await hello(joiner, server.addresses()[0], timeout=10)
    bodies: list[dict[str, Any]] = [
        {"info": INFO.model_dump() | {"manifest_bytes": 1 << 40}, "time": 1.0},
        {"info": INFO.model_dump() | {"run_id": "x"}, "time": 1.0},
        {},
    ]

    async def answer(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return bodies.pop()

    await server.serve(HELLO_PROTOCOL, answer)
    for field in ("unknown shape", "run_id", "manifest_bytes"):
        with pytest.raises(PeerMisbehaved, match=field):
            await hello(joiner, server.addresses()[0], timeout=10)


def test_differences_are_dotted_and_name_both_sides() -> None:
    mine = {"name": "a", "model": {"layers": 2, "width": 64}, "same": [1], "only": 1}
    theirs = {"name": "b", "model": {"layers": 3, "width": 64}, "same": [1], "model2": {}}
    assert differences(mine, theirs) == {
        "name": ("a", "b"),
        "model.layers": (2, 3),
        "only": (1, None),
        "model2": (None, {}),
    }
    assert differences(mine, mine) == {}
