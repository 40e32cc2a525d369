"""The coordinator's part in a round: call it, gather who joins, freeze and sign the roster.

Any peer may find itself in this part: it belongs to the first of the live peers by rendezvous hash, and passes to the
next in order when a call does not come in time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spesd.sync.context import Context
from spesd.sync.ledger import Head, PeerId, UnitId, fork_order
from spesd.sync.messages import MAX_CONTRIBUTORS, MAX_LATE, Call, HeadInfo, Join, Roster, RosterUnit, SignedRoster

ENOUGH = 2
"""Complaints that make a peer count as late."""


@dataclass(slots=True)
class Gathering:
    """A call under way: `waiting` has not answered yet."""

    round: int
    attempt: int
    called: float
    deadline: float
    waiting: set[PeerId]
    joins: dict[PeerId, Join] = field(default_factory=dict)
    answered: set[PeerId] = field(default_factory=set)


class Coordinator:
    """Calls rounds when asked to. At most one call is under way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due: float | None = None
        self._next_round = 0
        self._attempt = 0
        self._last_call = float("-inf")
        self._thin_since: float | None = None
        self.gathering: Gathering | None = None
        self._last: Gathering | None = None

    def wanted(self, now: float, round_: int) -> None:
        """Somebody is ready for `round_`: call it as soon as `min_round_seconds` have passed since the last call."""
        if self.gathering is not None and self.gathering.round >= round_:
            return
        if self._due is None or round_ > self._next_round:
            self._next_round = round_
            self._due = max(now, self._last_call + self._context.settings.min_round_seconds)

    def joined(self, now: float, peer: PeerId, join: Join) -> None:
        """A peer answers the call."""
        last, gathering = self._last, self.gathering
        if not join.units and self._context.me in join.late:
            self._context.slow |= {self._context.me}
        if last is not None and (join.round, join.attempt) == (last.round, last.attempt):
            self._answered(now, peer, last, counts=bool(join.units))
        if gathering is None or (join.round, join.attempt) != (gathering.round, gathering.attempt):
            return
        gathering.waiting.discard(peer)
        if join.units and peer not in gathering.joins and len(gathering.joins) < MAX_CONTRIBUTORS:
            gathering.joins[peer] = join

    def give_way(self) -> None:
        """We have answered somebody else's call for the same round."""
        self.gathering = None

    def _answered(self, now: float, peer: PeerId, last: Gathering, counts: bool) -> None:
        """Learn from the time that an answer took, also a late one: else patience would shrink below a slow step."""
        context, took = self._context, now - last.called
        if now <= last.deadline:
            context.silent.discard(peer)
        if counts and peer != context.me and peer not in last.answered and took <= context.gathering.limit:
            last.answered.add(peer)
            context.gathering.saw(took)

    def lost(self, peer: PeerId) -> None:
        """A peer cannot be reached: do not wait for it."""
        if self.gathering is not None:
            self.gathering.waiting.discard(peer)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        if self.gathering is not None:
            return self.gathering.deadline if self.gathering.waiting else float("-inf")
        return self._due

    def tick(self, now: float) -> tuple[Call | None, SignedRoster | None]:
        """Return a call that has just gone out, or a roster that has just been frozen, for this peer itself.

        A call for a round that has come about without us is dropped.
        """
        newest = self._context.newest_round
        if self._next_round <= newest:
            self._due = None
        if self.gathering is not None and self.gathering.round <= newest:
            self.gathering = None
        if self.gathering is not None and (not self.gathering.waiting or now >= self.gathering.deadline):
            return None, self._freeze(now, self.gathering)
        if self.gathering is None and self._due is not None and now >= self._due:
            return self._call(now), None
        return None, None

    def _call(self, now: float) -> Call:
        context, seconds = self._context, self._context.gathering.seconds
        self._due, self._last_call = None, now
        self._attempt += 1
        call = Call(round=self._next_round, attempt=self._attempt, seconds=seconds)
        waiting = (context.live - context.silent) | {context.me}
        self.gathering = self._last = Gathering(call.round, call.attempt, now, now + seconds, waiting)
        context.broadcast(context.live, call)
        return call

    def _freeze(self, now: float, gathering: Gathering) -> SignedRoster | None:
        """Send the roster to its members; None if nobody joined, or too few yet."""
        self.gathering = None
        context = self._context
        context.silent |= gathering.waiting - {context.me}
        if not gathering.joins:
            return None
        if context.me in context.slow and gathering.joins.keys() == {context.me} and context.live:
            return None  # a round of our own would make all others wait for our link
        if self._too_few(now, gathering):
            return None
        roster = make_roster(context.me, gathering, context.in_turn(gathering.round))
        signed = SignedRoster(roster=roster, signature=context.signer.sign(roster.canonical_bytes()))
        context.broadcast(roster.tokens, signed)
        return signed

    def _too_few(self, now: float, gathering: Gathering) -> bool:
        """Whether to call again, as half of the last round's members are still at work in it: two halves would fork.

        Slow ones are not counted. For a while only: they may be there, but not train any more.
        """
        context = self._context
        awaited = (context.members - context.slow) & (context.live | {context.me})
        if not awaited or 2 * len(awaited & gathering.joins.keys()) > len(awaited):
            self._thin_since = None
            return False
        self._thin_since = now if self._thin_since is None else self._thin_since
        if now >= self._thin_since + context.stage.limit:
            return False
        self._due = now + context.gathering.seconds
        return True


def make_roster(coordinator: PeerId, gathering: Gathering, units: Iterable[UnitId]) -> Roster:
    """Take for each unit the state that most joined with, slow ones not counted, and of several the best.

    Those who have it contribute. Not simply the best: that may be a slow peer's, which nobody can fetch in time.
    """
    joins = dict(sorted(gathering.joins.items()))
    late = blamed({peer: join.late for peer, join in joins.items()})
    rows: dict[UnitId, RosterUnit] = {}
    for unit in units:
        owners: defaultdict[Head, list[PeerId]] = defaultdict(list)
        for peer, join in joins.items():
            if unit in join.units:
                owners[join.units[unit].head()].append(peer)
        if owners:
            head = min(owners, key=lambda head: (-len(set(owners[head]) - late), fork_order(head)))
            rows[unit] = RosterUnit(head=HeadInfo.of(head), contributors=owners[head])
    return Roster(
        round=gathering.round,
        attempt=gathering.attempt,
        coordinator=coordinator,
        tokens={peer: join.tokens for peer, join in joins.items()},
        units=rows,
        late=sorted(late)[:MAX_LATE],
    )


def blamed(told: Mapping[PeerId, Iterable[PeerId]]) -> set[PeerId]:
    """Who is late, by whom each member found late: whoever did not join, and the fewest members that explain the rest.

    To a member with a slow line all others are late. So of all pairs of a member and one that it found late, take again
    and again the member that is in most of them; of several, the one that was found late most often. Less than half
    of the members: slow is who is slower than most. A single complaint counts for nothing: it may be either's fault.
    """
    links: dict[PeerId, set[PeerId]] = {peer: set() for peer in told}
    complaints = Counter[PeerId]()
    for peer, names in told.items():
        for late in set(names) - {peer}:
            complaints[late] += 1
            if late in told:
                links[peer].add(late)
                links[late].add(peer)
    found: set[PeerId] = set()
    while 2 * len(found) + 2 < len(told):
        worst = max(links, key=lambda peer: (len(links[peer]), complaints[peer], peer))
        if len(links[worst]) < ENOUGH:
            break
        found.add(worst)
        for other in links.pop(worst):
            links[other].discard(worst)
    return found | {peer for peer in complaints.keys() - told.keys() if complaints[peer] >= min(ENOUGH, len(told))}
