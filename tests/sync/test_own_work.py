"""What happens to a peer's own contributions, and to blobs, when something is lost or shared."""

from __future__ import annotations

import pytest
from sync_harness import digest, entry, genesis, head, make_peer, of_kind
from test_rounds import BLOB, UNIT, entry_of, in_round, joined, make, members, signed

from spesd.sync import effects as fx
from spesd.sync.ledger import Chain, Head
from spesd.sync.messages import Announce, EntryInfo


def test_a_contribution_equal_to_our_own_is_not_discarded_with_those_of_others() -> None:
    """Two owners with nothing to say send the same bytes, and equal bytes are one blob."""
    names = members(we_reduce=True)
    peer = in_round(names)
    peer.on_contribution(0.4, "a", 1, UNIT, BLOB["me"])
    peer.on_contribution(0.4, names[2], 1, UNIT, BLOB[names[2]])
    peer.take_effects()
    peer.on_time(24.2)
    dropped = {blob for e in of_kind(peer.take_effects(), fx.Discard) for blob in e.blobs}
    assert dropped == {BLOB[names[2]]}


def test_a_state_that_two_units_share_is_kept_until_neither_needs_it() -> None:
    """Experts of an upcycled model begin as copies of one another, and an orphan stays what it was."""
    peer = make_peer("me", ["a"])
    same = digest("same state")
    peer.ledger.chains["expert-0"] = Chain([Head(0, same, 0)])
    peer.ledger.chains["expert-1"] = Chain([Head(0, same, 0)])
    peer.pipeline.discard(peer.ledger["expert-0"].reset(head(5, 50)))
    assert not peer.take_effects()
    peer.pipeline.discard([*peer.ledger["expert-1"].reset(head(5, 50)), same])
    assert peer.take_effects() == [fx.Discard((same,))]


def test_a_trainer_that_dies_while_its_work_is_committed_leaves_no_unit_stuck() -> None:
    peer = in_round(["me", "a"])
    entry = entry_of(peer, "a", "me")
    peer.on_message(1.0, "a", Announce(entries=[EntryInfo.of(entry)]))
    (fetch,) = of_kind(peer.take_effects(), fx.Fetch)
    peer.on_fetched(1.1, fetch, True)
    (commit_,) = of_kind(peer.take_effects(), fx.Commit)
    assert commit_.accepted == (BLOB["me"],)
    peer.on_training(1.2, False)
    peer.on_committed(1.3, commit_, True)
    assert peer.ledger[UNIT].head == entry.after
    assert not peer.pipeline.busy(UNIT)


@pytest.mark.parametrize("how", ["trainer", "expert"])
def test_work_whose_parameters_are_gone_is_neither_offered_nor_subtracted(how: str) -> None:
    peer = joined(["a"])
    peer.on_message(0.2, "a", signed(make(["a", "me"], [UNIT])))
    (effect,) = of_kind(peer.take_effects(), fx.Encode)
    if how == "trainer":
        peer.on_training(0.25, False)
    else:
        peer.on_owned(["expert-1"])
    peer.on_encoded(0.3, effect, BLOB["me"])
    effects = peer.take_effects()
    assert not of_kind(effects, fx.SendContribution)
    assert fx.Discard((BLOB["me"],)) in effects
    assert peer.work.blobs() == set()


def test_a_packet_that_comes_too_late_to_be_committed_does_not_stay_on_disk() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"])
    peer.on_contribution(0.4, names[2], 1, UNIT, BLOB[names[2]])
    reduce = of_kind(peer.take_effects(), fx.Reduce)[0]
    made = entry(reduce.base, "a")
    peer.ledger.chains[UNIT] = Chain([head(1, 99, "another's")])
    peer.on_reduced(0.5, reduce, made, {})
    assert fx.Discard((made.packet,)) in peer.take_effects()


def test_a_packet_that_is_refused_does_not_stay_on_disk() -> None:
    peer = make_peer("me", ["a"])
    bad = entry(genesis(UNIT), "a")
    peer.on_message(0.0, "a", Announce(entries=[EntryInfo.of(bad)]))
    (fetch,) = of_kind(peer.take_effects(), fx.Fetch)
    peer.on_fetched(0.1, fetch, True)
    commit = of_kind(peer.take_effects(), fx.Commit)[0]
    peer.on_committed(0.2, commit, False)
    assert fx.Discard((bad.packet,)) in peer.take_effects()


@pytest.mark.parametrize("how", ["trainer", "expert"])
def test_work_that_was_lost_goes_to_no_further_reducer(how: str) -> None:
    names = members(we_reduce=False)
    peer = in_round(names)
    peer.take_effects()
    if how == "trainer":
        peer.on_training(1.0, False)
    else:
        peer.on_owned(["expert-1"])
    peer.on_unreachable(1.1, names[2])
    assert peer.rounds[1].units[UNIT].reducer == "me"
    peer.on_time(16.1)
    peer.on_time(16.2)
    assert peer.rounds[1].units[UNIT].reducer == "a"
    effects = peer.take_effects()
    assert not of_kind(effects, fx.Reduce)
    assert not of_kind(effects, fx.SendContribution)
