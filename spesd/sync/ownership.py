"""Ownership: which experts a peer trains, decided by each peer for itself from the claims that it sees.

A peer with room claims the experts with the fewest live owners. A peer without room moves over when an expert has at
least two owners fewer than another for longer than the grace time, so that claims made at the same moment spread out,
and an orphan is adopted. Even numbers of owners are also what brings every expert to the wanted redundancy, as soon as
the budgets of all peers add up to it.

A move costs Adam's moments, so one is enough: from the same claims everybody works out the same plan of who moves
where, and does its own part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set

from spesd.sync.ledger import PeerId, UnitId
from spesd.sync.rendezvous import rank


class Ownership:
    """Decides for one peer. `budget` is the number of experts that it can train."""

    def __init__(self, me: PeerId, run: str, budget: int, redundancy: int, grace_seconds: float) -> None:
        self._me = me
        self._run = run
        self._budget = budget
        self._redundancy = redundancy
        self._grace = grace_seconds
        self._needy_since: dict[UnitId, float] = {}

    def review(self, now: float, mine: Set[UnitId], others: Mapping[UnitId, Set[PeerId]]) -> frozenset[UnitId]:
        """The experts to own from now on. `others` lists for every expert its live owners without this peer."""
        owned = set(mine)
        counts = {expert: len(peers) + (expert in owned) for expert, peers in others.items()}
        while len(owned) < min(self._budget, len(others)):
            expert = self._fewest(counts, owned)
            owned.add(expert)
            counts[expert] += 1
        while len(owned) > self._budget:
            expert = max(sorted(owned), key=lambda e: counts[e])
            owned.remove(expert)
            counts[expert] -= 1
        owners = {e: {*peers, self._me} if e in owned else set(peers) for e, peers in others.items()}
        for mover, old, new in self._plan(self._due(now, counts), owners):
            self._needy_since[new] = now  # time for the mover to say that it has moved
            if mover == self._me:
                owned.remove(old)
                owned.add(new)
        return frozenset(owned)

    def short(self, owners: Mapping[UnitId, Collection[PeerId]]) -> list[UnitId]:
        """Experts with fewer live owners than the wanted redundancy."""
        return [expert for expert, peers in owners.items() if len(peers) < self._redundancy]

    def _fewest(self, counts: Mapping[UnitId, int], owned: Set[UnitId]) -> UnitId:
        free = [expert for expert in counts if expert not in owned]
        fewest = min(counts[expert] for expert in free)
        return rank(f"{self._run}|claim|{self._me}", [e for e in free if counts[e] == fewest])[0]

    def _due(self, now: float, counts: Mapping[UnitId, int]) -> list[UnitId]:
        """Experts that have had too few owners for the grace time, those with the fewest first."""
        most = max(counts.values(), default=0)
        needy = [expert for expert in counts if counts[expert] + 2 <= most]
        self._needy_since = {expert: self._needy_since.get(expert, now) for expert in needy}
        due = [expert for expert in needy if now - self._needy_since[expert] >= self._grace]
        return sorted(due, key=lambda expert: (counts[expert], expert))

    def _plan(self, due: list[UnitId], owners: dict[UnitId, set[PeerId]]) -> Iterator[tuple[PeerId, UnitId, UnitId]]:
        """For each expert that is due at most one (mover, expert given up, expert taken over); no peer moves twice.

        `owners` are changed as if the moves had been made.
        """
        moved: set[PeerId] = set()
        for needy in due:
            crowded = [expert for expert in owners if len(owners[expert]) >= len(owners[needy]) + 2]
            for expert in sorted(crowded, key=lambda expert: (-len(owners[expert]), expert)):
                able = owners[expert] - owners[needy] - moved
                if able:
                    mover = rank(f"{self._run}|move|{expert}|{needy}", able)[0]
                    moved.add(mover)
                    owners[expert].remove(mover)
                    owners[needy].add(mover)
                    yield mover, expert, needy
                    break
