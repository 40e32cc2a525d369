"""One round as a member sees it, from the frozen roster to the last commit.

For each unit a member may be contributor, reducer, or only a reader. Stages are of equal length: in stage k the k-th
reducer in order is waited for. A reducer closes a unit some way into its stage; the rest of the stage is for its
packet to spread. How long both are follows from how long contributions and packets took before (`patience.py`). A
packet that is announced but does not come through is given up like a reducer that makes none. Who misses a deadline is
not waited for until it has been in time again (`lateness.py`): a broken link costs the others one deadline. So is a
reducer whose packet came much slower than packets do, though this one was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from spesd.sync.aggregate import capped_weights
from spesd.sync.context import MAX_STAGES, Context
from spesd.sync.effects import Encode, Origin, Outcome, Reduce, RoundEnded, SendContribution, UnitReport
from spesd.sync.ledger import Contributor, Entry, Head, PeerId, UnitId
from spesd.sync.messages import Announce, EntryInfo, Roster
from spesd.sync.patience import PACKET_FLOOR


@dataclass(slots=True)
class UnitRound:
    """One unit in one round. `stage` counts the reducers that were given up.

    `held_up` are the seconds that waiting for announced packets has taken beyond the stages. `entry` is the packet that
    it waits for or has got, known since `announced`.
    """

    base: Head
    weights: dict[PeerId, int]
    reducers: list[PeerId]
    stage: int = 0
    held_up: float = 0.0
    blob: str | None = None
    received: dict[PeerId, str] = field(default_factory=dict)
    reducing: bool = False
    entry: Entry | None = None
    announced: float = 0.0
    report: UnitReport = field(default_factory=lambda: UnitReport(Outcome.PENDING))

    @property
    def open(self) -> bool:
        return self.report.outcome is Outcome.PENDING

    @property
    def reducer(self) -> PeerId | None:
        """Whom the unit waits for now."""
        return self.reducers[self.stage] if self.stage < len(self.reducers) else None


class Round:
    """State of one round at one member. `now` is handed in, effects go out through the context."""

    def __init__(self, context: Context, roster: Roster, now: float) -> None:
        self._context = context
        self.roster = roster
        self.hash = roster.hash
        self.number = roster.round
        self.started = now
        self._gone: set[PeerId] = set()
        self.contribute_seconds = context.contributing.seconds
        spread = PACKET_FLOOR * context.settings.packet_seconds
        self.stage_seconds = max(context.stage.seconds, self.contribute_seconds + spread)
        self.commit_seconds = max(context.committing.seconds, self.stage_seconds)
        self.fetch_seconds = context.fetching.seconds
        self.units: dict[UnitId, UnitRound] = {}
        for unit, row in roster.units.items():
            if context.is_lazy(unit) and not context.is_refresh(unit, row.head.version, roster.round):
                continue  # nobody waits for what nobody here fetches
            weights = capped_weights({p: roster.tokens[p] for p in row.contributors}, context.settings.weight_cap)
            order = context.reducers(roster.round, unit, row.contributors, roster.late)[:MAX_STAGES]
            self.units[unit] = UnitRound(row.head.head(), weights, order)
        self._due = self._first_due()

    def start(self) -> None:
        """Encode this peer's contributions."""
        for unit, state in self.units.items():
            if self._context.me in state.weights:
                self._context.emit(Encode(self.number, self.hash, unit, state.base))

    # What happens ----------------------------------------------------------------------------------------------------

    def encoded(self, now: float, unit: UnitId, blob: str | None) -> None:
        """Our contribution is ready (None: our state has moved on since we joined)."""
        state = self.units[unit]
        if blob is None:
            state.weights.pop(self._context.me, None)
            if state.open and not state.weights:
                self._ends(now, state, Outcome.UNCHANGED, why="the state of its only contributor has moved on")
        state.blob = blob
        self._offer(unit)
        self._maybe_reduce(now, unit)

    def contribution(self, now: float, sender: PeerId, unit: UnitId, blob: str) -> str | None:
        """Somebody takes us for the reducer. Returns why it is refused, or None."""
        state = self.units.get(unit)
        if state is None or not self._is_ours(sender, state):
            return "not a contributor to this reducer in this round"
        if state.entry is not None:
            self.tell(sender, unit)
            return "the unit's packet is made"
        if not state.open or state.received.setdefault(sender, blob) != blob:
            return "the unit is closed, or has another contribution of this peer"
        self._maybe_reduce(now, unit)
        return None

    def arrived(self, now: float, sender: PeerId, unit: UnitId) -> None:
        """Learn from the time that a contribution took, taken or not. A late peer's counts only to redeem it."""
        state, took = self.units.get(unit), now - self.started
        if state is None or not self._is_ours(sender, state):
            return
        if state.open and sender not in self._context.late and state.stage == 0 and sender not in state.received:
            self._context.contributing.saw(took)
        self._judge(sender, unit, took <= self.contribute_seconds)

    def comes_late(self, sender: PeerId, unit: UnitId) -> bool:
        """Whether a contribution of `sender` is for us to reduce, but too late for this round's packet."""
        state = self.units.get(unit)
        if state is None or not self._is_ours(sender, state):
            return False
        used = sender in state.received or (state.entry is not None and state.entry.has(sender))
        return not used and (not state.open or state.entry is not None)

    def tell(self, sender: PeerId, unit: UnitId) -> None:
        """Who still contributes may not know that there is a packet."""
        if self.units[unit].open and (entry := self.units[unit].entry) is not None:
            self._context.send(sender, Announce(entries=[EntryInfo.of(entry)]))

    def origin(self, unit: UnitId) -> Origin:
        """For what the contributions to `unit` in this round are made."""
        return Origin(self.number, self.hash, self.units[unit].base)

    def withdraw(self, units: Iterable[UnitId]) -> None:
        """Our contributions to `units` are gone: neither reduce them nor give them to a further reducer."""
        me = self._context.me
        for unit in self.units.keys() & set(units):
            state = self.units[unit]
            state.blob = None
            state.weights.pop(me, None)
            state.received.pop(me, None)

    def reduced(self, now: float, unit: UnitId, entry: Entry | None) -> None:
        """Our reduction is done; `entry` is None if no contribution passed the checks."""
        state = self.units[unit]
        if entry is None and state.open:
            self._ends(now, state, Outcome.UNCHANGED, why="no contribution passed the checks")

    def accepts(self, entry: Entry) -> bool:
        """Whether a packet of this round follows its roster: right start, known contributors, capped weights."""
        state = self.units.get(entry.unit)
        if state is None or entry.before != state.base:
            return False
        if entry.base != self._context.refresh_base(entry.unit, entry.before.version, self.number):
            return False
        row = self.roster.units[entry.unit]
        tokens = {peer: self.roster.tokens[peer] for peer in row.contributors}
        weights = capped_weights(tokens, self._context.settings.weight_cap)
        peers = [c.peer for c in entry.contributors]
        return len(set(peers)) == len(peers) and all(weights.get(c.peer) == c.weight for c in entry.contributors)

    def announced(self, now: float, entry: Entry) -> bool:
        """A packet for one of our units is known. Returns whether it is what the unit waits for now."""
        state = self.units.get(entry.unit)
        if state is None or not state.open or state.entry is not None or not self.accepts(entry):
            return False
        state.entry, state.announced = entry, now
        if state.stage == 0:
            self._context.stage.saw(now - self.started)
        return True

    def committed(self, now: float, unit: UnitId, head: Head) -> None:
        """The agreed state of `unit` is now `head`."""
        state = self.units.get(unit)
        if state is None or not state.open or head.version < self.number:
            return
        entries = self._context.ledger[unit].entries
        if state.entry is None and entries and entries[-1].after == head and self.accepts(entries[-1]):
            self._taken_up(state, entries[-1])
        elif state.stage == 0 and state.entry is not None and self._context.me in state.weights:
            self._context.committing.saw(now - self.started)
            self._came_through(now, unit)
        if state.entry is None or state.entry.after != head:
            self._ends(now, state, Outcome.COMMITTED, why="caught up")
            return
        there = {c.peer for c in state.entry.contributors}
        missing = tuple(p for p in self.roster.units[unit].contributors if p not in there)
        self._ends(now, state, Outcome.PARTIAL if missing else Outcome.COMMITTED, missing)

    def lost(self, now: float, peer: PeerId) -> None:
        """`peer` cannot be reached: neither wait for its contributions nor for it as a reducer."""
        self._gone.add(peer)
        for unit, state in self.units.items():
            if state.open and state.entry is None:
                if state.reducer == peer:
                    self._next_stage(unit)
                self._maybe_reduce(now, unit)

    def tick(self, now: float) -> None:
        """Pass on to the next reducer where a stage has run out; close units whose time is over."""
        for unit, state in self.units.items():
            if not state.open:
                continue
            if now >= self._stage_end(state) and state.stage < len(state.reducers):
                self._give_up(now, unit)
            self._maybe_reduce(now, unit)
            if now >= self._end(unit, state):
                who = state.reducers[-1] if state.reducers else "nobody"
                self._ends(now, state, Outcome.UNCHANGED, why=f"no packet from {who} by the deadline")

    # What it looks like ----------------------------------------------------------------------------------------------

    def _stage_end(self, state: UnitRound) -> float:
        """When the present reducer is given up. A mere reader waits for a packet that it knows of to the end."""
        if state.entry is None:
            return self.started + state.held_up + self.stage_seconds * (state.stage + 1)
        if self._context.me not in state.weights:
            return inf
        return self.started + state.held_up + self.stage_seconds * state.stage + self.commit_seconds

    def _end(self, unit: UnitId, state: UnitRound) -> float:
        """When a unit is given up: once each of its reducers has had its stage. Who only reads it is in no hurry."""
        stages = state.held_up + self.stage_seconds * max(1, len(state.reducers))
        trains = self._context.trains(unit)
        return self.started + (stages if trains else max(stages, self._context.stage.limit))

    @property
    def over(self) -> bool:
        return not any(state.open for state in self.units.values())

    def settled(self, units: Iterable[UnitId]) -> bool:
        """Whether `units` have ended, so that this peer can join the next round."""
        return not any(unit in self.units and self.units[unit].open for unit in units)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [self._close_time(unit, state) for unit, state in self.units.items() if state.open]
        return min(times, default=None)

    def waiting_for(self, now: float) -> list[tuple[UnitId, PeerId, float]]:
        """Open units, whom each waits for, and the seconds left before somebody else is asked."""
        rows = []
        for unit, state in self.units.items():
            if state.open:
                missing = sorted(self._missing(state))
                me_reducing = state.reducer == self._context.me and state.entry is None
                whom = missing[0] if me_reducing and missing else state.reducer or self.roster.coordinator
                rows.append((unit, whom, max(0.0, self._close_time(unit, state) - now)))
        return rows

    def report(self, now: float) -> RoundEnded:
        """What is kept for status."""
        units = {unit: state.report for unit, state in self.units.items()}
        mine = [row.seconds for unit, row in units.items() if self._context.trains(unit)]
        return RoundEnded(
            self.number,
            self.roster.coordinator,
            tuple(self.roster.tokens),
            units,
            self.started,
            self.started + max(mine, default=0.0),
            now,
        )

    def received_from_others(self) -> Iterator[tuple[UnitId, PeerId, str, bool]]:
        """Contributions that were kept for reducing: unit, peer, blob, and whether the unit's packet has it."""
        for unit, state in self.units.items():
            for peer, blob in state.received.items():
                if peer != self._context.me:
                    yield unit, peer, blob, state.entry is None or state.entry.has(peer)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _ends(
        self, now: float, state: UnitRound, outcome: Outcome, missing: tuple[PeerId, ...] = (), why: str = ""
    ) -> None:
        state.report = UnitReport(outcome, missing, why, now - self.started)

    def _close_time(self, unit: UnitId, state: UnitRound) -> float:
        if state.stage >= len(state.reducers):
            return self._end(unit, state)
        if state.reducer == self._context.me and not state.reducing and state.entry is None:
            return self._contributions_end(state, state.stage)
        return min(self._stage_end(state), self._end(unit, state))

    def _contributions_end(self, state: UnitRound, stage: int) -> float:
        """When the reducer of that stage goes on with what it has."""
        return self.started + state.held_up + self.stage_seconds * stage + self.contribute_seconds

    def _missing(self, state: UnitRound) -> set[PeerId]:
        """Whose contributions a reducer still waits for."""
        return set(state.weights) - set(state.received) - self._gone - set(self._context.late)

    def _first_due(self) -> dict[PeerId, set[UnitId]]:
        """By peer, the units of which we have its contribution to reduce, or its packet to fetch, if all goes well."""
        due: dict[PeerId, set[UnitId]] = {}
        for unit, state in self.units.items():
            first = state.reducers[0] if state.reducers else None
            if first == self._context.me:
                for peer in state.weights.keys() - {first}:
                    due.setdefault(peer, set()).add(unit)
            elif first is not None and self._context.me in state.weights:
                due.setdefault(first, set()).add(unit)
        return due

    def _is_ours(self, sender: PeerId, state: UnitRound) -> bool:
        """Whether a contribution of `sender` is for us to reduce."""
        return sender in state.weights and self._context.me in state.reducers

    def _came_through(self, now: float, unit: UnitId) -> None:
        """Learn from the time from the announcement of the first reducer's packet to its commit here."""
        state, took = self.units[unit], now - self.units[unit].announced
        if state.reducer is None or state.reducer == self._context.me:
            return
        if state.reducer not in self._context.late:
            self._context.fetching.saw(took)
        self._judge(state.reducer, unit, took <= self.fetch_seconds)

    def _judge(self, peer: PeerId, unit: UnitId, in_time: bool) -> None:
        """What `peer` owed us of `unit` has come. Who was late with one thing was not in time in this round."""
        due = self._due.get(peer, set())
        if unit not in due:
            return
        due.discard(unit)
        if not in_time:
            self._missed(peer)
        elif not due:
            self._context.late.in_time(peer)

    def _missed(self, peer: PeerId) -> None:
        self._due.pop(peer, None)
        self._context.late.missed(peer)

    def _give_up(self, now: float, unit: UnitId) -> None:
        """The present reducer has made no packet, or one that does not come through: on to the next."""
        state, me = self.units[unit], self._context.me
        # not those that follow: they begin when they are asked; and a mere reader does not know if there was any work
        if state.stage == 0 and state.reducer not in (None, me) and me in state.weights:
            self._missed(state.reducer)
        if state.entry is not None:
            stages = self.started + self.stage_seconds * (state.stage + 1)
            state.held_up, state.entry = max(state.held_up, now - stages), None
        self._next_stage(unit)

    def _taken_up(self, state: UnitRound, entry: Entry) -> None:
        """A packet that was given up has come through: tell those who have turned to us instead."""
        state.entry = entry
        self._context.broadcast(state.received, Announce(entries=[EntryInfo.of(entry)]))

    def _next_stage(self, unit: UnitId) -> None:
        state = self.units[unit]
        state.stage = min(state.stage + 1, len(state.reducers))
        while state.reducer in self._gone:
            state.stage += 1
        self._offer(unit)

    def _offer(self, unit: UnitId) -> None:
        """Give our contribution to the present reducer."""
        state, me = self.units[unit], self._context.me
        if state.blob is None or state.reducer is None or state.entry is not None:
            return
        if me in state.reducers:
            state.received.setdefault(me, state.blob)
        if state.reducer != me:
            effect = SendContribution(state.reducer, self.number, self.hash, unit, state.blob)
            self._context.emit(effect)

    def _maybe_reduce(self, now: float, unit: UnitId) -> None:
        """Reduce once all who can still contribute have, or the time for it is over."""
        state, me = self.units[unit], self._context.me
        if not state.open or state.reducing or state.entry is not None or me not in state.reducers:
            return
        asked_by_others = any(peer != me for peer in state.received)
        if state.reducer != me and not asked_by_others:
            return
        waiting = self._missing(state)
        stage = max(state.stage, state.reducers.index(me))
        if state.received and (not waiting or now >= self._contributions_end(state, stage)):
            if stage == 0:
                for peer in sorted(waiting - {me}):
                    self._missed(peer)
            state.reducing = True
            earlier = self._context.belated.usable(unit, set(state.weights) - set(state.received) - {me})
            blobs = state.received | {peer: kept.blob for peer, kept in earlier.items()}
            rows = tuple(Contributor(p, state.weights[p], blobs[p]) for p in sorted(blobs))
            belated = {peer: kept.origin for peer, kept in earlier.items()}
            refresh = self._context.refresh_base(unit, state.base.version, self.number)
            recent = tuple(self._context.ledger[unit].entries)
            self._context.emit(Reduce(self.number, self.hash, unit, state.base, rows, refresh, recent, belated))
