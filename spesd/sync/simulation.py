"""A whole swarm in one process: the real protocol over a simulated network, repeatable from a seed.

Time is simulated, so that minutes of a swarm pass in seconds; delays, losses, crashes and joins come from one random
generator. Bulk takes the time that the lines of both ends need (`network.py`); messages pass beside it. Used by the
tests, and by whoever wants to see what a setting does before trying it on volunteers.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from spesd.config.manifest import OuterConfig, SyncConfig
from spesd.sync import effects as fx
from spesd.sync.codec import Values
from spesd.sync.ledger import Chain, Head, PeerId, UnitId
from spesd.sync.merge import Merging
from spesd.sync.network import Network
from spesd.sync.ownership import Ownership
from spesd.sync.peer import SyncPeer
from spesd.sync.toys import MemoryBlobs, Move, SimulatedTrainer, ToySigner, ToyTrainer
from spesd.sync.workshop import Rejected, Workshop, state_hash

RUN = "0" * 64


@dataclass(frozen=True, slots=True)
class Conditions:
    """The simulated world. Seconds, shares of messages, and bytes per second that a fetch must at least bring."""

    delay: tuple[float, float] = (0.01, 0.2)
    loss: float = 0.0
    step_seconds: tuple[float, float] = (0.2, 1.0)
    compute_seconds: float = 0.01
    directory_seconds: float = 5.0
    review_seconds: float = 2.0
    grace_seconds: float = 10.0
    slowest_link: float = 1000.0


class Node:
    """One simulated volunteer: the driver that carries out effects. `disk` is what survives a crash."""

    def __init__(self, world: World, name: PeerId, budget: int, chains: Mapping[UnitId, Chain], blobs: MemoryBlobs):
        self.world, self.name, self.budget, self.blobs = world, name, budget, blobs
        self.alive = True
        self.peer = SyncPeer(
            name,
            RUN,
            world.sizes,
            world.settings,
            ToySigner(name),
            seed=world.random.randrange(2**32),
            sending=lambda: world.network.lines[name].up_free > world.now,
        )
        self.workshop = Workshop(RUN, world.sizes, world.settings, blobs, world.merging, world.outer)
        self.peer.restore(chains)
        for unit, chain in chains.items():
            self._rebuild(unit, chain)
        self.ownership = Ownership(name, RUN, budget, 1, world.conditions.grace_seconds)
        self.trainer = world.make_trainer(self)
        self.step_seconds = world.random.uniform(*world.conditions.step_seconds)
        self.rounds: list[fx.RoundEnded] = []
        self.strikes: list[fx.Strike] = []
        self._wake: float | None = None

    def _rebuild(self, unit: UnitId, chain: Chain) -> None:
        """As a restarted daemon does: the oldest anchor on disk, then the packets."""
        if not chain.anchors:
            return
        anchor = chain.anchors[-1]
        self.workshop.restore(unit, anchor, np.frombuffer(self.blobs.get(anchor.hash), np.float32).copy())
        for entry in chain.after(anchor) or []:
            self.workshop.commit(fx.Commit(entry, (), anchor=False))

    # Loops of the driver ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.refresh()
        self.review()

    def refresh(self) -> None:
        """Read the directory now and then."""
        if self.alive:
            self.peer.on_live(self.world.now, self.world.directory())
            self.drain()
            self.world.after(self.world.conditions.directory_seconds, self.refresh)

    def review(self) -> None:
        """Begin training once synced; claim experts."""
        if not self.alive:
            return
        peer, world = self.peer, self.world
        if peer.idle:
            owned = self.ownership.review(world.now, peer.context.owned, world.owners(without=self.name))
            if not peer.catchup.current(peer.trained | owned):
                peer.on_owned(peer.context.owned if peer.training else owned)  # so that these are fetched first
            elif owned != peer.context.owned or not peer.training:
                self._own(owned)
        world.after(world.conditions.review_seconds * world.random.uniform(0.5, 1.5), self.review)

    def _own(self, owned: frozenset[UnitId]) -> None:
        self.peer.on_owned(owned)
        self.trainer.own(self.workshop.agreed, self.peer.trained)
        if not self.peer.training:
            self.peer.on_training(self.world.now, True)
            self.step()
        self.drain()

    def step(self) -> None:
        """One step of the trainer, at its own pace."""
        if self.alive:
            self.trainer.step()
            self.world.tokens += self.trainer.tokens_per_step
            self.peer.on_progress(self.world.now, 1, self.trainer.tokens_per_step)
            self.drain()
            self.world.after(self.step_seconds, self.step)

    def wake(self) -> None:
        self._wake = None
        if self.alive:
            self.peer.on_time(self.world.now)
            self.drain()

    # Effects ---------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Carry out what the protocol asks for, and sleep until its next deadline."""
        for effect in self.peer.take_effects():
            self.carry_out(effect)
        due = max(self.peer.deadline(), self.world.now + 0.02)
        if self._wake is None or due < self._wake:
            self._wake = due
            self.world.at(due, self.wake)

    def later(self, act: Callable[[], None]) -> None:
        """Run `act` and what it brings about after the time of a computation, if we still live then."""

        def run() -> None:
            if self.alive:
                act()
                self.drain()

        self.world.after(self.world.conditions.compute_seconds, run)

    def carry_out(self, effect: fx.Effect) -> None:
        world, peer, shop = self.world, self.peer, self.workshop
        match effect:
            case fx.Send():
                receive = lambda node: node.peer.on_message(world.now, self.name, effect.message)  # noqa: E731
                world.network.deliver(self, effect.to, receive)
            case fx.SendContribution():
                world.network.push(self, effect, self.blobs.get(effect.blob))
            case fx.TakeSnapshot():
                self.trainer.take_snapshot(effect.round, lambda: peer.on_snapshot(world.now, effect.round))
            case fx.Encode():
                values = self.trainer.snapshot_of(effect.round, effect.unit)
                self.later(
                    lambda: peer.on_encoded(world.now, effect, None if values is None else shop.encode(effect, values))
                )
            case fx.Reduce():
                self.later(lambda: self._reduce(effect))
            case fx.Fetch():
                world.network.fetch(self, effect)
            case fx.Commit():
                self.later(lambda: self._commit(effect))
            case fx.Adopt():
                self.later(lambda: self._adopt(effect))
            case fx.Discard():
                for blob in effect.blobs:
                    self.blobs.data.pop(blob, None)
            case fx.Strike():
                self.strikes.append(effect)
            case fx.RoundEnded():
                self.rounds.append(effect)
                self.trainer.round_ended(effect)

    def receive(self, sender: PeerId, effect: fx.SendContribution, data: bytes) -> None:
        blob = self.blobs.put(data)
        self.peer.on_contribution(self.world.now, sender, effect.round, effect.unit, blob)

    def fetched(self, effect: fx.Fetch, ok: bool) -> None:
        """The blob is here, or nobody had it in time."""
        if self.alive:
            self.peer.on_fetched(self.world.now, effect, ok)
            self.drain()

    def _reduce(self, effect: fx.Reduce) -> None:
        result = self.workshop.reduce(effect)
        self.peer.on_reduced(self.world.now, effect, result.entry, result.refused)

    def _commit(self, effect: fx.Commit) -> None:
        try:
            change = self.workshop.commit(effect)
        except Rejected:
            self.peer.on_committed(self.world.now, effect, False)
            return
        self._move(effect.entry.unit, change, effect.entry.after, effect.accepted, ())
        self.world.note(f"{self.name} commits {effect.entry.unit} {effect.entry.after}")
        self.peer.on_committed(self.world.now, effect, True)

    def _adopt(self, effect: fx.Adopt) -> None:
        try:
            change = self.workshop.adopt(effect)
        except Rejected:
            self.peer.on_adopted(self.world.now, effect, False)
            return
        self._move(effect.unit, change, effect.head, effect.accepted, effect.returned)
        self.world.note(f"{self.name} adopts {effect.unit} {effect.head}")
        self.peer.on_adopted(self.world.now, effect, True)

    def _move(
        self, unit: UnitId, change: Values, head: Head, accepted: tuple[str, ...], returned: tuple[str, ...]
    ) -> None:
        shop = self.workshop
        taken, given = (tuple(shop.contribution(unit, blob) for blob in blobs) for blobs in (accepted, returned))
        self.trainer.moved(unit, Move(change, shop.agreed[unit], taken, given), head.version)


def toy_trainer(node: Node) -> ToyTrainer:
    """A trainer that walks at random, from the world's seed."""
    return ToyTrainer(np.random.default_rng(node.world.random.randrange(2**32)))


class World:
    """Clock, network and directory of a simulated swarm. `trace` is a hash over everything that was committed.

    `tokens` counts those of all trainers. `make_trainer` gives a node its trainer.
    """

    def __init__(
        self,
        sizes: Mapping[UnitId, int],
        settings: SyncConfig,
        conditions: Conditions,
        seed: int,
        make_trainer: Callable[[Node], SimulatedTrainer] = toy_trainer,
        merging: Merging | None = None,
        outer: OuterConfig | None = None,
    ) -> None:
        self.merging, self.outer = merging, outer
        self.make_trainer = make_trainer
        self.sizes, self.settings, self.conditions = dict(sizes), settings, conditions
        self.random = random.Random(seed)
        self.now = 0.0
        self.tokens = 0
        self.nodes: dict[PeerId, Node] = {}
        self.network = Network(self)
        self._trace = blake3()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def note(self, line: str) -> None:
        self._trace.update(f"{self.now:.9f} {line}\n".encode())

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time, self._sequence, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    # Peers -----------------------------------------------------------------------------------------------------------

    def found(self, name: PeerId, budget: int) -> Node:
        """The first peer: it makes the genesis states."""
        generator = np.random.default_rng(self.random.randrange(2**32))
        genesis = {unit: generator.standard_normal(size).astype(np.float32) for unit, size in self.sizes.items()}
        return self.place(name, budget, genesis)

    def place(
        self, name: PeerId, budget: int, genesis: Mapping[UnitId, Values], owned: Set[UnitId] = frozenset()
    ) -> Node:
        """A peer that has the genesis states, and these experts, from the start."""
        blobs, chains = MemoryBlobs(), {}
        for unit, values in genesis.items():
            blobs.put(values.tobytes())
            chains[unit] = Chain([Head(0, state_hash(values), 0)])
        node = self._add(Node(self, name, budget, chains, blobs))
        node.peer.on_owned(owned)
        return node

    def join(self, name: PeerId, budget: int) -> Node:
        """A peer that knows nothing."""
        return self._add(Node(self, name, budget, {}, MemoryBlobs()))

    def kill(self, name: PeerId) -> None:
        """The peer is gone at once, without a word."""
        self.nodes[name].alive = False
        self.network.lines[name].cut()
        self.note(f"{name} killed")

    def restart(self, name: PeerId) -> Node:
        """The killed peer comes back with what its disk holds: blobs and ledger."""
        old = self.nodes[name]
        chains = {unit: chain for unit, chain in old.peer.ledger.chains.items() if chain.head is not None}
        return self._add(Node(self, name, old.budget, chains, old.blobs))

    def _add(self, node: Node) -> Node:
        self.nodes[node.name] = node
        self.after(0.0, node.start)
        return node

    def directory(self) -> list[PeerId]:
        return [node.name for node in self.alive]

    def owners(self, without: PeerId) -> dict[UnitId, set[PeerId]]:
        rows: dict[UnitId, set[PeerId]] = {unit: set() for unit in self.sizes if unit.startswith("expert")}
        for node in self.alive:
            if node.name != without and node.peer.training:
                for unit in node.peer.context.owned:
                    rows[unit].add(node.name)
        return rows
