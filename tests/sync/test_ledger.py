"""The ledger: chains link, forks are settled the same way everywhere, pruning keeps what a trail needs."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import SIZES, chain_of, digest, entry, head, links

from spesd.sync.ledger import BrokenChain, Chain, Contributor, Entry, Head, Ledger, is_better

START = head(0, 0)
# few values, so that versions, weights and hashes coincide
heads = st.builds(Head, st.integers(0, 3), st.sampled_from([digest("a"), digest("b"), digest("c")]), st.integers(0, 3))


def test_an_entry_that_does_not_follow_is_refused_and_the_chain_is_unchanged() -> None:
    chain = chain_of(START, links(START, 3))
    for other in (entry(START, salt="x"), entry(head(3, 30, "other")), entry(head(9, 90))):
        with pytest.raises(BrokenChain, match="expert-0"):
            chain.append(other)
    assert len(chain.entries) == 3


@pytest.mark.parametrize(
    ("after", "names", "match"),
    [
        (Head(3, digest("x"), 20), (Contributor("a", 10, digest("b")),), "version 3"),
        (Head(4, digest("x"), 21), (Contributor("a", 10, digest("b")),), "weight 21"),
        (Head(4, digest("x"), 30), (Contributor("a", 10, digest("b")), Contributor("a", 10, digest("c"))), "twice"),
    ],
    ids=["version", "weight", "contributor"],
)
def test_an_entry_that_contradicts_itself_is_refused(after: Head, names: tuple[Contributor, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Entry("expert-0", Head(3, digest("y"), 10), after, digest("p"), 100, names)


@given(st.lists(heads, min_size=1, max_size=7), st.randoms())
def test_every_order_of_arrival_ends_at_the_same_head(candidates: list[Head], order: object) -> None:
    def arrive(rows: list[Head]) -> tuple[int, str]:
        best = functools.reduce(lambda best, new: new if is_better(new, best) else best, rows[1:], rows[0])
        return best.weight, best.hash

    shuffled = candidates[:]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert arrive(candidates) == arrive(shuffled)


@given(heads, heads, heads)
def test_the_fork_rule_is_a_strict_total_order_of_states(a: Head, b: Head, c: Head) -> None:
    assert not is_better(a, a)
    assert is_better(a, None)
    assert is_better(a, b) + is_better(b, a) == ((a.weight, a.hash) != (b.weight, b.hash))
    if is_better(a, b) and is_better(b, c):
        assert is_better(a, c)


def test_newer_on_the_same_chain_is_better() -> None:
    rows = links(START, 5)
    assert all(is_better(row.after, row.before) for row in rows)


@given(st.integers(0, 30), st.integers(1, 6))
def test_pruning_keeps_two_anchors_and_all_that_follows_them(length: int, every: int) -> None:
    rows = links(START, length)
    chain, kept = Chain([START]), {START.hash}
    for row in rows:
        chain.append(row)
        kept.add(row.packet)
        if chain.since_anchor >= every:
            kept.add(row.after.hash)
            kept -= set(chain.add_anchor())
        needed = {a.hash for a in chain.anchors} | {e.packet for e in chain.entries}
        assert kept == needed, "what was dropped and what is needed are one whole"
    assert chain.head == (rows[-1].after if rows else START)
    assert len(chain.anchors) <= 2
    for anchor in chain.anchors:
        follow = chain.after(anchor)
        assert follow is not None
        assert [*(e.before for e in follow), chain.head][0] == anchor
        assert (follow[-1].after if follow else anchor) == chain.head
    assert chain.since_anchor == length % every


@given(st.integers(1, 20), st.integers(1, 5))
def test_every_state_of_the_history_leads_to_the_head(length: int, every: int) -> None:
    chain = chain_of(START, links(START, length), every)
    history = chain.history()
    assert history[-1] == chain.head
    for state in history:
        assert chain.after(state) is not None
    assert chain.after(head(3, 30, "foreign")) is None


def test_an_anchor_is_not_made_twice() -> None:
    chain = chain_of(START, links(START, 2))
    chain.add_anchor()
    before = list(chain.anchors)
    assert chain.add_anchor() == []
    assert chain.anchors == before
    assert Chain().add_anchor() == []


def test_a_reset_drops_all_but_the_new_state() -> None:
    chain = chain_of(START, links(START, 3))
    packets = {row.packet for row in chain.entries}
    new = head(9, 90, "other")
    assert set(chain.reset(new)) == {START.hash, *packets}
    assert chain.head == new
    assert chain.history() == [new]
    assert chain.since_anchor == 0


def test_a_ledger_is_complete_when_every_unit_has_a_state() -> None:
    ledger = Ledger(SIZES)
    assert not ledger.complete
    assert ledger.newest_round == 0
    for version, unit in enumerate(SIZES):
        ledger.chains[unit] = Chain([head(version, 0)])
    assert ledger.complete
    assert ledger.newest_round == len(SIZES) - 1
    assert len(ledger.blobs()) == len(SIZES)
