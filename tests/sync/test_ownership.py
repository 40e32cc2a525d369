"""Ownership: claims even out, orphans are adopted after the grace time, and nobody moves without need."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.sync.ownership import Ownership
from spesd.sync.rendezvous import rank

GRACE = 10.0
EXPERTS = [f"expert-{index}" for index in range(8)]


class Crowd:
    """Peers that see each other's claims at once."""

    def __init__(self, budgets: list[int], owned: list[set[str]]) -> None:
        names = [f"p{index}" for index in range(len(budgets))]
        self.peers = {n: Ownership(n, "run", b, 1, GRACE) for n, b in zip(names, budgets, strict=True)}
        self.owned = {name: frozenset(mine) for name, mine in zip(names, owned, strict=True)}

    def others(self, me: str) -> dict[str, set[str]]:
        return {e: {p for p, mine in self.owned.items() if e in mine and p != me} for e in EXPERTS}

    def review(self, now: float, names: list[str], together: bool) -> None:
        new = {}
        for name in names:
            claims = self.peers[name].review(now, self.owned[name], self.others(name))
            if together:
                new[name] = claims
            else:
                self.owned[name] = claims
        self.owned |= new

    def counts(self) -> list[int]:
        return [sum(e in mine for mine in self.owned.values()) for e in EXPERTS]


@st.composite
def crowds(draw: st.DrawFn) -> Crowd:
    budgets = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    return Crowd(budgets, [draw(st.sets(st.sampled_from(EXPERTS), max_size=6)) for _ in budgets])


@given(crowds(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_reviews_converge_to_counts_that_differ_by_at_most_one(crowd: Crowd, seed: int) -> None:
    generator = random.Random(seed)
    for turn in range(60):
        names = generator.sample(sorted(crowd.peers), len(crowd.peers))
        crowd.review(turn * GRACE, names, together=False)
    counts = crowd.counts()
    assert max(counts) - min(counts) <= 1
    settled = dict(crowd.owned)
    for turn in range(60, 64):
        crowd.review(turn * GRACE, sorted(crowd.peers), together=False)
    assert crowd.owned == settled, "an even spread stays as it is"


@given(crowds())
@settings(max_examples=40, deadline=None)
def test_reviews_at_the_same_moment_converge_too(crowd: Crowd) -> None:
    for turn in range(60):
        crowd.review(turn * GRACE, sorted(crowd.peers), together=True)
    settled, counts = dict(crowd.owned), crowd.counts()
    assert sum(counts) == sum(len(mine) for mine in crowd.owned.values())
    assert max(counts) - min(counts) <= 1
    for turn in range(60, 64):
        crowd.review(turn * GRACE, sorted(crowd.peers), together=True)
    assert crowd.owned == settled


@given(crowds(), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_wanted_redundancy_is_reached_when_the_budgets_allow_it(
    crowd: Crowd, redundancy: int, together: bool
) -> None:
    for turn in range(60):
        crowd.review(turn * GRACE, sorted(crowd.peers), together)
    owners = {e: {p for p, mine in crowd.owned.items() if e in mine} for e in EXPERTS}
    short = Ownership("me", "run", 1, redundancy, GRACE).short(owners)
    assert bool(short) == (sum(crowd.counts()) < redundancy * len(EXPERTS))


def test_peers_do_not_hand_experts_to_each_other_for_ever() -> None:
    """Found by chance: when several could move to one orphan, three swapped experts every second grace time."""
    owned = ("013467", "0157", "123457", "0157", "134")
    crowd = Crowd([5, 4, 5, 3, 2], [{f"expert-{index}" for index in row} for row in owned])
    for turn in range(20):
        crowd.review(turn * GRACE, sorted(crowd.peers), together=True)
    assert sorted(crowd.counts()) == [2, 2, 2, 2, 2, 3, 3, 3]


def test_of_many_that_could_move_to_an_orphan_one_does() -> None:
    crowd = Crowd([1] * 9, [{EXPERTS[index % 3]} for index in range(9)])
    others = {p: {e: peers for e, peers in crowd.others(p).items() if e in EXPERTS[:4]} for p in crowd.peers}
    for now in (0.0, GRACE):
        claims = {p: peer.review(now, crowd.owned[p], others[p]) for p, peer in crowd.peers.items()}
    moved = [p for p in claims if claims[p] != crowd.owned[p]]
    assert [claims[p] for p in moved] == [{EXPERTS[3]}]


@given(
    st.sets(st.sampled_from(EXPERTS)), st.integers(1, 8), st.dictionaries(st.sampled_from(EXPERTS), st.integers(0, 4))
)
def test_a_budget_is_filled_and_kept(mine: set[str], budget: int, crowded: dict[str, int]) -> None:
    others = {e: {f"o{i}" for i in range(crowded.get(e, 0))} for e in EXPERTS}
    claims = Ownership("me", "run", budget, 1, GRACE).review(0.0, mine, others)
    assert len(claims) == budget
    free = [len(others[e]) for e in EXPERTS if e not in claims and e not in mine]
    new = [len(others[e]) for e in claims - mine]
    assert not free or not new or max(new) <= min(free), "the fewest owners first"


def test_an_orphan_is_adopted_after_the_grace_time_and_not_before() -> None:
    peer = Ownership("me", "run", 1, 1, GRACE)
    others = {"expert-0": {"a", "b"}, "expert-1": set[str]()}
    names = sorted({"a", "b", "me"}, key=rank("run|move|expert-0|expert-1", ["a", "b", "me"]).index)
    peer = Ownership(names[0], "run", 1, 1, GRACE)
    others = {"expert-0": set(names[1:]), "expert-1": set()}
    assert peer.review(0.0, {"expert-0"}, others) == {"expert-0"}
    assert peer.review(GRACE - 0.1, {"expert-0"}, others) == {"expert-0"}
    assert peer.review(GRACE, {"expert-0"}, others) == {"expert-1"}


def test_the_grace_time_starts_anew_when_the_orphan_had_an_owner_meanwhile() -> None:
    names = rank("run|move|expert-0|expert-1", ["a", "b", "c"])
    peer = Ownership(names[0], "run", 1, 1, GRACE)
    orphaned = {"expert-0": set(names[1:]), "expert-1": set[str]()}
    owned = {"expert-0": set(names[1:]), "expert-1": {"x", "y"}}
    peer.review(0.0, {"expert-0"}, orphaned)
    peer.review(5.0, {"expert-0"}, owned)
    assert peer.review(GRACE + 1, {"expert-0"}, orphaned) == {"expert-0"}


@pytest.mark.parametrize("everywhere", ["a", "b", "c"])
def test_an_owner_that_has_the_needy_expert_already_is_not_waited_for(everywhere: str) -> None:
    """Three own expert-0, one of them expert-1 too: one of the other two must move."""
    crowd = Crowd([1, 1, 1], [{"expert-0"}] * 3)
    crowd.peers = {n: Ownership(n, "run", 2 if n == everywhere else 1, 1, GRACE) for n in "abc"}
    owned = {n: frozenset({"expert-0"} | ({"expert-1"} if n == everywhere else set())) for n in "abc"}
    for now in (0.0, GRACE):
        for name in "abc":
            others = {e: {p for p in "abc" if e in owned[p] and p != name} for e in ("expert-0", "expert-1")}
            owned[name] = crowd.peers[name].review(now, owned[name], others)
    assert sum("expert-1" in mine for mine in owned.values()) == 2


def test_orphans_are_those_below_the_wanted_redundancy() -> None:
    peer = Ownership("me", "run", 1, 2, GRACE)
    assert peer.short({"expert-0": {"a", "me"}, "expert-1": {"a", "b"}, "expert-2": {"a"}}) == ["expert-2"]


@given(st.sets(st.text(min_size=1, max_size=4), min_size=2, max_size=9), st.text(max_size=5))
def test_who_comes_or_goes_leaves_the_order_of_the_others(names: set[str], purpose: str) -> None:
    order = rank(purpose, names)
    assert sorted(order) == sorted(names)
    for gone in names:
        assert rank(purpose, names - {gone}) == [name for name in order if name != gone]
