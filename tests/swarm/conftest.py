"""Real p2pd processes on loopback. Whatever a test starts must be gone when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_harness import StartTransport, existing, p2pd_children

from spesd.swarm.p2pd import TransportConfig, socket_files
from spesd.swarm.streams import StreamLimits
from spesd.swarm.transport import Transport


@pytest.fixture
async def start_transport(tmp_path: Path) -> AsyncIterator[StartTransport]:
    """Start transports named by the order of the calls; all are stopped, and nothing of them may remain."""
    before = p2pd_children()
    started: list[Transport] = []
    sockets: list[str] = []

    async def start(
        limits: StreamLimits | None = None, *, connect: bool = True, listen: str = "/ip4/127.0.0.1/tcp/0"
    ) -> Transport:
        config = TransportConfig(tmp_path / f"peer-{len(started)}.key", host_maddrs=(listen,), nat_port_map=False)
        transport = await Transport.start(config, limits)
        started.append(transport)
        sockets.extend((*socket_files(transport.p2p), str(config.sockets_path)))
        transport.on_restart(lambda: _record(transport))
        if connect and transport is not started[0]:
            await transport.connect(started[0].addresses()[0], timeout=10)
        return transport

    async def _record(transport: Transport) -> None:
        sockets.extend(socket_files(transport.p2p))

    yield start
    for transport in reversed(started):
        await transport.stop()
    assert p2pd_children() == before
    assert existing(sockets) == []
