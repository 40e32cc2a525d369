"""Coordinator, member and round, event by event."""

from __future__ import annotations

import pytest
from sync_harness import SIZES, digest, genesis, head, make_peer, of_kind

from spesd.sync import effects as fx
from spesd.sync.context import MAX_HINT_JUMP
from spesd.sync.coordinator import Gathering, make_roster
from spesd.sync.effects import Outcome
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.messages import Announce, Call, HeadInfo, Join, Ready, Roster, RosterUnit, SignedRoster
from spesd.sync.peer import SyncPeer
from spesd.sync.toys import ToySigner

UNIT = "expert-0"
BLOB = {name: digest(f"blob of {name}") for name in ("me", "a", "b", "c")}


def signed(roster: Roster, by: str | None = None) -> SignedRoster:
    signature = ToySigner(by or roster.coordinator).sign(roster.canonical_bytes())
    return SignedRoster(roster=roster, signature=signature)


def make(members: list[str], units: list[str], *, round_: int = 1, tokens: int = 0, coordinator: str = "a") -> Roster:
    rows = {unit: RosterUnit(head=HeadInfo.of(genesis(unit)), contributors=members) for unit in units}
    shares = dict.fromkeys(members, 100) | {"me": tokens}
    return Roster(round=round_, attempt=1, coordinator=coordinator, tokens=shares, units=rows)


def joined(live: list[str], *, experts: tuple[str, ...] = (UNIT,), round_: int = 1) -> SyncPeer:
    """A peer that has answered the call of `a`, and waits for the roster."""
    peer = make_peer("me", live, experts)
    peer.on_message(0.0, "a", Call(round=round_, attempt=1, seconds=2.0))
    assert of_kind(peer.take_effects(), fx.TakeSnapshot)
    peer.on_snapshot(0.1, round_)
    joins = [e.message for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, Join)]
    assert [set(join.units) for join in joins] == [{"shared-0", *experts}]
    return peer


def in_round(members: list[str], units: list[str] | None = None) -> SyncPeer:
    """A peer in round 1, its contributions encoded."""
    peer = joined([name for name in members if name != "me"])
    peer.on_message(0.2, "a", signed(make(members, units or [UNIT])))
    for effect in of_kind(peer.take_effects(), fx.Encode):
        peer.on_encoded(0.3, effect, BLOB["me"])
    return peer


def entry_of(peer: SyncPeer, *names: str, weight: int = 100) -> Entry:
    """A packet that the round would accept; `weight` is what the roster gives."""
    weights = peer.rounds[1].units[UNIT].weights
    rows = tuple(Contributor(name, weights.get(name, weight), BLOB[name]) for name in names)
    after = Head(1, digest("after"), sum(row.weight for row in rows))
    return Entry(UNIT, genesis(UNIT), after, digest("packet"), 100, rows)


def commit(peer: SyncPeer, now: float = 1.0) -> list[fx.RoundEnded]:
    """Carry out fetches and commits to the end; returns what the rounds report."""
    ended: list[fx.RoundEnded] = []
    while effects := peer.take_effects():
        for effect in effects:
            match effect:
                case fx.Fetch():
                    peer.on_fetched(now, effect, True)
                case fx.Commit():
                    peer.on_committed(now, effect, True)
                case fx.RoundEnded():
                    ended.append(effect)
    return ended


# Coordinator ---------------------------------------------------------------------------------------------------------


def test_the_roster_takes_the_best_state_and_those_who_have_it() -> None:
    good, old, none = head(3, 30), head(2, 20), HeadInfo.of(head(3, 30, "fork"))
    joins = {
        "a": Join(round=4, attempt=1, tokens=5, units={UNIT: HeadInfo.of(good), "shared-0": none}),
        "b": Join(round=4, attempt=1, tokens=6, units={UNIT: HeadInfo.of(old)}),
        "c": Join(round=4, attempt=1, tokens=7, units={UNIT: HeadInfo.of(good), "expert-99": none}),
    }
    roster = make_roster("a", Gathering(4, 1, 0.0, 0.0, set(), joins), SIZES)
    assert roster.units[UNIT] == RosterUnit(head=HeadInfo.of(good), contributors=["a", "c"])
    assert roster.units["shared-0"].contributors == ["a"]
    assert roster.units.keys() == {UNIT, "shared-0"}, "no unit of another run, none that nobody brought"
    assert roster.tokens == {"a": 5, "b": 6, "c": 7}


def gather(live: list[str]) -> SyncPeer:
    """A coordinator whose own call is out and answered by itself."""
    peer = make_peer("me", live)
    peer.on_message(0.0, live[0], Ready(round=1))
    effects = peer.take_effects()
    assert [e.to for e in of_kind(effects, fx.Send) if isinstance(e.message, Call)] == sorted(live)
    peer.on_snapshot(0.1, 1)
    peer.take_effects()
    return peer


def join_of(*units: str, tokens: int = 10) -> Join:
    return Join(round=1, attempt=1, tokens=tokens, units={unit: HeadInfo.of(genesis(unit)) for unit in units})


def rosters(peer: SyncPeer) -> list[tuple[str, SignedRoster]]:
    return [(e.to, e.message) for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, SignedRoster)]


def test_the_roster_is_frozen_when_all_have_answered() -> None:
    peer = gather(["a", "b"])
    peer.on_message(0.2, "a", join_of(UNIT))
    assert rosters(peer) == []
    peer.on_message(0.3, "b", join_of())
    assert [to for to, _ in rosters(peer)] == ["a"], "who counts itself out gets none"
    assert set(peer.rounds[1].roster.tokens) == {"me", "a"}


def test_the_roster_is_frozen_at_the_deadline_without_the_rest() -> None:
    peer = gather(["a", "b"])
    peer.on_message(0.2, "a", join_of(UNIT))
    peer.on_time(1.9)
    assert rosters(peer) == []
    peer.on_time(2.0)
    assert [to for to, _ in rosters(peer)] == ["a"]
    peer.on_message(2.1, "b", join_of(UNIT))
    assert rosters(peer) == [], "too late: its work stays its own"


def test_a_peer_that_cannot_be_reached_is_not_waited_for() -> None:
    peer = gather(["a", "b"])
    peer.on_message(0.2, "a", join_of(UNIT))
    peer.on_unreachable(0.3, "b")
    assert [to for to, _ in rosters(peer)] == ["a"]


def test_an_answer_to_another_attempt_is_not_counted() -> None:
    peer = gather(["a"])
    peer.on_message(0.2, "a", Join(round=1, attempt=7, tokens=1, units={UNIT: HeadInfo.of(genesis(UNIT))}))
    peer.on_time(2.0)
    assert set(peer.rounds[1].roster.tokens) == {"me"}


def test_more_peers_than_a_roster_holds_are_left_for_the_next_round() -> None:
    peer = gather(["a"])
    for index in range(1100):
        peer.coordinator.joined(0.0, f"p{index}", join_of(UNIT))
    peer.on_time(2.0)
    assert len(peer.rounds[1].roster.tokens) == 1024


def test_two_calls_are_at_least_min_round_seconds_apart() -> None:
    peer = make_peer("me", ["a"], min_round_seconds=10)
    peer.coordinator.wanted(0.0, 1)
    assert peer.coordinator.tick(0.0)[0] is not None
    peer.coordinator.gathering = None
    peer.coordinator.wanted(3.0, 1)
    assert peer.coordinator.tick(9.9) == (None, None)
    assert peer.coordinator.tick(10.0)[0] is not None


# Member --------------------------------------------------------------------------------------------------------------


def test_after_each_deadline_the_next_coordinator_is_asked_and_status_names_it() -> None:
    peer = make_peer("me", ["a", "b", "c"])
    order = peer.context.coordinators(1)
    peer.on_progress(0.0, 2, 200)
    asked = []
    for turn in range(order.index("me")):
        asked += [e.to for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, Ready)]
        assert peer.member.waiting_for() == (order[turn], 3.0 * (turn + 1))
        peer.on_time(3.0 * (turn + 1))
    assert asked == order[: order.index("me")]
    assert of_kind(peer.take_effects(), fx.TakeSnapshot), "our own turn has come: we call the round ourselves"


def test_a_coordinator_that_cannot_be_reached_is_replaced_at_once() -> None:
    name = next(n for n in (f"x{i}" for i in range(99)) if make_peer("me", [n]).context.coordinators(1)[0] == n)
    peer = make_peer("me", [name])
    peer.on_progress(0.0, 2, 200)
    assert [e.to for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, Ready)] == [name]
    peer.on_unreachable(0.1, name)
    assert of_kind(peer.take_effects(), fx.TakeSnapshot)


def test_a_roster_that_does_not_come_is_given_up_and_its_work_kept() -> None:
    peer = joined(["a"])
    assert peer.member.waiting_for() == ("a", 4.0)
    peer.on_time(4.0)
    assert peer.member.joining is None
    peer.on_message(4.1, "a", signed(make(["a", "me"], [UNIT])))
    assert not peer.rounds


@pytest.mark.parametrize("round_", [0, MAX_HINT_JUMP + 1])
def test_a_call_for_an_old_round_or_one_too_far_ahead_is_declined(round_: int) -> None:
    peer = make_peer("me", ["a"])
    peer.on_message(0.0, "a", Call(round=round_, attempt=1, seconds=2.0))
    effects = peer.take_effects()
    assert not of_kind(effects, fx.TakeSnapshot)
    assert [e.message.units for e in of_kind(effects, fx.Send) if isinstance(e.message, Join)] == [{}]


def test_a_second_coordinator_is_declined_while_we_wait_for_the_first() -> None:
    peer = joined(["a", "b"])
    peer.on_message(0.3, "b", Call(round=1, attempt=1, seconds=2.0))
    assert [e.message.units for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, Join)] == [{}]


# The roster arrives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["b", "me"])
def test_a_roster_that_its_coordinator_did_not_sign_is_refused_with_a_strike(by: str) -> None:
    peer = joined(["a", "b"])
    peer.on_message(0.2, "a", signed(make(["a", "me"], [UNIT]), by=by))
    assert [s.peer for s in of_kind(peer.take_effects(), fx.Strike)] == ["a"]
    assert not peer.rounds


def test_a_roster_that_somebody_else_passes_on_is_refused() -> None:
    peer = joined(["a", "b"])
    peer.on_message(0.2, "b", signed(make(["a", "me"], [UNIT])))
    assert [s.peer for s in of_kind(peer.take_effects(), fx.Strike)] == ["b"]


def test_a_roster_with_units_that_we_did_not_offer_is_refused_with_a_strike() -> None:
    peer = joined(["a"])
    peer.on_message(0.2, "a", signed(make(["a", "me"], [UNIT, "expert-1"])))
    assert "not offered" in of_kind(peer.take_effects(), fx.Strike)[0].reason
    assert not peer.rounds


@pytest.mark.parametrize("changes", [{"round_": 2}, {"tokens": 7}], ids=["another round", "other tokens"])
def test_a_roster_that_we_did_not_join_is_ignored(changes: dict[str, int]) -> None:
    peer = joined(["a"])
    peer.on_message(0.2, "a", signed(make(["a", "me"], [UNIT], **changes)))  # type: ignore[arg-type]
    assert not peer.rounds


def test_a_roster_that_comes_before_our_answer_is_ignored() -> None:
    peer = make_peer("me", ["a"])
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=2.0))
    roster = make(["a"], [UNIT])
    roster = roster.model_copy(update={"tokens": {"a": 100}})
    peer.on_message(0.1, "a", signed(roster))
    assert not peer.rounds
    assert peer.member.joining is not None


def test_a_member_whose_state_has_moved_on_does_not_contribute() -> None:
    peer = joined(["a"])
    peer.on_message(0.2, "a", signed(make(["a", "me"], [UNIT])))
    (effect,) = of_kind(peer.take_effects(), fx.Encode)
    peer.on_encoded(0.3, effect, None)
    assert "me" not in peer.rounds[1].units[UNIT].weights
    assert not of_kind(peer.take_effects(), fx.SendContribution)


# Contributions -------------------------------------------------------------------------------------------------------


def members(*, we_reduce: bool) -> list[str]:
    """Three members of round 1: ourselves, the coordinator, and one that is the first reducer if we are not."""
    context = make_peer("me", []).context
    for third in (f"x{index}" for index in range(9999)):
        first = context.reducers(1, UNIT, ["me", "a", third])[0]
        if first == ("me" if we_reduce else third):
            BLOB[third] = digest(third)
            return ["me", "a", third]
    raise AssertionError("no such name")


def test_the_reducer_waits_for_all_and_then_reduces_at_once() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    assert peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"]) is None
    assert not of_kind(peer.take_effects(), fx.Reduce)
    assert peer.rounds[1].waiting_for(1.0)[0][:2] == (UNIT, names[2])
    peer.on_contribution(0.5, names[2], 1, UNIT, BLOB[names[2]])
    (reduce,) = of_kind(peer.take_effects(), fx.Reduce)
    assert sorted(c.peer for c in reduce.contributions) == sorted(names)


def test_the_reducer_closes_at_the_deadline_and_the_packet_names_who_is_missing() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"])
    peer.on_time(4.1)
    assert not of_kind(peer.take_effects(), fx.Reduce)
    peer.on_time(4.2)
    (reduce,) = of_kind(peer.take_effects(), fx.Reduce)
    peer.on_reduced(4.3, reduce, entry_of(peer, "a", "me"), {})
    (ended,) = commit(peer, 4.4)
    assert ended.units[UNIT].outcome is Outcome.PARTIAL
    assert ended.units[UNIT].missing == (names[2],)


def test_a_contributor_that_cannot_be_reached_is_not_waited_for() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"])
    peer.on_unreachable(0.5, names[2])
    assert of_kind(peer.take_effects(), fx.Reduce)


def test_nothing_valid_leaves_the_unit_unchanged_with_a_reason_and_strikes_the_sender() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    for name in names[1:]:
        peer.on_contribution(0.4, name, 1, UNIT, BLOB[name])
    (reduce,) = of_kind(peer.take_effects(), fx.Reduce)
    peer.on_reduced(0.5, reduce, None, {"a": "values are not finite"})
    effects = peer.take_effects()
    assert "not finite" in of_kind(effects, fx.Strike)[0].reason
    (ended,) = of_kind(effects, fx.RoundEnded)
    assert ended.units[UNIT] == fx.UnitReport(
        Outcome.UNCHANGED, (), "no contribution passed the checks", seconds=pytest.approx(0.3)
    )


def test_an_unreachable_reducer_is_followed_by_the_next_at_once_and_a_silent_one_at_the_deadline() -> None:
    names = members(we_reduce=False)
    for silent in (False, True):
        peer = in_round(names)
        second = peer.rounds[1].units[UNIT].reducers[1]
        if silent:
            peer.on_time(8.1)
            assert peer.rounds[1].units[UNIT].reducer == names[2]
            peer.on_time(8.2)
        else:
            peer.on_unreachable(0.4, names[2])
        assert peer.rounds[1].units[UNIT].reducer == second


def test_no_packet_from_anyone_leaves_the_unit_unchanged() -> None:
    peer = in_round(members(we_reduce=False))
    peer.take_effects()
    peer.on_time(24.2)
    (ended,) = of_kind(peer.take_effects(), fx.RoundEnded)
    assert ended.units[UNIT].outcome is Outcome.UNCHANGED
    assert "by the deadline" in ended.units[UNIT].why


def test_contributions_may_overtake_the_roster() -> None:
    names = members(we_reduce=True)
    peer = joined(names[1:])
    assert peer.on_contribution(0.15, "a", 1, UNIT, BLOB["a"]) is None
    assert peer.on_contribution(0.15, "a", 1, UNIT, digest("another")) is not None, "one each"
    assert peer.on_contribution(0.15, "a", 2, UNIT, BLOB["a"]) == "round 2 is not open here"
    assert peer.on_contribution(0.15, "stranger", 1, UNIT, digest("stranger")) is None
    peer.on_message(0.2, "a", signed(make(names, [UNIT])))
    assert peer.rounds[1].units[UNIT].received == {"a": BLOB["a"]}
    assert of_kind(peer.take_effects(), fx.Discard) == [fx.Discard((digest("stranger"),))], "what was not taken up"


def test_what_a_reducer_did_not_ask_for_is_refused_so_that_its_bytes_are_not_kept() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    assert peer.on_contribution(0.4, "stranger", 1, UNIT, digest("s")) is not None
    assert peer.on_contribution(0.4, "a", 1, "expert-1", digest("s")) is not None
    assert peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"]) is None
    assert peer.on_contribution(0.4, "a", 1, UNIT, BLOB["a"]) is None, "the same once more is no harm"
    assert peer.on_contribution(0.4, "a", 1, UNIT, digest("second")) is not None


def test_a_contribution_after_the_packet_is_answered_with_the_packet() -> None:
    names = members(we_reduce=True)
    peer = in_round(names)
    peer.rounds[1].announced(0.0, entry_of(peer, "me", "a"))
    peer.take_effects()
    assert peer.on_contribution(5.0, "a", 1, UNIT, BLOB["a"]) == "the unit's packet is made"
    assert peer.on_contribution(5.0, names[2], 1, UNIT, BLOB[names[2]]) is None, "kept for the next packet"
    for to, sent in zip(("a", names[2]), of_kind(peer.take_effects(), fx.Send), strict=True):
        assert (sent.to, type(sent.message)) == (to, Announce)


def test_a_packet_with_weights_that_the_roster_does_not_give_is_not_the_round_s() -> None:
    peer = in_round(["me", "a"])
    good = entry_of(peer, "a")
    lie = Entry(UNIT, good.before, Head(1, digest("x"), 999), digest("p"), 9, (Contributor("a", 999, BLOB["a"]),))
    stranger = Entry(UNIT, good.before, Head(1, digest("x"), 1), digest("p"), 9, (Contributor("c", 1, BLOB["c"]),))
    assert [peer.rounds[1].accepts(entry) for entry in (good, lie, stranger)] == [True, False, False]
