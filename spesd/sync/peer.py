"""One peer of the swarm, as a pure state machine.

Events come in as method calls that carry the time; what is to be done comes out as effects. The same code runs in
the daemon and in the simulation of the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from spesd.config.manifest import SyncConfig
from spesd.sync.catchup import CatchUp
from spesd.sync.codecs import codecs_of
from spesd.sync.context import MAX_HINT_JUMP, Context, Signer
from spesd.sync.coordinator import Coordinator
from spesd.sync.effects import Adopt, Commit, Effect, Encode, Fetch, Reduce
from spesd.sync.ledger import Chain, Entry, Head, Ledger, PeerId, UnitId, is_better
from spesd.sync.member import Member
from spesd.sync.messages import (
    Announce,
    Call,
    EntryInfo,
    Heads,
    Join,
    Message,
    Ready,
    SignedRoster,
    Trail,
    TrailRequest,
)
from spesd.sync.pipeline import Pipeline
from spesd.sync.round import Round
from spesd.sync.rounds import Rounds
from spesd.sync.work import OwnWork

HEARD_SECONDS = 30.0
"""A peer that we heard from so recently counts as live, whatever the directory says."""


class SyncPeer:
    """The protocol of one peer. After each event take its effects with `take_effects`, and carry them out in order."""

    def __init__(
        self,
        me: PeerId,
        run: str,
        sizes: Mapping[UnitId, int],
        settings: SyncConfig,
        signer: Signer,
        seed: int,
        sending: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sending` tells whether contributions or blobs are on their way from here to others."""
        self.context = Context(me, run, sizes, settings, signer, random.Random(seed), Ledger(sizes))
        self.work = OwnWork(me, settings.stale_rounds)
        self.pipeline = Pipeline(self.context, codecs_of(settings), self.work)
        self.catchup = CatchUp(self.context, self.pipeline)
        self.coordinator = Coordinator(self.context)
        self.member = Member(self.context, sending)
        self.rounds = Rounds(self.context, self.pipeline)
        self.training = False
        self.leaving = False
        self._shared = frozenset(unit for unit in sizes if unit.startswith("shared"))
        self._heard: dict[PeerId, float] = {}

    # What others can see ---------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self.context.ledger

    @property
    def trained(self) -> frozenset[UnitId]:
        """Units that we train: the shared shards and our experts."""
        return self._shared | self.context.owned

    @property
    def settled(self) -> bool:
        """Whether our own units have ended in every round and none is on the move: only then can we join the next."""
        return self.at_rest == self.trained

    @property
    def free(self) -> bool:
        """Whether we could join the next round: we may still fetch better states, but none is being applied."""
        return not any(self.pipeline.applying(u) or not self.rounds.settled(u) for u in self.trained)

    @property
    def at_rest(self) -> frozenset[UnitId]:
        """Units that we train and that no open round and no step of the pipeline touches."""
        return frozenset(u for u in self.trained if not self.pipeline.busy(u) and self.rounds.settled(u))

    @property
    def idle(self) -> bool:
        """Whether no round is open here and none is being joined."""
        return not self.rounds and self.member.joining is None

    def current_round(self) -> Round | None:
        """The newest open round."""
        return self.rounds.newest

    def take_effects(self) -> list[Effect]:
        """Effects since the last call, in the order in which they are to be carried out."""
        effects, self.context.effects = self.context.effects, []
        return effects

    def restore(self, chains: Mapping[UnitId, Chain]) -> None:
        """Take up the ledger that was kept on disk. Call before any event."""
        for unit, chain in chains.items():
            self.ledger.chains[unit] = chain
        self.context.newest_round = self.ledger.newest_round

    # The world -------------------------------------------------------------------------------------------------------

    def on_owned(self, experts: Iterable[UnitId]) -> None:
        """We train these experts from now on. The work on those that we give up is gone."""
        owned = frozenset(experts)
        self._lost_work(self.context.owned - owned)
        self.context.owned = owned

    def on_live(self, now: float, peers: Iterable[PeerId]) -> None:
        """The directory's view of who is here."""
        recent = {peer for peer, at in self._heard.items() if now - at < HEARD_SECONDS}
        self.context.live = (set(peers) | recent) - {self.context.me}

    def on_unreachable(self, now: float, peer: PeerId) -> None:
        """A message to `peer` could not be delivered."""
        self._heard.pop(peer, None)
        self.member.lost(now, peer)
        self.context.live.discard(peer)
        self.coordinator.lost(peer)
        self.catchup.lost(peer)
        self.rounds.lost(now, peer)
        self.on_time(now)

    def on_time(self, now: float) -> None:
        """Do what is due. Call at `deadline()` or a little later."""
        self.rounds.tick(now)
        self._close_rounds(now)
        self.member.expire(now)
        if self.member.joining is None:
            self.rounds.forget_early()
        postponed = self.member.postponed
        if postponed is not None and (self.settled or (self.free and now >= postponed.patience)):
            self.member.postponed = None
            if now < postponed.until:
                self._called(now, postponed.coordinator, postponed.call, wait=False)
        if self.free:
            self._coordinate(now)
        self.catchup.tick(now)

    def deadline(self) -> float:
        """When `on_time` next has something to do."""
        times = [self.rounds.deadline(), self.member.deadline()]
        if self.free:
            postponed = self.member.postponed
            times += [self.coordinator.deadline(), postponed.patience if postponed is not None else None]
        return min([time for time in times if time is not None] + [self.catchup.deadline()])

    def leave(self) -> None:
        """Join no further round; those that are open are finished."""
        self.leaving = True

    # The trainer -----------------------------------------------------------------------------------------------------

    def on_training(self, now: float, training: bool) -> None:
        """The trainer is there and loaded, or it is gone, and with it all work that was not accepted."""
        self.training = training
        if not training:
            self._lost_work(self.context.sizes)
            self.member.reset()
        self.on_time(now)

    def on_progress(self, now: float, steps: int, tokens: int) -> None:
        """The trainer has done more work: `steps` and `tokens` since the last such event."""
        self.member.progress(now, steps, tokens)
        self.on_time(now)

    def on_snapshot(self, now: float, round_: int) -> None:
        """The trainer's snapshot for `round_` lies ready: join."""
        joining = self.member.joining
        join = self.member.took_snapshot(now, round_)
        if join is not None and joining is not None:
            self._answer(now, joining.coordinator, join)
            self.on_time(now)

    # Results of effects ----------------------------------------------------------------------------------------------

    def on_encoded(self, now: float, effect: Encode, blob: str | None) -> None:
        """A contribution is encoded; None if the unit's state has moved on."""
        if blob is not None and not (self.training and effect.unit in self.trained):
            # the parameters from which it was made are gone
            self.pipeline.discard([blob])
            blob = None
        if blob is not None:
            self.pipeline.discard(self.work.offered(effect.unit, blob))
        round_ = self.rounds.get(effect.round)
        if round_ is not None and round_.hash == effect.roster:
            round_.encoded(now, effect.unit, blob)
            self._close_rounds(now)

    def on_reduced(self, now: float, effect: Reduce, entry: Entry | None, refused: Mapping[PeerId, str]) -> None:
        """A packet is made; None if no contribution passed. `refused` gives the reason by peer."""
        round_ = self.rounds.get(effect.round)
        if round_ is None or round_.hash != effect.roster:
            # contributions are dropped with their round, so what is missing now is nobody's fault
            self.pipeline.discard([entry.packet] if entry is not None else [])
            return
        for peer, reason in refused.items():
            if peer != self.context.me:
                self.context.strike(peer, f"contribution to {effect.unit} in round {effect.round}: {reason}")
        round_.reduced(now, effect.unit, entry)
        if entry is not None and entry.before == self.ledger[entry.unit].head and self.pipeline.commit_own(entry):
            round_.announced(now, entry)
            self._announce(round_, entry)  # others fetch it while it is applied here
        elif entry is not None:
            self.pipeline.discard([entry.packet])  # another's came first
        self._close_rounds(now)

    def on_fetched(self, now: float, effect: Fetch, ok: bool) -> None:
        """A blob is here, or cannot be had from anyone asked."""
        if self.pipeline.fetched(effect, ok) and not ok:
            self.catchup.failed(effect.unit)
        self.on_time(now)

    def on_committed(self, now: float, effect: Commit, ok: bool) -> None:
        """A packet is applied; not `ok` if it did not verify."""
        entry = effect.entry
        if self.pipeline.committed(effect, ok):
            self._moved(now, entry.unit, entry.after)
        else:
            self.catchup.failed(entry.unit)
        self.on_time(now)

    def on_adopted(self, now: float, effect: Adopt, ok: bool) -> None:
        """A full state is applied; not `ok` if it did not verify."""
        if self.pipeline.adopted(effect, ok):
            self._moved(now, effect.unit, effect.head)
        else:
            self.catchup.failed(effect.unit)
        self.on_time(now)

    # Messages --------------------------------------------------------------------------------------------------------

    def on_contribution(self, now: float, sender: PeerId, round_: int, unit: UnitId, blob: str) -> str | None:
        """Another peer's contribution has arrived. Returns why it is refused, or None."""
        self._hear(now, sender)
        joining = self.member.joining
        if round_ not in self.rounds and joining is not None and joining.round == round_ and unit in joining.bases:
            return self.rounds.keep_early(round_, sender, unit, blob)
        return self.rounds.contribution(now, round_, sender, unit, blob)

    def on_message(self, now: float, sender: PeerId, message: Message) -> None:
        """A checked message from the authenticated peer `sender`."""
        self._hear(now, sender)
        match message:
            case Ready():
                self._wanted(now, sender, message)
            case Call():
                self._called(now, sender, message)
            case Join():
                self.coordinator.joined(now, sender, message)
            case SignedRoster():
                self._roster(now, sender, message)
            case Announce():
                for info in message.entries:
                    self._learn(now, sender, info)
            case Heads():
                self._heads(sender, message)
            case TrailRequest():
                self.catchup.requested(sender, message)
            case Trail():
                self.catchup.told(sender, message)
        self.on_time(now)

    def _hear(self, now: float, peer: PeerId) -> None:
        self._heard[peer] = now
        self.context.live.add(peer)

    def _wanted(self, now: float, sender: PeerId, ready: Ready) -> None:
        newest = self.context.newest_round
        if ready.round <= newest:
            self.context.send(sender, self.catchup.my_heads(reply=True))
        elif ready.round <= newest + MAX_HINT_JUMP:
            self.coordinator.wanted(now, ready.round)

    def _called(self, now: float, sender: PeerId, call: Call, wait: bool = True) -> None:
        newest = self.context.newest_round
        if call.round <= newest and sender != self.context.me:
            self.context.send(sender, self.catchup.my_heads(reply=True))
        able = self._can_join and newest < call.round <= newest + MAX_HINT_JUMP
        # the roster of a slow peer would come late, and bind us until then
        slow = sender in self.context.slow and not (self.context.live | {self.context.me}) <= self.context.slow
        able = able and not self.member.holds_back(now)
        if slow or not able or not self.member.can_answer(sender, call.round):
            late = [sender] if slow else []
            self._answer(now, sender, Join(round=call.round, attempt=call.attempt, tokens=0, units={}, late=late))
        elif wait and not self.settled:
            self.member.postpone(now, sender, call)
        else:
            if sender != self.context.me:
                self.coordinator.give_way()
            self.member.answer(now, sender, call, sorted(self.trained))

    def _answer(self, now: float, coordinator: PeerId, join: Join) -> None:
        if coordinator == self.context.me:
            self.coordinator.joined(now, coordinator, join)
        else:
            self.context.send(coordinator, join)

    def _roster(self, now: float, sender: PeerId, signed: SignedRoster) -> None:
        roster = signed.roster
        signed_by_sender = roster.coordinator == sender and self.context.signer.verify(
            sender, roster.canonical_bytes(), signed.signature
        )
        if not signed_by_sender:
            self.context.strike(sender, f"roster of round {roster.round} is not signed by its coordinator")
            return
        if not self.member.expects(roster):
            return
        if not self.member.enlisted(roster):
            self.context.strike(sender, f"roster of round {roster.round} lists units that were not offered")
            return
        self.context.newest_round = max(self.context.newest_round, roster.round)
        self.context.slow, self.context.members = frozenset(roster.late), frozenset(roster.tokens)
        self.rounds.begin(now, roster)
        for unit, row in roster.units.items():
            self.catchup.heard(row.contributors[0], {unit: row.head.head()})

    def _learn(self, now: float, sender: PeerId, info: EntryInfo) -> None:
        """A packet is announced: take it if it follows our head, else find out how to get there."""
        try:
            entry = info.entry()
        except ValueError as error:
            self.context.strike(sender, str(error))
            return
        if entry.unit not in self.context.sizes or not self.context.believes(entry.after):
            return
        head = self.ledger[entry.unit].head
        if not is_better(entry.after, head):
            return
        round_ = self.rounds.get(entry.after.version)
        if round_ is not None and round_.announced(now, entry):
            self.pipeline.drop_fetch(entry.unit)  # what the round agrees on now goes before what it gave up
        if not self.context.wants(entry.unit, entry.after):
            return
        if entry.follows(head) and not self.pipeline.busy(entry.unit):
            self.pipeline.go(entry.unit, [entry], [sender, *(c.peer for c in entry.contributors)])
        else:
            self.catchup.heard(sender, {entry.unit: entry.after})

    def _heads(self, sender: PeerId, message: Heads) -> None:
        heads = {unit: info.head() for unit, info in message.heads.items()}
        newest = self.context.newest_round
        self.context.newest_round = max(newest, min(message.round, newest + MAX_HINT_JUMP))
        self.catchup.heard(sender, heads)
        if not message.reply and self.catchup.has_better_than(heads):
            self.context.send(sender, self.catchup.my_heads(reply=True))

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _can_join(self) -> bool:
        return self.training and self.ledger.complete and not self.leaving

    def _coordinate(self, now: float) -> None:
        """Ask for a round if we are ready for one; call and freeze one if that falls to us."""
        if self._can_join and self.member.ask(now) == self.context.me:
            self.coordinator.wanted(now, self.context.newest_round + 1)
        call, signed = self.coordinator.tick(now)
        if call is not None:
            self._called(now, self.context.me, call)
        if signed is not None and self.context.me in signed.roster.tokens:
            self._roster(now, self.context.me, signed)
        elif signed is not None:
            self.member.left_out(self.context.me)

    def _lost_work(self, units: Iterable[UnitId]) -> None:
        self.rounds.withdraw(units)
        self.pipeline.discard(self.work.clear(units))

    def _moved(self, now: float, unit: UnitId, head: Head) -> None:
        self.context.newest_round = max(self.context.newest_round, head.version)
        self.rounds.committed(now, unit, head)

    def _announce(self, round_: Round, entry: Entry) -> None:
        """Tell everybody of a packet that we have made."""
        self.context.broadcast(round_.roster.tokens.keys() | self.context.live, Announce(entries=[EntryInfo.of(entry)]))

    def _close_rounds(self, now: float) -> None:
        for report in self.rounds.close(now):
            self.member.pace.ended(report.ended - report.started)
            self.context.emit(report)
