"""Who is not waited for: after how many rounds in time a peer that missed a deadline is waited for again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import make_peer, of_kind
from test_rounds import BLOB, UNIT, commit, entry_of, in_round, join_of, joined, make, members, signed

from spesd.sync import effects as fx
from spesd.sync.effects import Outcome
from spesd.sync.lateness import FORGOTTEN, MAX_MISSES, MAX_PEERS, Lateness
from spesd.sync.messages import Announce, Call, EntryInfo, Join
from spesd.sync.peer import SyncPeer

# What is remembered --------------------------------------------------------------------------------------------------


def rounds_until_waited_for(late: Lateness) -> int:
    """Rounds in time that it takes until "x" is waited for."""
    rounds = 0
    while "x" in late:
        late.in_time("x")
        rounds += 1
    return rounds


def test_each_further_miss_takes_twice_as_many_rounds_in_time() -> None:
    late = Lateness()
    assert "x" not in late
    taken = []
    for _ in range(MAX_MISSES + 1):
        late.missed("x")
        assert list(late) == ["x"]
        taken.append(rounds_until_waited_for(late))
    assert taken == [*(2**n for n in range(MAX_MISSES)), 2 ** (MAX_MISSES - 1)]


def test_who_is_late_while_nobody_waits_begins_its_rounds_again_but_is_not_punished_further() -> None:
    late = Lateness()
    for _ in range(3):
        late.missed("x")
        rounds_until_waited_for(late)
    late.missed("x")
    late.in_time("x")
    late.missed("x")
    assert rounds_until_waited_for(late) == 8


def test_who_stays_in_time_for_long_enough_begins_anew() -> None:
    late = Lateness()
    late.missed("x")
    rounds_until_waited_for(late)
    late.missed("x")
    for _ in range(2 * FORGOTTEN):
        late.in_time("x")
    late.missed("x")
    assert rounds_until_waited_for(late) == 1


def test_no_more_peers_are_remembered_than_fit() -> None:
    late = Lateness()
    for index in range(MAX_PEERS + 5):
        late.missed(f"peer {index}")
    assert len(list(late)) == MAX_PEERS and "peer 4" not in late and "peer 5" in late


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.booleans())))
def test_a_miss_always_counts_and_no_sentence_is_for_ever(events: list[tuple[str, bool]]) -> None:
    late = Lateness()
    for peer, in_time in events:
        (late.in_time if in_time else late.missed)(peer)
        assert in_time or peer in late
    for peer in "xyz":
        for _ in range(2 ** (MAX_MISSES - 1)):
            late.in_time(peer)
    assert not list(late)


# What a round finds --------------------------------------------------------------------------------------------------

TWO = ["shared-0", UNIT]


def contribution(peer: SyncPeer, now: float, sender: str, unit: str) -> None:
    peer.on_contribution(now, sender, 1, unit, BLOB[sender])


def test_only_a_round_in_which_all_came_in_time_makes_up_for_a_miss() -> None:
    for second, is_late in ((0.5, False), (4.3, True)):
        names = members(we_reduce=True)
        peer = in_round(names, TWO)
        peer.context.late.missed("a")
        reduced_by_us = [unit for unit, state in peer.rounds[1].units.items() if state.reducers[0] == "me"]
        for now, unit in zip((0.4, second), reduced_by_us, strict=False):
            contribution(peer, now, "a", unit)
        assert ("a" in peer.context.late) is (is_late and len(reduced_by_us) > 1)


def test_a_contribution_that_comes_when_the_round_is_over_is_judged_by_its_deadline() -> None:
    for now, is_late in ((4.0, False), (4.3, True)):
        names = members(we_reduce=True)
        peer = in_round(names)
        peer.context.late.missed("a")
        contribution(peer, 0.4, names[2], UNIT)
        (reduce,) = of_kind(peer.take_effects(), fx.Reduce)
        peer.on_reduced(0.5, reduce, entry_of(peer, "me", names[2]), {})
        assert commit(peer)
        contribution(peer, now, "a", UNIT)
        assert ("a" in peer.context.late) is is_late


@pytest.mark.parametrize(("seconds", "is_late"), [(0.7, False), (1.5, True)])
def test_a_reducer_whose_packet_comes_much_slower_than_packets_do_is_late(seconds: float, is_late: bool) -> None:
    names = members(we_reduce=False)
    peer = joined(names[1:])
    for _ in range(20):
        peer.context.fetching.saw(0.3)
    peer.on_message(0.2, "a", signed(make(names, [UNIT])))
    (encode,) = of_kind(peer.take_effects(), fx.Encode)
    peer.on_encoded(0.3, encode, BLOB["me"])
    peer.on_message(3.0, names[2], Announce(entries=[EntryInfo.of(entry_of(peer, *names))]))
    (ended,) = commit(peer, 3.0 + seconds)
    assert ended.units[UNIT].outcome is Outcome.COMMITTED, "it was waited for"
    assert ended.units[UNIT].seconds == pytest.approx(2.8 + seconds)
    assert ended.own_ended == pytest.approx(3.0 + seconds)
    assert (names[2] in peer.context.late) is is_late


def test_who_only_reads_a_unit_does_not_know_why_there_is_no_packet() -> None:
    names = members(we_reduce=False)
    peer = joined(names[1:])
    roster = make(names, ["shared-0", UNIT])
    roster.units[UNIT].contributors.remove("me")
    peer.on_message(0.2, "a", signed(roster))
    peer.on_time(8.3)
    assert peer.rounds[1].units[UNIT].stage == 1
    assert peer.rounds[1].units[UNIT].reducers[0] not in peer.context.late
    assert not list(peer.context.late)


# What costs time for nothing -----------------------------------------------------------------------------------------


def test_a_unit_ends_at_once_if_the_state_of_its_only_contributor_has_moved_on() -> None:
    peer = joined(["a"])
    peer.on_message(0.2, "a", signed(make(["me"], [UNIT])))
    (encode,) = of_kind(peer.take_effects(), fx.Encode)
    peer.on_encoded(0.3, encode, None)
    (ended,) = of_kind(peer.take_effects(), fx.RoundEnded)
    assert ended.units[UNIT].outcome is Outcome.UNCHANGED
    assert "moved on" in ended.units[UNIT].why


def test_a_coordinator_that_its_own_roster_does_not_list_is_free_for_the_next_call() -> None:
    peer = make_peer("me", ["a", "b"])
    peer.on_progress(0.0, 2, 100)
    peer.coordinator.wanted(0.0, 1)
    peer.on_time(0.0)
    assert peer.coordinator.gathering is not None
    peer.on_message(0.1, "a", join_of("shared-0", UNIT))
    peer.on_message(0.1, "b", join_of("shared-0", UNIT))
    peer.on_time(2.1)  # its own trainer has not come to the end of a step
    assert 1 not in peer.rounds
    assert peer.member.joining is None
    peer.take_effects()
    peer.on_message(2.2, "a", Call(round=2, attempt=1, seconds=2.0))
    assert of_kind(peer.take_effects(), fx.TakeSnapshot)


def test_an_answer_is_put_off_only_for_as_long_as_leaves_time_for_a_snapshot() -> None:
    peer = make_peer("me", ["a"])
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=2.0))
    peer.on_snapshot(0.8, 1)
    peer.member.reset()
    peer.member.postpone(10.0, "a", Call(round=2, attempt=1, seconds=2.0))
    assert peer.member.postponed is not None
    assert peer.member.postponed.patience == pytest.approx(10.8), "2 s less one and a half snapshots"


def test_nobody_is_called_late_who_is_not_there() -> None:
    peer = make_peer("me", ["a", "b"])
    for name in ("b", "gone"):
        peer.context.late.missed(name)
    peer.on_message(0.0, "a", Call(round=1, attempt=1, seconds=2.0))
    peer.on_snapshot(0.1, 1)
    (join,) = [e.message for e in of_kind(peer.take_effects(), fx.Send) if isinstance(e.message, Join)]
    assert join.late == ["b"]


def test_a_unit_that_we_train_keeps_us_from_the_next_round_also_where_we_do_not_contribute() -> None:
    names = members(we_reduce=False)
    peer = joined(names[1:])
    roster = make(names, ["shared-0", UNIT])
    roster.units[UNIT].contributors.remove("me")
    peer.on_message(0.2, "a", signed(roster))
    for effect in of_kind(peer.take_effects(), fx.Encode):
        peer.on_encoded(0.3, effect, None)  # of shared-0 others have something to give, but no packet comes
    peer.on_time(30.0)
    (ended,) = of_kind(peer.take_effects(), fx.RoundEnded)
    assert ended.own_ended == max(ended.started + report.seconds for report in ended.units.values())
    assert ended.own_ended > ended.started
