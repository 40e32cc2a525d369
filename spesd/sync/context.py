"""What the roles of one peer share: who it is, what it knows of the swarm, and where its effects go."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spesd.config.manifest import SyncConfig
from spesd.sync.belated import MAX_AGE, Belated
from spesd.sync.effects import Effect, Send, Strike
from spesd.sync.lateness import Lateness
from spesd.sync.ledger import Head, Ledger, PeerId, UnitId, is_better
from spesd.sync.messages import MAX_ROUND_WEIGHT, Message
from spesd.sync.patience import FLOOR, PACKET_FLOOR, Patience
from spesd.sync.rendezvous import rank

MAX_STAGES = 3
"""Reducers that are tried before a unit is left unchanged."""

MAX_ROUND_JUMP = 100_000
"""A state of a round further ahead than this is not believed."""

MAX_HINT_JUMP = 64
"""How far a mere word about the newest round, with no state behind it, may move ours."""


REDUCER_ROUNDS = 16
"""Turns after which the reducers of units are drawn anew."""


class Signer(Protocol):
    """Signs with this peer's identity, and checks the signatures of others."""

    def sign(self, data: bytes) -> bytes: ...

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool: ...


@dataclass(slots=True)
class Context:
    """Shared by coordinator, rounds and catch-up of one peer. `sizes` are the values of each unit, in layout order.

    `late` are peers whose contribution or packet missed a deadline, `silent` those that did not answer a call in time:
    they are not waited for until they have been in time again. `slow` are those that the last roster calls late: what
    all its members know alike, so that none of these is asked to coordinate. `members` are those of that roster.
    """

    me: PeerId
    run: str
    sizes: Mapping[UnitId, int]
    settings: SyncConfig
    signer: Signer
    random: random.Random
    ledger: Ledger
    owned: frozenset[UnitId] = frozenset()
    live: set[PeerId] = field(default_factory=set)
    newest_round: int = 0
    late: Lateness = field(default_factory=Lateness)
    silent: set[PeerId] = field(default_factory=set)
    slow: frozenset[PeerId] = frozenset()
    members: frozenset[PeerId] = frozenset()
    gathering: Patience = field(init=False)
    contributing: Patience = field(init=False)
    stage: Patience = field(init=False)
    committing: Patience = field(init=False)
    fetching: Patience = field(init=False)
    belated: Belated = field(init=False)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = self.settings
        gather, contribute = settings.gather_seconds, settings.contribute_seconds
        packet = settings.packet_seconds
        stage, least_stage = contribute + packet, FLOOR * contribute + PACKET_FLOOR * packet
        self.gathering = Patience(gather, FLOOR * gather)
        self.contributing = Patience(contribute, FLOOR * contribute)
        self.stage = Patience(stage, least_stage)
        self.belated = Belated(self.ledger, MAX_AGE * settings.stagger)
        self.committing = Patience(MAX_STAGES * stage, least_stage)
        self.fetching = Patience(packet, FLOOR * packet)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, to: PeerId, message: Message) -> None:
        self.effects.append(Send(to, message))

    def broadcast(self, peers: Iterable[PeerId], message: Message) -> None:
        """Send to all but ourselves, in a fixed order so that a seed repeats."""
        for peer in sorted(set(peers) - {self.me}):
            self.send(peer, message)

    def strike(self, peer: PeerId, reason: str) -> None:
        self.emit(Strike(peer, reason))

    def believes(self, head: Head) -> bool:
        """Whether a told state can be: no round far ahead of all that we know, no more weight than rounds can give."""
        near = head.version <= self.newest_round + MAX_ROUND_JUMP
        return near and head.weight <= head.version * MAX_ROUND_WEIGHT

    def trains(self, unit: UnitId) -> bool:
        """Whether this peer trains `unit`: the shared ones, and its own experts."""
        return not unit.startswith("expert") or unit in self.owned

    def is_lazy(self, unit: UnitId) -> bool:
        """Whether we follow `unit` by its refreshes only: an expert that others train."""
        return self.settings.refresh_every > 1 and not self.trains(unit)

    def is_refresh(self, unit: UnitId, before: int, after: int) -> bool:
        """Whether the packet from version `before` to `after` is a refresh: the first in a span of `refresh_every`."""
        every = self.settings.refresh_every
        return every > 1 and unit.startswith("expert") and self._span(before) < self._span(after)

    def _span(self, round_: int) -> int:
        return self.settings.turn(round_) // self.settings.refresh_every

    def refresh_base(self, unit: UnitId, before: int, after: int) -> Head | None:
        """The state at which the packet from version `before` to `after` starts if it is a refresh, else None."""
        return self.ledger[unit].refreshed if self.is_refresh(unit, before, after) else None

    def wants(self, unit: UnitId, head: Head) -> bool:
        """Whether a state is better than ours, and, of a unit that we follow lazily, newer by a refresh."""
        ours = self.ledger[unit].head
        if not is_better(head, ours):
            return False
        return ours is None or not self.is_lazy(unit) or self._span(head.version) > self._span(ours.version)

    def in_turn(self, round_: int) -> list[UnitId]:
        """Units that `round_` is about: every `stagger`-th in layout order."""
        every = self.settings.stagger
        return [unit for index, unit in enumerate(self.sizes) if index % every == round_ % every]

    def coordinators(self, round_: int) -> list[PeerId]:
        """Live peers in the order in which they may coordinate `round_`."""
        return self.in_order(round_, self.live | {self.me})

    def in_order(self, round_: int, peers: Iterable[PeerId]) -> list[PeerId]:
        """The order of `peers` as coordinators of `round_`: that of the rendezvous, but slow ones last."""
        return sorted(rank(f"{self.run}|round|{round_}", peers), key=lambda peer: peer in self.slow)

    def reducers(
        self, round_: int, unit: UnitId, contributors: Iterable[PeerId], late: Collection[PeerId] = ()
    ) -> list[PeerId]:
        """Contributors of a unit in the order in which they may reduce it, those last that the roster calls late.

        The first stays so for a while: what the codec loses of its packets comes with its next ones.
        """
        key = f"{self.run}|reduce|{unit}|{self.settings.turn(round_) // REDUCER_ROUNDS}"
        return sorted(rank(key, contributors), key=lambda peer: peer in late)
