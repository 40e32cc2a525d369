"""The network of a simulated swarm: messages with delay and loss, bulk over lines of limited rate, partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from spesd.sync import effects as fx
from spesd.sync.ledger import PeerId

if TYPE_CHECKING:
    from spesd.sync.simulation import Node, World


@dataclass(slots=True)
class Line:
    """A node's line, in bytes per second each way. Each way carries one transfer after the other.

    Rates may change at any time; what is under way keeps the rate at which it began. `up_bytes` and `down_bytes` count
    what has passed, over all lives of the node.
    """

    up: float = inf
    down: float = inf
    up_bytes: int = 0
    down_bytes: int = 0
    up_free: float = 0.0
    down_free: float = 0.0

    def cut(self) -> None:
        """Drop what is queued: the node is gone."""
        self.up_free = self.down_free = 0.0


class Network:
    """Carries messages and bulk between the nodes of `world`.

    Messages are small and pass beside the bulk; bulk takes its turn on the `lines` of both ends. Nodes in different
    parts of `partition` do not reach each other. Deadlines are those of the daemon.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.lines: defaultdict[PeerId, Line] = defaultdict(Line)
        self.partition: dict[PeerId, int] = {}

    def deliver(self, sender: Node, to: PeerId, act: Callable[[Node], None]) -> None:
        """Run `act` at the receiver after a delay; a lost message is silent, a dead receiver is noticed."""
        if self._world.random.random() >= self._world.conditions.loss:
            self._world.after(self._delay(), lambda: self._arrive(sender, to, act))

    def push(self, sender: Node, effect: fx.SendContribution, data: bytes) -> None:
        """Send a contribution; one that cannot be there within `contribute_seconds` is given up without a word."""

        def done(ok: bool) -> None:
            if ok:
                self.deliver(sender, effect.to, lambda node: node.receive(sender.name, effect, data))

        deadline = self._world.now + self._world.settings.contribute_seconds
        self.transfer(sender.name, effect.to, len(data), deadline, done)

    def transfer(self, sender: PeerId, to: PeerId, size: int, deadline: float, done: Callable[[bool], None]) -> None:
        """Queue `size` bytes; call `done(True)` when all have come, or `done(False)` at the deadline.

        Bytes flow on while they come, so that a transfer takes as long as the slower side needs, not both in turn. One
        that is broken off at its deadline has used the lines until then.
        """
        world, up, down = self._world, self.lines[sender], self.lines[to]
        began = max(world.now, up.up_free)
        if began >= deadline:
            world.at(deadline, lambda: done(False))
            return
        sent = began + size / up.up
        up.up_free = min(sent, deadline)

        def begin() -> None:
            received = max(began, down.down_free) + size / down.down
            down.down_free = max(down.down_free, min(received, deadline))
            ok = max(sent, received) <= deadline
            up.up_bytes += size if ok else 0
            down.down_bytes += size if ok else 0
            world.at(min(deadline, max(sent, received)), lambda: done(ok))

        world.at(began, begin)

    def fetch(self, node: Node, effect: fx.Fetch) -> None:
        """Copy a blob from the first source that has it, for at most as long as its size allows."""
        world = self._world
        deadline = world.now + world.settings.packet_seconds + effect.size / world.conditions.slowest_link
        world.after(self._delay(), lambda: self._ask(node, effect, deadline))

    def _delay(self) -> float:
        return self._world.random.uniform(*self._world.conditions.delay)

    def _reaches(self, a: PeerId, b: PeerId) -> bool:
        return self.partition.get(a, 0) == self.partition.get(b, 0)

    def _alive(self, name: PeerId, reader: Node) -> Node | None:
        """The node of that name, if it lives and `reader` can reach it."""
        node = self._world.nodes.get(name)
        return node if node is not None and node.alive and self._reaches(name, reader.name) else None

    def _arrive(self, sender: Node, to: PeerId, act: Callable[[Node], None]) -> None:
        node = self._alive(to, sender)
        if node is None:
            self._undelivered(sender, to)
        else:
            act(node)
            node.drain()

    def _undelivered(self, sender: Node, to: PeerId) -> None:
        if sender.alive:
            sender.peer.on_unreachable(self._world.now, to)
            sender.drain()

    def _ask(self, node: Node, effect: fx.Fetch, deadline: float) -> None:
        """The request is there: the first source that has the blob begins to send."""
        if effect.blob in node.blobs.data or not node.alive:
            node.fetched(effect, True)
            return
        found = self._source(node, effect)
        if found is None:
            node.fetched(effect, False)
            return
        index, data = found

        def done(ok: bool) -> None:
            """If the source broke off in the middle, the next one is asked."""
            if not ok:
                node.fetched(effect, False)
            elif self._alive(effect.sources[index], node) is None:
                self._ask(node, replace(effect, sources=effect.sources[index + 1 :]), deadline)
            else:
                node.blobs.put(data)
                node.fetched(effect, True)

        self.transfer(effect.sources[index], node.name, len(data), deadline, done)

    def _source(self, node: Node, effect: fx.Fetch) -> tuple[int, bytes] | None:
        """Which source is the first that serves the blob, and its bytes."""
        for index, name in enumerate(effect.sources):
            source = self._alive(name, node)
            data = source.blobs.data.get(effect.blob) if source is not None else None
            if data is not None and len(data) <= effect.size:
                return index, data
        return None
