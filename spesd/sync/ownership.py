"""Ownership: which experts a peer trains, decided by each peer for itself from the claims that it sees.

A peer with room claims the experts with the fewest live owners. A peer without room moves over when an expert has at
least two owners fewer than one of its own for longer than the grace time, so that claims made at the same moment
spread out, and an orphan is adopted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

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
        move = self._move(now, owned, others, counts)
        if move is not None:
            owned.remove(move[0])
            owned.add(move[1])
        return frozenset(owned)

    def short(self, owners: Mapping[UnitId, Collection[PeerId]]) -> list[UnitId]:
        """Experts with fewer live owners than the wanted redundancy."""
        return [expert for expert, peers in owners.items() if len(peers) < self._redundancy]

    def _fewest(self, counts: Mapping[UnitId, int], owned: Set[UnitId]) -> UnitId:
        free = [expert for expert in counts if expert not in owned]
        fewest = min(counts[expert] for expert in free)
        return rank(f"{self._run}|claim|{self._me}", [e for e in free if counts[e] == fewest])[0]

    def _move(
        self,
        now: float,
        owned: Set[UnitId],
        others: Mapping[UnitId, Set[PeerId]],
        counts: Mapping[UnitId, int],
    ) -> tuple[UnitId, UnitId] | None:
        """One expert to give up for one that needs an owner more, if it has needed one for the grace time."""
        most = max((counts[expert] for expert in owned), default=0)
        needy = {e for e in counts if e not in owned and counts[e] + 2 <= most}
        self._needy_since = {e: self._needy_since.get(e, now) for e in needy}
        due = [e for e in needy if now - self._needy_since[e] >= self._grace]
        if not due:
            return None
        target = min(sorted(due), key=lambda e: counts[e])
        crowded = [e for e in sorted(owned) if counts[e] >= counts[target] + 2]
        for expert in sorted(crowded, key=lambda e: -counts[e]):
            # of all owners of a crowded expert that can move one is to, and everybody agrees which
            able = [*(others[expert] - others[target]), self._me]
            if rank(f"{self._run}|move|{expert}|{target}", able)[0] == self._me:
                self._needy_since.pop(target)
                return expert, target
        return None
