"""Catching up: find out who has better states than ours, ask for the way there, and take it.

One mechanism serves the joiner with nothing, the peer that missed rounds, and the loser of a fork: the way is a list
of packets if our state lies on the other's chain, or a full state and the packets after it (`trail.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import inf

from spesd.sync.context import Context
from spesd.sync.ledger import Head, PeerId, UnitId, is_better
from spesd.sync.messages import EntryInfo, HeadInfo, Heads, Trail, TrailRequest
from spesd.sync.pipeline import Pipeline
from spesd.sync.trail import plan

MAX_HISTORY = 64
"""States of a unit that are named in a request for a trail."""

MAX_REQUEST = 1024
"""States that are named in one request, so that it stays a small message; more units go into another."""

GOSSIP_SECONDS = 3.0
"""Time between two exchanges of heads with a live peer drawn at random."""


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: PeerId
    deadline: float


class CatchUp:
    """Knows for each unit who offers a better state, and asks one of them at a time."""

    def __init__(self, context: Context, pipeline: Pipeline) -> None:
        self._context = context
        self._pipeline = pipeline
        self._offers: defaultdict[UnitId, dict[PeerId, Head]] = defaultdict(dict)
        self._asked: dict[UnitId, _Asked] = {}
        self._guides: dict[UnitId, PeerId] = {}
        self._next_gossip = float("-inf")

    def heard(self, peer: PeerId, heads: Mapping[UnitId, Head]) -> None:
        """`peer` has these states."""
        for unit, head in heads.items():
            if unit not in self._context.sizes:
                continue
            if self._context.wants(unit, head) and self._context.believes(head):
                self._offers[unit][peer] = head
            else:
                self._offers[unit].pop(peer, None)

    def lost(self, peer: PeerId) -> None:
        """`peer` cannot be reached."""
        for offers in self._offers.values():
            offers.pop(peer, None)
        self._asked = {unit: asked for unit, asked in self._asked.items() if asked.peer != peer}

    def failed(self, unit: UnitId) -> None:
        """A step of `unit` has failed: ask somebody else, until the one who told us the way offers it anew."""
        guide = self._guides.pop(unit, None)
        if guide is not None:
            self._offers[unit].pop(guide, None)

    def behind(self) -> list[UnitId]:
        """Units of which somebody is known to have a better state."""
        wants = self._context.wants
        return [unit for unit, offers in self._offers.items() if any(wants(unit, head) for head in offers.values())]

    def current(self, trained: Set[UnitId]) -> bool:
        """Whether a peer that trains these units may begin: they are the newest known, the others not far behind."""
        ledger, allowed, behind = self._context.ledger, self._context.settings.lag_rounds, self.behind()
        if not ledger.complete or trained & set(behind):
            return False
        newest = {unit: max(head.version for head in self._offers[unit].values()) for unit in behind}
        return all(version - ledger[unit].history()[-1].version <= allowed for unit, version in newest.items())

    def has_better_than(self, heads: Mapping[UnitId, Head]) -> bool:
        """Whether we have a better state of any unit than a peer with `heads`, so that an answer is worth it."""
        return any(is_better(head, heads.get(unit)) for unit, head in self._context.ledger.heads().items())

    def my_heads(self, reply: bool) -> Heads:
        """All our states, as a message."""
        heads = {unit: HeadInfo.of(head) for unit, head in self._context.ledger.heads().items()}
        return Heads(round=self._context.newest_round, heads=heads, reply=reply)

    def tick(self, now: float) -> None:
        """Gossip when it is time; ask for trails to better states."""
        context = self._context
        if now >= self._next_gossip and context.live:
            self._next_gossip = now + GOSSIP_SECONDS * context.random.uniform(0.8, 1.2)
            context.send(context.random.choice(sorted(context.live)), self.my_heads(reply=False))
        for unit, asked in list(self._asked.items()):
            if now >= asked.deadline:
                del self._asked[unit]
                self._offers[unit].pop(asked.peer, None)
        self._ask(now)

    def deadline(self) -> float:
        """When `tick` has something to do."""
        gossip = self._next_gossip if self._context.live else inf
        return min([gossip, *(asked.deadline for asked in self._asked.values())])

    # Asking ----------------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        context = self._context
        requests: defaultdict[PeerId, dict[UnitId, list[HeadInfo]]] = defaultdict(dict)
        for unit in self.behind():
            if unit in self._asked or self._pipeline.busy(unit):
                continue
            offers = self._offers[unit]
            best = min((-head.weight, head.hash) for head in offers.values())
            peer = context.random.choice(sorted(p for p, h in offers.items() if (-h.weight, h.hash) == best))
            self._asked[unit] = _Asked(peer, now + context.settings.packet_seconds)
            history = context.ledger[unit].history()[-MAX_HISTORY:]
            requests[peer][unit] = [HeadInfo.of(head) for head in reversed(history)]
        for peer, units in requests.items():
            for batch in _batches(units):
                context.send(peer, TrailRequest(units=batch))

    def requested(self, peer: PeerId, request: TrailRequest) -> None:
        """Tell `peer` the way to our states."""
        for unit, infos in request.units.items():
            if unit not in self._context.sizes:
                continue
            chain = self._context.ledger[unit]
            theirs = [info.head() for info in infos]
            common = next((head for head in theirs if chain.after(head) is not None), None)
            entries = chain.after(common) if common is not None else None
            if chain.head is None or common == chain.head:
                continue
            anchor = None
            if common is None or common != theirs[0] or entries is None or common.version < chain.anchors[-1].version:
                anchor = chain.anchors[-1]
                from_anchor = chain.after(anchor) or []
                entries = from_anchor if entries is None or len(from_anchor) > len(entries) else entries
            trail = Trail(
                unit=unit,
                common=HeadInfo.of(common) if common else None,
                anchor=HeadInfo.of(anchor) if anchor else None,
                entries=[EntryInfo.of(entry) for entry in entries],
            )
            self._context.send(peer, trail)

    def told(self, peer: PeerId, trail: Trail) -> None:
        """Take the way that `peer` tells, if we asked for it and it leads to something better."""
        unit = trail.unit
        asked = self._asked.get(unit)
        if asked is None or asked.peer != peer:
            return
        del self._asked[unit]
        head = self._context.ledger[unit].head
        if trail.common is not None and self._context.ledger[unit].after(trail.common.head()) is None:
            # our chain has changed since we asked, or never had this state
            self._offers[unit].pop(peer, None)
            return
        try:
            steps, end = plan(trail, head, 4 * self._context.sizes[unit], self._context.is_lazy(unit))
        except ValueError as error:
            self._context.strike(peer, f"trail of {unit}: {error}")
            self._offers[unit].pop(peer, None)
            return
        others = [p for p in self._offers[unit] if p != peer]
        if steps and is_better(end, head) and self._context.believes(end):
            self._guides[unit] = peer
            self._pipeline.go(unit, steps, [peer, *others])
        else:
            self._offers[unit].pop(peer, None)


def _batches(units: Mapping[UnitId, list[HeadInfo]]) -> list[dict[UnitId, list[HeadInfo]]]:
    batches: list[dict[UnitId, list[HeadInfo]]] = []
    room = 0
    for unit, history in units.items():
        if room < len(history) or not batches:
            batches.append({})
            room = MAX_REQUEST
        batches[-1][unit] = history
        room -= len(history) + 1
    return batches
