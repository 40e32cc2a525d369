"""What is known of the lines to other peers: whether a relay is between, and how long an answer takes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

MAX_PEERS = 1024
"""Peer ids cost nothing to make, so no more are remembered."""

KEPT_ANSWERS = 8
SMALL_BYTES = 4096
"""Requests and answers up to this size tell of the line's delay, larger ones of its rate."""


class Lines:
    """Filled by the transport."""

    def __init__(self) -> None:
        self.relayed: dict[str, bool] = {}
        """Connected peers: whether all connections to a peer go through a relay."""
        self._answers: OrderedDict[str, deque[float]] = OrderedDict()

    def answered(self, peer: str, seconds: float) -> None:
        """A small request was answered after so long."""
        self._answers.setdefault(peer, deque(maxlen=KEPT_ANSWERS)).append(seconds)
        self._answers.move_to_end(peer)
        if len(self._answers) > MAX_PEERS:
            self._answers.popitem(last=False)

    def rtt(self, peer: str) -> float | None:
        """Seconds of a round trip: the least of the last answers, for others were held up by what the peer does."""
        return min(self._answers[peer]) if peer in self._answers else None

    def connected(self, ends: Iterable[tuple[str, str]]) -> None:
        """These are all connections: peer, and multiaddr of its end."""
        relayed: dict[str, bool] = {}
        for peer, address in ends:
            relayed[peer] = relayed.get(peer, True) and "/p2p-circuit" in address
        self.relayed = relayed
