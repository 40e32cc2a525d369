"""Shape of multiaddrs that a person types, checked before anything is dialled.

libp2p parses them again; this check exists to name the mistake, and to do so without importing the network.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated

from pydantic import AfterValidator

_DNS = ("dns", "dns4", "dns6", "dnsaddr")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,128}")
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337"


def check_endpoint(address: str) -> str:
    """Return `address` if it reads `/ip4/…/tcp/…`, else raise ValueError."""
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or any(char.isspace() for char in address):
        raise ValueError(f"{address!r} is not a multiaddr such as {_EXAMPLE}")
    _, network, host, transport, port = parts[:5]
    _check_host(network, host)
    if transport not in ("tcp", "udp"):
        raise ValueError(f"{address!r} has transport {transport!r}; tcp or udp is wanted, as in {_EXAMPLE}")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} has port {port!r}; a number from 0 to 65535 is wanted")
    return address


def check_peer_address(address: str) -> str:
    """Return `address` if it reads `/ip4/…/tcp/…/p2p/<peer id>`, else raise ValueError."""
    check_endpoint(address)
    head, found, peer = address.rpartition("/p2p/")
    if not found or not head or not _PEER_ID.fullmatch(peer):
        raise ValueError(f"{address!r} does not end with /p2p/<peer id>; paste the whole line of the other peer")
    return address


def _check_host(network: str, host: str) -> None:
    if network in _DNS:
        if not host:
            raise ValueError(f"/{network}/ needs a host name")
        return
    parsers: dict[str, type[IPv4Address] | type[IPv6Address]] = {"ip4": IPv4Address, "ip6": IPv6Address}
    if network not in parsers:
        raise ValueError(f"/{network}/ is not a network; one of {', '.join((*parsers, *_DNS))} is wanted")
    try:
        parsers[network](host)
    except ValueError:
        raise ValueError(f"{host!r} is not an {network} address") from None


Endpoint = Annotated[str, AfterValidator(check_endpoint)]
"""A multiaddr to listen on or to announce."""

PeerAddress = Annotated[str, AfterValidator(check_peer_address)]
"""A multiaddr that names a peer."""
