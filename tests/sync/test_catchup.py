"""Catching up: a told trail leads to the teller's head, and one that does not is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import chain_of, entry, head, links, make_peer, of_kind

from spesd.sync.catchup import MAX_HISTORY, MAX_REQUEST, CatchUp
from spesd.sync.effects import Adopt, Commit, Discard, Fetch, Send, Strike
from spesd.sync.ledger import Chain, Entry, Head
from spesd.sync.messages import EntryInfo, HeadInfo, Heads, Trail, TrailRequest
from spesd.sync.peer import SyncPeer
from spesd.sync.pipeline import TakeState
from spesd.sync.trail import plan

UNIT = "expert-0"
START = head(0, 0)


def ask(chain: Chain) -> TrailRequest:
    history = chain.history()[-MAX_HISTORY:]
    return TrailRequest(units={UNIT: [HeadInfo.of(state) for state in reversed(history)]})


def told_by(chain: Chain, request: TrailRequest) -> Trail | None:
    """What a peer with `chain` answers."""
    teller = make_peer("teller", ["me"])
    teller.restore({UNIT: chain})
    teller.catchup.requested("me", request)
    sent = of_kind(teller.take_effects(), Send)
    assert len(sent) <= 1
    return sent[0].message if sent else None  # type: ignore[return-value]


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0, 250, 10_000]),
)
def test_the_trail_leads_from_any_chain_to_the_teller_s_head(
    shared: int, mine: int, theirs: int, my_anchors: int, their_anchors: int, nothing: bool, state_bytes: int
) -> None:
    prefix = links(START, shared)
    fork = prefix[-1].after if prefix else START
    my_tail = links(fork, mine, "mine")
    my_chain = Chain() if nothing else chain_of(START, [*prefix, *my_tail], my_anchors)
    their_rows = [*prefix, *links(fork, theirs, "theirs")]
    their_chain = chain_of(START, their_rows, their_anchors)
    trail = told_by(their_chain, ask(my_chain))
    if their_chain.head in my_chain.history():
        assert trail is None
        return
    assert trail is not None
    steps, end = plan(trail, my_chain.head, state_bytes)
    assert end == their_chain.head
    at = my_chain.head
    for step in steps:
        if isinstance(step, Entry):
            assert step.before == at
            at = step.after
        else:
            at = step.head
            common = my_chain.history()
            assert step.common is None or step.common in common
            assert [e.after.version for e in step.entries] == sorted(e.after.version for e in step.entries)
            if step.common is not None and step.common.version < step.head.version:
                wanted = [e for e in their_rows if step.common.version < e.after.version <= step.head.version]
                assert list(step.entries) == wanted, "the whole account since the fork"
    assert at == their_chain.head


def trail(
    entries: Iterable[Entry], *, common: Head | None = START, anchor: Head | None = None, unit: str = UNIT
) -> Trail:
    return Trail(
        unit=unit,
        common=HeadInfo.of(common) if common else None,
        anchor=HeadInfo.of(anchor) if anchor else None,
        entries=[EntryInfo.of(row) for row in entries],
    )


ROWS = links(START, 5)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (trail([ROWS[0], ROWS[2]]), "gap"),
        (trail([ROWS[1], ROWS[0]]), "gap"),
        (trail([ROWS[0], entry(ROWS[0].after, salt="x"), ROWS[2]]), "gap"),
        (trail([]), "neither"),
        (trail(ROWS, unit="expert-1"), "another unit"),
        (trail(ROWS, anchor=head(3, 30, "foreign")), "anchor of version 3"),
        (trail(ROWS[3:], anchor=ROWS[2].after), "no account"),
        (trail([], anchor=ROWS[2].after), "no account"),
    ],
    ids=["gap", "order", "fork inside", "empty", "unit", "foreign anchor", "account cut", "account missing"],
)
def test_a_trail_that_does_not_hold_together_is_refused_with_a_strike(bad: Trail, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan(bad, START, 0)
    peer, catchup = asking("other")
    asked_unit = bad.unit
    catchup.heard("other", {asked_unit: head(9, 900)})
    peer.on_time(1.0)
    peer.take_effects()
    peer.ledger.chains[asked_unit] = Chain([START])
    catchup.told("other", bad)
    strikes = of_kind(peer.take_effects(), Strike)
    assert [s.peer for s in strikes] == ["other"]
    assert match in strikes[0].reason
    assert asked_unit not in catchup.behind()


def asking(*live: str) -> tuple[SyncPeer, CatchUp]:
    """A peer whose expert-0 is at START, and that has heard of a better one from each of `live`."""
    peer = make_peer("me", live)
    peer.ledger.chains[UNIT] = Chain([START])
    peer.catchup.heard("nobody", {})
    for name in live:
        peer.catchup.heard(name, {UNIT: ROWS[-1].after})
    peer.on_time(0.0)
    return peer, peer.catchup


def requests(peer: SyncPeer) -> list[str]:
    return [e.to for e in of_kind(peer.take_effects(), Send) if isinstance(e.message, TrailRequest)]


def test_one_is_asked_at_a_time_and_after_the_deadline_another() -> None:
    peer, _ = asking("a", "b")
    first = requests(peer)
    assert len(first) == 1
    peer.on_time(3.9)
    assert requests(peer) == []
    peer.on_time(4.0)
    second = requests(peer)
    assert len(second) == 1 and second != first
    assert peer.deadline() <= 8.0
    peer.on_time(8.0)
    assert requests(peer) == [], "nobody is left to ask, until somebody offers it anew"


def test_an_unreachable_source_is_replaced_at_once() -> None:
    peer, _ = asking("a", "b")
    first = requests(peer)[0]
    peer.on_unreachable(0.5, first)
    assert requests(peer) == [{"a": "b", "b": "a"}[first]]


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    peer, catchup = asking("a")
    peer.take_effects()
    catchup.told("stranger", trail(ROWS))
    assert peer.take_effects() == []
    catchup.told("a", trail(ROWS))
    assert [f.blob for f in of_kind(peer.take_effects(), Fetch)] == [ROWS[0].packet]


def test_a_source_whose_blob_cannot_be_had_is_not_asked_again_until_it_offers_anew() -> None:
    peer, catchup = asking("a", "b")
    first = requests(peer)[0]
    catchup.told(first, trail(ROWS))
    (fetch,) = of_kind(peer.take_effects(), Fetch)
    peer.on_fetched(1.0, fetch, False)
    assert requests(peer) == [{"a": "b", "b": "a"}[first]]
    catchup.told({"a": "b", "b": "a"}[first], trail(ROWS))
    (fetch,) = of_kind(peer.take_effects(), Fetch)
    peer.on_fetched(1.0, fetch, False)
    assert requests(peer) == [], "two failures must not become a loop at the speed of the network"
    peer.on_message(2.0, "a", Heads(round=5, heads={UNIT: HeadInfo.of(ROWS[-1].after)}, reply=True))
    assert requests(peer) == ["a"]


def test_a_trail_from_a_state_that_we_do_not_have_is_not_followed() -> None:
    peer, catchup = asking("a")
    peer.take_effects()
    foreign = head(1, 1, "foreign")
    catchup.told("a", trail([], common=foreign, anchor=ROWS[-1].after))
    assert not of_kind(peer.take_effects(), Fetch)


def test_a_trail_that_leads_to_nothing_better_is_not_followed() -> None:
    peer, catchup = asking("a")
    peer.take_effects()
    peer.ledger.chains[UNIT] = chain_of(START, links(START, 9, "better"))
    catchup.told("a", trail([], common=None, anchor=ROWS[-1].after))
    assert not of_kind(peer.take_effects(), Fetch)
    assert catchup.behind() == []


def test_a_full_state_comes_first_and_what_follows_it_after() -> None:
    steps, end = plan(trail(ROWS, anchor=ROWS[2].after), head(0, 0, "mine"), 0)
    assert steps == [TakeState(ROWS[2].after, START, tuple(ROWS[:3])), *ROWS[3:]]
    assert end == ROWS[-1].after


@pytest.mark.parametrize(("state_bytes", "replayed"), [(299, False), (300, True)])
def test_packets_are_replayed_unless_a_full_state_is_fewer_bytes(state_bytes: int, replayed: bool) -> None:
    """Three packets of 100 bytes lead to the anchor, two more lead on from there either way."""
    steps, end = plan(trail(ROWS, anchor=ROWS[2].after), START, state_bytes)
    assert steps == (ROWS if replayed else [TakeState(ROWS[2].after, START, tuple(ROWS[:3])), *ROWS[3:]])
    assert end == ROWS[-1].after


def test_who_lags_behind_an_anchor_is_told_of_both_ways() -> None:
    told = told_by(chain_of(START, ROWS, anchor_every=3), ask(Chain([START])))
    assert told is not None and told.anchor == HeadInfo.of(ROWS[2].after)
    assert [info.entry() for info in told.entries] == ROWS


def test_training_may_begin_while_a_foreign_expert_lags_a_little() -> None:
    peer = make_peer("me", ["a"], lag_rounds=3)
    for version, unit, current in [(3, "expert-1", True), (4, "expert-1", False), (1, UNIT, False)]:
        peer.catchup.lost("a")
        peer.catchup.heard("a", {unit: head(version, 10 * version)})
        assert peer.catchup.current({UNIT}) is current, (version, unit)
    peer.ledger.chains["expert-1"] = Chain()
    peer.catchup.lost("a")
    assert not peer.catchup.current({UNIT}), "a unit that is not here at all"


def test_many_units_are_asked_for_in_several_small_requests() -> None:
    units = [f"expert-{index}" for index in range(300)]
    peer = make_peer("me", ["a"])
    peer.context.sizes = dict.fromkeys(units, 4)
    peer.ledger.chains = {unit: chain_of(START, links(START, 20, unit=unit)) for unit in units}
    peer.catchup.heard("a", {unit: head(99, 9999) for unit in units})
    peer.catchup.tick(0.0)
    sent = [e.message for e in of_kind(peer.take_effects(), Send) if isinstance(e.message, TrailRequest)]
    assert sorted(unit for request in sent for unit in request.units) == sorted(units)
    assert all(sum(map(len, request.units.values())) <= MAX_REQUEST for request in sent)


def test_units_of_another_run_are_ignored() -> None:
    peer = make_peer("me", ["a"])
    peer.catchup.heard("a", {"expert-99": head(9, 9)})
    peer.catchup.requested("a", TrailRequest(units={"expert-99": []}))
    assert peer.catchup.behind() == []
    assert not of_kind(peer.take_effects(), Send)


def test_the_teller_need_not_have_the_better_state() -> None:
    """A peer that asks us although it is ahead gets an honest answer, which it will not follow."""
    ours = chain_of(START, ROWS[:2])
    told = told_by(ours, ask(chain_of(START, links(START, 4, "ahead"))))
    assert told is not None
    assert plan(told, head(4, 40, "ahead"), 0)[1] == dataclasses.replace(ROWS[1]).after


def test_a_way_back_to_a_fork_is_not_begun_before_all_of_it_is_here() -> None:
    """The state where it begins is older than ours: on that we must not be left when the rest does not come."""
    peer = make_peer("me", ["a"])
    mine, theirs = links(START, 5, "mine"), links(START, 6, "theirs")
    peer.ledger.chains[UNIT] = chain_of(START, mine)
    peer.pipeline.go(UNIT, [TakeState(theirs[2].after, START, tuple(theirs[:3])), *theirs[3:]], ["a"])
    wanted = [theirs[2].after.hash, *(row.packet for row in theirs[3:])]
    for blob in wanted[:-1]:
        (fetch,) = of_kind(peer.take_effects(), Fetch)
        assert fetch.blob == blob
        assert peer.pipeline.fetched(fetch, True)
    effects = peer.take_effects()
    assert not of_kind(effects, Adopt)
    (last,) = of_kind(effects, Fetch)

    assert peer.pipeline.fetched(last, False)
    assert peer.ledger[UNIT].head == mine[-1].after
    assert of_kind(peer.take_effects(), Discard) == [Discard(tuple(sorted(wanted[:-1])))], "nothing is left on disk"


def test_a_way_forward_is_taken_step_by_step() -> None:
    peer = make_peer("me", ["a"])
    rows = links(peer.ledger[UNIT].head or START, 2)
    peer.pipeline.go(UNIT, rows, ["a"])
    (fetch,) = of_kind(peer.take_effects(), Fetch)
    assert peer.pipeline.fetched(fetch, True)
    assert [commit.entry for commit in of_kind(peer.take_effects(), Commit)] == rows[:1]
