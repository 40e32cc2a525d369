"""Two peers that nobody can dial train with each other through a relay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from e2e_harness import spesd
from wan_harness import HOME, LAN, PORT, WanPeer, WanSwarm, some_text, wan_draft

from bench.wan.emulator import address
from spesd.api.schema import Line

pytestmark = pytest.mark.timeout(180)

BARE_RELAYS = (4, 5, 6)
"""Nodes with a relay and nothing else: libp2p takes its time while it knows fewer than four."""

RELAY = """
import asyncio, sys
from pathlib import Path
from spesd.swarm.p2pd import TransportConfig
from spesd.swarm.transport import Transport

async def main():
    config = TransportConfig(
        Path(sys.argv[1]), [sys.argv[2]], nat_port_map=False, reachability="public", serve_relay=True
    )
    transport = await Transport.start(config)
    print(transport.addresses()[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.stop()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def relays(swarm: WanSwarm) -> Iterator[list[str]]:
    """Addresses of the bare relays."""
    processes = []
    for node in BARE_RELAYS:
        listen = f"/ip4/{address(node)}/tcp/{PORT}"
        argv = swarm.rig.argv(node, [sys.executable, "-c", RELAY, str(swarm.folder / f"relay-{node}.key"), listen])
        processes.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.communicate(timeout=30)


def test_two_peers_behind_firewalls_train_through_a_relay(swarm: WanSwarm, relays: list[str]) -> None:
    draft = wan_draft(swarm.folder / "draft.toml", some_text(swarm.folder))
    public = swarm.add("public", manifest=draft, reachability="public", serve_relay=True, train_experts=2)
    swarm.links(LAN, public)
    public.start()
    swarm.until("the founder tells its address", lambda: bool(public.track.status and public.status.join))
    hidden = []
    for name in ("hidden", "other"):
        peer = swarm.add(
            name,
            join=public.status.addresses[:1],
            reachability="private",
            relays=(public.status.addresses[0], *relays),
            train_experts=3,
        )
        swarm.links(HOME.model_copy(update={"closed": True}), peer)
        peer.start()
        hidden.append(peer)
    one, other = hidden
    swarm.until("all three train", lambda: all(peer.trains_with(3) for peer in (public, *hidden)), 90)

    def relayed(peer: WanPeer, to: WanPeer) -> bool:
        return any(row.peer == to.status.peer and row.line is Line.RELAYED for row in peer.status.neighbours)

    swarm.until("status says relayed", lambda: relayed(one, other) and relayed(other, one), 60)
    assert all(row.line is Line.DIRECT for row in public.status.neighbours)
    assert any("/p2p-circuit/" in told for told in one.status.addresses + other.status.addresses)
    swarm.until_agreed(3, public, *hidden)
    shown = spesd("status", "--state-dir", str(one.config.state_dir))
    assert "relayed" in shown.stdout and "direct" in shown.stdout
    print(shown.stdout)
