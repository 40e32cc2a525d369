"""The ledger: for each unit the chain of versions that the swarm has committed, and the rule that settles forks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PeerId = str
UnitId = str


class Head(NamedTuple):
    """One agreed state of a unit: the round that made it, the blake3 hash of its fp32 bytes, and the tokens behind it.

    `weight` is the sum of the capped tokens of all contributions in the chain up to here.
    """

    version: int
    hash: str
    weight: int


class Contributor(NamedTuple):
    """Whose work went into a packet: peer, capped tokens, and the hash of the contribution that was used."""

    peer: PeerId
    weight: int
    blob: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One link of a chain: the packet that took `unit` from `before` to `after`.

    A *refresh* has a `base`, a state some links back, and its packet holds the whole way from there: who has `base`
    needs none of the packets in between (`sync.refresh_every`).
    """

    unit: UnitId
    before: Head
    after: Head
    packet: str
    size: int
    contributors: tuple[Contributor, ...]
    base: Head | None = None

    @property
    def start(self) -> Head:
        """The state to which the packet's update is added."""
        return self.base or self.before

    def follows(self, head: Head | None) -> bool:
        """Whether the entry leads on from `head`: link by link, or as a refresh."""
        return head is not None and head in (self.before, self.start)

    def has(self, peer: PeerId) -> bool:
        """Whether work of `peer` went into the packet."""
        return any(contributor.peer == peer for contributor in self.contributors)

    def __post_init__(self) -> None:
        if self.start.version > self.before.version:
            raise ValueError(f"{self.unit}: base {self.start.version} is newer than version {self.before.version}")
        if self.after.version <= self.before.version:
            raise ValueError(f"{self.unit}: version {self.after.version} does not follow {self.before.version}")
        if self.after.weight != self.before.weight + sum(c.weight for c in self.contributors):
            raise ValueError(f"{self.unit}: weight {self.after.weight} is not the sum of its contributors")
        if len({c.peer for c in self.contributors}) < len(self.contributors):
            raise ValueError(f"{self.unit}: version {self.after.version} lists a contributor twice")


class BrokenChain(ValueError):
    """An entry does not follow from the head of its chain."""


def is_better(candidate: Head, current: Head | None) -> bool:
    """The fork rule: more cumulative tokens win, then the lower hash.

    A state always has more weight than its ancestors, so "better" also covers "newer on the same chain".
    """
    if current is None:
        return True
    return fork_order(candidate) < fork_order(current)


def fork_order(head: Head) -> tuple[int, str]:
    """Sorts states by the fork rule, the best first."""
    return -head.weight, head.hash


@dataclass(slots=True)
class Chain:
    """The recent history of one unit: an anchor (a full state kept on disk) and the entries that follow it.

    The anchor before the newest is kept too, so that a download from it can end. Whoever follows a unit by its
    refreshes has no other entries.
    """

    anchors: list[Head] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def head(self) -> Head | None:
        """The agreed state, or None while nothing is known."""
        if self.entries:
            return self.entries[-1].after
        return self.anchors[-1] if self.anchors else None

    @property
    def since_anchor(self) -> int:
        """Entries after the newest anchor."""
        return len(self.after(self.anchors[-1]) or ()) if self.anchors else 0

    @property
    def refreshed(self) -> Head | None:
        """The state at which the unit was last refreshed: the base of its next refresh."""
        ends = [entry.after for entry in self.entries if entry.base is not None]
        return ends[-1] if ends else next(iter(self.anchors), None)

    def append(self, entry: Entry) -> None:
        """Extend the chain. Raises BrokenChain if `entry` does not start at the head."""
        if not entry.follows(self.head):
            raise BrokenChain(f"{entry.unit}: entry starts at {entry.before}, the chain ends at {self.head}")
        self.entries.append(entry)

    def reset(self, anchor: Head) -> list[str]:
        """Start anew from a full state that did not grow out of this chain; return the blobs no longer needed."""
        dropped = [head.hash for head in self.anchors if head != anchor] + [entry.packet for entry in self.entries]
        self.anchors, self.entries = [anchor], []
        return dropped

    def add_anchor(self) -> list[str]:
        """Make the head an anchor; return the blobs (old states and packets) that are no longer needed."""
        head = self.head
        if head is None or self.anchors[-1] == head:
            return []
        self.anchors.append(head)
        dropped: list[str] = []
        while len(self.anchors) > 2:
            dropped.append(self.anchors.pop(0).hash)
            kept = self.after(self.anchors[0])
            if kept is not None:
                dropped += [entry.packet for entry in self.entries[: len(self.entries) - len(kept)]]
                self.entries = kept
        return dropped

    def after(self, head: Head) -> list[Entry] | None:
        """All entries that follow `head`, or None if it is not part of the chain."""
        if head == self.head:
            return []
        for at, entry in enumerate(self.entries):
            if entry.before == head:
                return self.entries[at:]
        for at, entry in enumerate(self.entries):
            if entry.base == head:
                return self.entries[at:]
        return None

    def history(self) -> list[Head]:
        """All states that the chain still remembers, oldest first."""
        first = self.anchors[:1]
        return first + [entry.after for entry in self.entries]


def shortest_way(entries: Sequence[Entry], start: Head) -> list[Entry]:
    """The fewest of `entries` (in order) that lead from `start` to the last one's end; empty if none do."""
    way: list[Entry] = []
    here, rest = start, list(entries)
    while onward := [at for at, entry in enumerate(rest) if entry.follows(here)]:
        way.append(rest[onward[-1]])
        here, rest = way[-1].after, rest[onward[-1] + 1 :]
    return way if not rest else []


class Ledger:
    """The chains of all units of a run."""

    def __init__(self, units: Iterable[UnitId]) -> None:
        self.chains = {unit: Chain() for unit in units}

    def __getitem__(self, unit: UnitId) -> Chain:
        return self.chains[unit]

    def heads(self) -> dict[UnitId, Head]:
        """The agreed state of every unit that is known here."""
        return {unit: chain.head for unit, chain in self.chains.items() if chain.head is not None}

    def blobs(self) -> set[str]:
        """Every packet and state that a chain is made of. Units that never differed share the blob of a state."""
        chains = self.chains.values()
        states = {head.hash for chain in chains for head in chain.anchors}
        return states | {entry.packet for chain in chains for entry in chain.entries}

    @property
    def complete(self) -> bool:
        """Whether every unit has an agreed state here."""
        return all(chain.head is not None for chain in self.chains.values())

    @property
    def newest_round(self) -> int:
        """The highest version of any unit."""
        return max((head.version for head in self.heads().values()), default=0)
