"""Well-formed messages with hostile or unlucky values: they cost little, and no honest peer is blamed for them."""

from __future__ import annotations

import pytest
from sync_harness import SIZES, digest, genesis, make_peer, of_kind

from spesd.sync import effects as fx
from spesd.sync.context import MAX_ROUND_JUMP
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.messages import Announce, Call, EntryInfo, HeadInfo, Heads, Join, Roster, RosterUnit, SignedRoster
from spesd.sync.peer import SyncPeer
from spesd.sync.simulation import ToySigner

UNIT = "expert-0"


def roster_of(*members: str, head: Head | None = None, tokens: int = 0) -> SignedRoster:
    """The roster of round 1 by coordinator `a`, with us as a member of `tokens`."""
    row = RosterUnit(head=HeadInfo.of(head or genesis(UNIT)), contributors=list(members))
    shares = dict.fromkeys(members, 100) | {"me": tokens}
    roster = Roster(round=1, attempt=1, coordinator="a", tokens=shares, units={UNIT: row})
    return SignedRoster(roster=roster, signature=ToySigner("a").sign(roster.canonical_bytes()))


def joined(*live: str) -> SyncPeer:
    """A peer that has answered the call of `a`."""
    peer = make_peer("me", live)
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=2.0))
    peer.on_snapshot(0.1, 1)
    peer.take_effects()
    return peer


def reducing() -> tuple[SyncPeer, fx.Reduce]:
    """The reducer of expert-0 in a round with `a`, at work on both contributions."""
    name = next(n for n in (f"me{i}" for i in range(9999)) if make_peer(n).context.reducers(1, UNIT, ["a", n])[0] == n)
    peer = make_peer(name, ["a"])
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=2.0))
    peer.on_snapshot(0.1, 1)
    row = RosterUnit(head=HeadInfo.of(genesis(UNIT)), contributors=["a", name])
    roster = Roster(round=1, attempt=1, coordinator="a", tokens={"a": 100, name: 0}, units={UNIT: row})
    signature = ToySigner("a").sign(roster.canonical_bytes())
    peer.on_message(0.2, "a", SignedRoster(roster=roster, signature=signature))
    (encode,) = of_kind(peer.take_effects(), fx.Encode)
    peer.on_encoded(0.3, encode, digest("mine"))
    peer.on_contribution(0.4, "a", 1, UNIT, digest("theirs"))
    (reduce,) = of_kind(peer.take_effects(), fx.Reduce)
    return peer, reduce


@pytest.mark.parametrize("version", [MAX_ROUND_JUMP + 2, 1 << 24])
def test_a_state_from_a_round_too_far_ahead_is_not_believed(version: int) -> None:
    """Else one message ends the run: nobody can ask for the round after the last one that a message can name."""
    peer = make_peer("me", ["a"])
    far = HeadInfo(version=version, hash=digest("far"), weight=10)
    peer.on_message(0.0, "a", Heads(round=1, heads={UNIT: far}, reply=True))
    assert peer.catchup.behind() == []


def test_a_packet_of_a_round_too_far_ahead_is_not_believed() -> None:
    peer = make_peer("me", ["a"])
    names = (Contributor("a", 10, digest("blob")),)
    far = Entry(UNIT, genesis(UNIT), Head(1 << 24, digest("far"), 10), digest("packet"), 100, names)
    peer.on_message(0.0, "a", Announce(entries=[EntryInfo.of(far)]))
    effects = peer.take_effects()
    assert not of_kind(effects, fx.Fetch)
    assert peer.catchup.behind() == []


@pytest.mark.parametrize("seconds", [3.0, 3600.0])
def test_a_call_holds_a_member_no_longer_than_the_manifest_says(seconds: float) -> None:
    """Anyone may call; who calls for an hour and sends no roster must not keep others from their rounds."""
    peer = make_peer("me", ["a", "b"])
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=seconds))
    peer.on_snapshot(0.1, 1)
    peer.on_time(4.1)
    peer.take_effects()
    peer.on_message(4.2, "b", Call(round=1, attempt=1, seconds=2.0))
    assert of_kind(peer.take_effects(), fx.TakeSnapshot)


def test_a_waiting_call_lasts_no_longer_either() -> None:
    peer = make_peer("me", ["a"])
    peer.pipeline.commit_own(
        Entry(UNIT, genesis(UNIT), Head(1, digest("x"), 1), digest("p"), 9, (Contributor("a", 1, digest("b")),))
    )
    (commit,) = of_kind(peer.take_effects(), fx.Commit)
    peer.on_message(0.0, "a", Call(round=5, attempt=1, seconds=3600.0))
    peer.on_committed(5.0, commit, True)
    assert not of_kind(peer.take_effects(), fx.TakeSnapshot)


def test_a_roster_that_starts_from_another_state_than_we_joined_with_is_refused_with_a_strike() -> None:
    """Our snapshot was taken before the newer state: its difference from that would undo the others' work."""
    peer = joined("a")
    names = (Contributor("b", 10, digest("blob")),)
    newer = Entry(UNIT, genesis(UNIT), Head(2, digest("newer"), 10), digest("packet"), 100, names)
    peer.ledger[UNIT].append(newer)
    peer.on_message(0.2, "a", roster_of("a", "me", head=newer.after))
    assert [s.peer for s in of_kind(peer.take_effects(), fx.Strike)] == ["a"]
    assert not peer.rounds


def test_a_reducer_that_was_not_known_to_be_live_is_given_up_at_once_too() -> None:
    """The coordinator can know members that our own view of the directory does not hold yet."""
    name = next(
        n for n in (f"x{i}" for i in range(9999)) if make_peer().context.reducers(1, UNIT, ["a", "me", n])[0] == n
    )
    peer = joined("a")
    peer.on_message(0.2, "a", roster_of("a", "me", name))
    (encode,) = of_kind(peer.take_effects(), fx.Encode)
    peer.on_encoded(0.3, encode, digest("mine"))
    assert [e.to for e in of_kind(peer.take_effects(), fx.SendContribution)] == [name]
    peer.on_unreachable(0.4, name)
    assert peer.rounds[1].units[UNIT].reducer != name


def test_nobody_is_blamed_for_contributions_that_went_away_with_the_round() -> None:
    """Another reducer's packet may close the round, and its contributions be dropped, while we are still at work."""
    peer, reduce = reducing()
    names = (Contributor("a", 100, digest("theirs")),)
    entry = Entry(UNIT, genesis(UNIT), Head(1, digest("after"), 100), digest("packet"), 100, names)
    peer.on_message(0.5, "a", Announce(entries=[EntryInfo.of(entry)]))
    (fetch,) = of_kind(peer.take_effects(), fx.Fetch)
    peer.on_fetched(0.6, fetch, True)
    (commit,) = of_kind(peer.take_effects(), fx.Commit)
    peer.on_committed(0.7, commit, True)
    effects = peer.take_effects()
    assert digest("theirs") in of_kind(effects, fx.Discard)[0].blobs
    peer.on_reduced(0.8, reduce, None, {"a": "blob is not here"})
    assert not of_kind(peer.take_effects(), fx.Strike)


def test_early_contributions_are_dropped_with_the_call_that_came_to_nothing() -> None:
    peer = joined("a")
    assert peer.on_contribution(0.2, "b", 1, UNIT, digest("early")) is None
    peer.on_time(4.1)
    assert fx.Discard((digest("early"),)) in peer.take_effects()


def test_join_with_units_of_another_run_makes_no_roster_of_them() -> None:
    peer = make_peer("me", ["a"])
    peer.coordinator.wanted(0.0, 1)
    peer.on_time(0.0)
    peer.on_snapshot(0.1, 1)
    peer.on_message(0.2, "a", Join(round=1, attempt=1, tokens=1, units={"expert-77": HeadInfo.of(genesis(UNIT))}))
    assert set(peer.rounds[1].roster.units) <= set(SIZES)
