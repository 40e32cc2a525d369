"""Bytes through our own streams (headers and payloads), in total and for the peers met last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_PEERS = 1024
"""Peer ids cost nothing to make, so the table of peers is bounded; the totals count everybody."""


@dataclass
class Count:
    """Bytes sent (`up`) and received (`down`)."""

    up: int = 0
    down: int = 0

    def add(self, up: int, down: int) -> None:
        self.up += up
        self.down += down


@dataclass
class Traffic:
    """Running totals since the start of the process."""

    total: Count = field(default_factory=Count)
    peers: OrderedDict[str, Count] = field(default_factory=OrderedDict)

    def up(self, peer: str) -> Callable[[int], None]:
        """A function that counts bytes sent to `peer`."""
        return lambda size: self._add(peer, size, 0)

    def down(self, peer: str) -> Callable[[int], None]:
        """A function that counts bytes received from `peer`."""
        return lambda size: self._add(peer, 0, size)

    def _add(self, peer: str, up: int, down: int) -> None:
        self.total.add(up, down)
        self.peers.setdefault(peer, Count()).add(up, down)
        self.peers.move_to_end(peer)
        if len(self.peers) > MAX_PEERS:
            self.peers.popitem(last=False)
