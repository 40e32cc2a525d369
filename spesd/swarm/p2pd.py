"""hivemind's p2pd: starting it, ending it, and what it leaves behind.

hivemind does not notice the death of its own p2pd, leaves socket files in the temporary folder when it is killed, and
starts a second p2pd on a busy port without complaint. All of that is dealt with here and in `transport.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivemind.p2p import P2P

from spesd.swarm.socket_files import note_of, remove_files


@dataclass(frozen=True)
class TransportConfig:
    """Where this peer listens and which key it has.

    `host_maddrs` may use port 0, unless `announce_maddrs` says under which addresses others reach us. Who cannot be
    reached (`reachability` private, or found to be so) is reached through one of `relays`, full multiaddrs. A public
    peer with `serve_relay` is a relay for whoever asks.
    """

    identity_path: Path
    host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: Sequence[str] = ()
    nat_port_map: bool = True
    reachability: Literal["auto", "public", "private"] = "auto"
    relays: Sequence[str] = ()
    serve_relay: bool = False
    start_seconds: float = 15.0

    @property
    def sockets_path(self) -> Path:
        """File that names our socket files, so that the next start can remove those of a killed process."""
        return note_of(self.identity_path)


class _NotRelaying(P2P):  # type: ignore[misc]
    """A p2pd that relays for nobody: hivemind has no setting for that."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        arguments: list[str] = P2P._make_process_args(*args, relayService=False, **kwargs)
        return arguments


async def launch(config: TransportConfig, host_maddrs: Sequence[str]) -> P2P:
    """Start a p2pd and connect to it. A cancelled launch leaves no process behind.

    Raises P2PDaemonError or OSError.
    """
    starting = asyncio.create_task(
        (P2P if config.serve_relay else _NotRelaying).create(
            host_maddrs=tuple(host_maddrs),
            announce_maddrs=tuple(config.announce_maddrs) or None,
            identity_path=str(config.identity_path),
            nat_port_map=config.nat_port_map,
            force_reachability=None if config.reachability == "auto" else config.reachability,
            use_auto_relay=bool(config.relays),
            trusted_relays=tuple(config.relays) or None,
            startup_timeout=config.start_seconds,
            idle_timeout=config.start_seconds,
        )
    )
    try:
        p2p = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await retire(await starting)
        raise
    config.sockets_path.write_text("\n".join(socket_files(p2p)))
    return p2p


async def retire(p2p: P2P) -> None:
    """End the p2pd (if it still runs) and remove its socket files."""
    files = socket_files(p2p)
    try:
        async with asyncio.timeout(5):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
    remove_files(files)


def socket_files(p2p: P2P) -> list[str]:
    """Paths of the unix sockets between hivemind and p2pd."""
    return [str(maddr).removeprefix("/unix") for maddr in (p2p._daemon_listen_maddr, p2p._client_listen_maddr)]


def with_fixed_ports(host_maddrs: Sequence[str], visible: Sequence[str]) -> list[str]:
    """Replace port 0 in `host_maddrs` by the ports that p2pd got, so that a restart listens where it did before."""
    return [_with_port(maddr, visible) for maddr in host_maddrs]


def _with_port(maddr: str, visible: Sequence[str]) -> str:
    parts = maddr.split("/")
    if parts[4:5] != ["0"]:
        return maddr
    for candidate in (address.split("/") for address in visible):
        if (
            len(candidate) >= len(parts)
            and candidate[1] == parts[1]
            and _shape(candidate, len(parts)) == parts[3:4] + parts[5:]
        ):
            return "/".join((*parts[:4], candidate[4], *parts[5:]))
    return maddr


def _shape(parts: Sequence[str], length: int) -> list[str]:
    return [parts[3], *parts[5:length]]
