"""A member's part between rounds: become ready, ask for a round, answer the call, wait for the roster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spesd.sync.context import Context
from spesd.sync.effects import TakeSnapshot
from spesd.sync.ledger import Head, PeerId, UnitId
from spesd.sync.messages import MAX_LATE, MAX_TOKENS, Call, HeadInfo, Join, Ready, Roster
from spesd.sync.patience import REMEMBERED, Pace

GATHER_PATIENCE = 2
"""How many times the announced gather time a member waits for the roster."""

SNAPSHOT_MARGIN = 1.5
"""So many times the longest of the last snapshots is left for the next one when an answer is put off."""


@dataclass(slots=True)
class Joining:
    """A call was answered, or will be once the snapshot is there. `bases` are the states from which we contribute."""

    coordinator: PeerId
    round: int
    attempt: int
    since: float
    deadline: float
    bases: dict[UnitId, Head]
    tokens: int | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Postponed:
    """A call that came while our own units were under way: answer it later, at `patience` if they are only fetched."""

    coordinator: PeerId
    call: Call
    patience: float
    until: float


class Member:
    """Counts local steps, and leads from "ready" to a roster that lists us."""

    def __init__(self, context: Context, sending: Callable[[], bool]) -> None:
        self._context, self._sending = context, sending
        self.pace = Pace(context.settings)
        self.joining: Joining | None = None
        self.postponed: Postponed | None = None
        self._steps = 0
        self._tokens = 0
        self._ready_since: float | None = None
        self._asked = 0
        self._snapshots: deque[float] = deque(maxlen=REMEMBERED)
        self._held_back_since: float | None = None

    # Becoming ready --------------------------------------------------------------------------------------------------

    def progress(self, now: float, steps: int, tokens: int) -> None:
        """The trainer has done more work."""
        self.pace.stepped(now, steps)
        self._steps += steps
        self._tokens += tokens

    def reset(self) -> None:
        """The trainer has lost its work."""
        self._steps = self._tokens = self._asked = 0
        self.joining = self._ready_since = None

    def ask(self, now: float) -> PeerId | None:
        """If a coordinator is to be asked now: whom. The first in order, and after each deadline the next."""
        context = self._context
        if self.joining is not None or self._steps < self.pace.needed:
            return None
        if self._ready_since is None:
            self._ready_since, self._asked = now, 0
        if now < self._due():
            return None
        self._asked += 1
        peer = self._candidate()
        if peer != context.me:
            context.send(peer, Ready(round=context.newest_round + 1))
        return peer

    def deadline(self) -> float | None:
        """When `ask` or `expire` has something to do."""
        if self.joining is not None:
            return self.joining.deadline
        return self._due() if self._ready_since is not None else None

    def waiting_for(self) -> tuple[PeerId, float] | None:
        """Whom we wait for, and until when."""
        if self.joining is not None:
            return self.joining.coordinator, self.joining.deadline
        return (self._candidate(), self._due()) if self._ready_since is not None and self._asked else None

    # Answering a call ------------------------------------------------------------------------------------------------

    def can_answer(self, coordinator: PeerId, round_: int) -> bool:
        """Whether we are free: one call at a time, but a coordinator may repeat its own.

        Of two that call the same round, everybody goes with the one that comes first in its order.
        """
        if self.joining is None or self.joining.coordinator == coordinator:
            return True
        first, _ = self._context.in_order(round_, {coordinator, self.joining.coordinator})
        return self.joining.round == round_ and first == coordinator

    def holds_back(self, now: float) -> bool:
        """Whether to sit a round out, for a while: our line is slow, and busy with what earlier rounds asked of it.

        What another round would add to that would be late as well, and hold up what is on its way.
        """
        context = self._context
        if context.me in context.slow and self._sending():
            if self._held_back_since is None:
                self._held_back_since = now
            if now < self._held_back_since + context.stage.limit:
                return True
        self._held_back_since = None
        return False

    def postpone(self, now: float, coordinator: PeerId, call: Call) -> None:
        """Answer this call later."""
        seconds = min(call.seconds, self._context.settings.gather_seconds)
        spare = seconds - SNAPSHOT_MARGIN * max(self._snapshots, default=0.0)
        patience = now + max(0.0, min(spare, seconds / 2))
        self.postponed = Postponed(coordinator, call, patience, now + seconds)

    def answer(self, now: float, coordinator: PeerId, call: Call, mine: Iterable[UnitId]) -> None:
        """Take a snapshot for this call; `took_snapshot` goes on."""
        heads = self._context.ledger.heads()
        # anyone may call, so the caller's seconds count no more than the manifest's
        deadline = now + GATHER_PATIENCE * min(call.seconds, self._context.settings.gather_seconds)
        bases = {unit: heads[unit] for unit in mine}
        self.joining = Joining(coordinator, call.round, call.attempt, now, deadline, bases)
        self._context.emit(TakeSnapshot(call.round))

    def took_snapshot(self, now: float, round_: int) -> Join | None:
        """The snapshot lies ready: what to tell the coordinator, if it still matters."""
        joining = self.joining
        if joining is None or joining.round != round_ or joining.tokens is not None:
            return None
        self._snapshots.append(now - joining.since)
        joining.tokens, joining.steps = min(self._tokens, MAX_TOKENS), self._steps
        units = {unit: HeadInfo.of(head) for unit, head in joining.bases.items()}
        late = sorted(self._context.live & {*self._context.late, *self._context.silent})[:MAX_LATE]
        return Join(round=round_, attempt=joining.attempt, tokens=joining.tokens, units=units, late=late)

    def expects(self, roster: Roster) -> bool:
        """Whether this is the roster that we joined."""
        joining = self.joining
        if joining is None or joining.tokens is None:
            return False
        asked = (joining.coordinator, joining.round, joining.attempt, joining.tokens)
        return asked == (roster.coordinator, roster.round, roster.attempt, roster.tokens.get(self._context.me))

    def enlisted(self, roster: Roster) -> bool:
        """The roster is out: our work up to the snapshot is in it. False if it says what we did not offer."""
        joining = self.joining
        mine = {unit: row.head.head() for unit, row in roster.units.items() if self._context.me in row.contributors}
        # also from the states that we offered: the snapshot belongs to them
        if (
            joining is None
            or not mine.items() <= joining.bases.items()
            or not roster.units.keys() <= self._context.sizes.keys()
        ):
            return False
        self._steps -= joining.steps
        self._tokens -= joining.tokens or 0
        self.joining = self._ready_since = None
        self._asked = 0
        return True

    def left_out(self, coordinator: PeerId) -> None:
        """The roster of this coordinator is out, and does not list us: our answer came too late."""
        if self.joining is not None and self.joining.coordinator == coordinator:
            self.joining = None

    def lost(self, now: float, peer: PeerId) -> None:
        """`peer` cannot be reached. Call before it leaves the live ones: if we waited for it, ask the next at once."""
        if self.joining is not None and self.joining.coordinator == peer:
            self.joining = None
        if self._ready_since is not None and self._asked and self._candidate() == peer:
            self._ready_since, self._asked = now, 0

    def expire(self, now: float) -> None:
        """Give up a roster that did not come, or that is for a round before the newest.

        Not for the newest itself: a packet of the round that we join may overtake its roster.
        """
        if self.joining is not None:
            over = self.joining.round < self._context.newest_round
            if over or now >= self.joining.deadline:
                self.joining = None

    def _due(self) -> float:
        return (self._ready_since or 0.0) + self._asked * self._context.settings.coordinator_seconds

    def _candidate(self) -> PeerId:
        order = self._context.coordinators(self._context.newest_round + 1)
        return order[(self._asked - 1) % len(order)]
