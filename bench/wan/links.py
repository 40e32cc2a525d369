"""Access links and what becomes of a packet that crosses two of them. Pure: the clock is handed in."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

TCP, UDP = 6, 17

QUEUE_SECONDS = 0.1
"""Longest wait in the queue before a link; what would wait longer is dropped."""


class Link(BaseModel):
    """A node's access to the internet. Loss strikes what the node sends."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    up: float = Field(gt=0, description="Mbit/s")
    down: float = Field(gt=0, description="Mbit/s")
    rtt: float = Field(default=50.0, ge=0, description="round trip to a node with the same figure, ms")
    loss: float = Field(default=0.0, ge=0, lt=1, description="share of packets")
    closed: bool = Field(default=False, description="behind a firewall or NAT: nothing comes in but answers")

    def faster(self, factor: float) -> Link:
        """The same link with `factor` times the rates."""
        return self.model_copy(update={"up": self.up * factor, "down": self.down * factor})


class Flow(NamedTuple):
    """One direction of what two programs say to each other."""

    protocol: int
    source: bytes
    target: bytes

    @classmethod
    def of(cls, packet: bytes) -> Flow:
        """The flow of an IPv4 packet: addresses, and ports where the protocol has them."""
        at, protocol = 4 * (packet[0] & 15), packet[9]
        ports = packet[at : at + 4] if protocol in (TCP, UDP) else b""
        return cls(protocol, packet[12:16] + ports[:2], packet[16:20] + ports[2:])

    def begins(self, packet: bytes) -> bool:
        """Whether this packet of the flow asks for a TCP connection: SYN without ACK."""
        return self.protocol == TCP and packet[4 * (packet[0] & 15) + 13] & 0x12 == 0x02

    @property
    def answers(self) -> Flow:
        """The other direction."""
        return Flow(self.protocol, self.target, self.source)


class Firewalls:
    """The routers of homes: what comes in must answer what went out.

    Over TCP no hole can be punched either: two ends that dial each other at once do not meet, as behind a NAT that
    gives every connection a port of its own.
    """

    def __init__(self) -> None:
        self._open: set[Flow] = set()

    def passes(self, source: Link, target: Link, packet: bytes) -> bool:
        """Whether an IPv4 packet gets through the firewalls of both ends."""
        flow = Flow.of(packet)
        if source.closed:
            self._open.add(flow)
        return not target.closed or (flow.answers in self._open and not flow.begins(packet))


class Internet:
    """Links by node number. Each direction of a link is a queue that drains at its rate; nothing waits between."""

    def __init__(self, links: Mapping[int, Link], seed: int = 0) -> None:
        self.links = dict(links)
        self._side = dict.fromkeys(links, 0)
        self._up_free = dict.fromkeys(links, 0.0)
        self._down_free = dict.fromkeys(links, 0.0)
        self._random = random.Random(seed)

    def split(self, sides: Sequence[Collection[int]]) -> None:
        """Cut the internet between these groups of nodes, and those in no group from all of them; no groups heal it."""
        self._side = dict.fromkeys(self.links, len(sides))
        self._side.update({node: side for side, nodes in enumerate(sides) for node in nodes})

    def arrival(self, now: float, source: int, target: int, size: int) -> float | None:
        """When a packet of `size` bytes that leaves `source` now has reached `target`; None if it is lost on the way.

        Times in seconds. A lost packet has used the uplink, a dropped one has not.
        """
        up, down = self.links[source], self.links[target]
        sent = self._queue(self._up_free, source, now, size, up.up)
        if sent is None or (up.loss and self._random.random() < up.loss) or self._side[source] != self._side[target]:
            return None
        # each direction of each of the two links has a quarter of its round trip
        return self._queue(self._down_free, target, sent + (up.rtt + down.rtt) / 4000, size, down.down)

    @staticmethod
    def _queue(free: dict[int, float], node: int, now: float, size: int, rate: float) -> float | None:
        begins = max(free[node], now)
        if begins - now > QUEUE_SECONDS:
            return None
        free[node] = begins + size * 8e-6 / rate
        return free[node]
