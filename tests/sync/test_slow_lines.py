"""Lines of limited rate: what a peer whose line collapses costs the others, and who is to blame."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sync_harness import SIZES, digest, genesis, head, make_peer, of_kind
from test_rounds import UNIT, entry_of, in_round, join_of, joined, make, signed
from test_simulation import SETTINGS, assert_invariant, settle

from spesd.sync import effects as fx
from spesd.sync.coordinator import Gathering, blamed, make_roster
from spesd.sync.effects import Outcome
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.messages import Announce, Call, EntryInfo, HeadInfo, Join, Message, Ready
from spesd.sync.peer import SyncPeer
from spesd.sync.simulation import Conditions, World

FAST = ("peer0", "peer1", "peer2")
UP, BOTH = ("up",), ("up", "down")
BIG = dict.fromkeys(("shared-0", "shared-1", *(f"expert-{index}" for index in range(8))), 4000)


# Who is to blame -----------------------------------------------------------------------------------------------------


def test_blame_falls_on_the_peer_that_explains_most_complaints() -> None:
    told = {"a": ["slow"], "b": ["slow"], "c": [], "slow": ["a", "b", "c"]}
    assert blamed(told) == {"slow"}
    assert blamed({"a": ["b"], "b": [], "c": ["b"], "d": []}) == {"b"}, "who is found late, not who finds"
    assert blamed({"a": ["b"], "b": [], "c": []}) == set(), "one complaint may be either's fault"


def test_less_than_half_of_the_members_are_slow_and_whoever_did_not_join_is() -> None:
    assert blamed({"a": ["b"], "b": ["a"]}) == set()
    assert blamed({name: [other for other in "abcd" if other != name] for name in "abcd"}) == {"d"}
    assert blamed({"a": ["gone", "silent"], "b": ["gone"]}) == {"gone"}
    assert blamed({"a": ["gone"]}) == {"gone"}, "nobody else is there to complain"
    assert blamed({"a": ["a"], "b": []}) == set()


def test_many_complaints_are_settled_quickly() -> None:
    names = [f"p{index}" for index in range(1024)]
    assert len(blamed(dict.fromkeys(names, names[:256]))) < 512


def test_the_roster_starts_from_the_state_that_most_have_not_from_the_one_that_only_a_slow_peer_has() -> None:
    common, heavier = head(3, 30), head(3, 50, "slow")
    joins = {
        name: Join(round=4, attempt=1, tokens=5, units={UNIT: HeadInfo.of(common)}, late=["slow"])
        for name in ("a", "b")
    }
    joins["slow"] = Join(round=4, attempt=1, tokens=5, units={UNIT: HeadInfo.of(heavier)}, late=["a", "b"])
    roster = make_roster("a", Gathering(4, 1, 0.0, 0.0, set(), joins), SIZES)
    assert roster.units[UNIT].head.head() == common
    assert roster.units[UNIT].contributors == ["a", "b"]
    assert roster.late == ["slow"]


# Packets that do not come through ------------------------------------------------------------------------------------


def announce(peer: SyncPeer, now: float, entry: Entry, by: str) -> None:
    peer.on_message(now, by, Announce(entries=[EntryInfo.of(entry)]))


def sent(peer: SyncPeer) -> list[tuple[str, Message]]:
    return [(effect.to, effect.message) for effect in of_kind(peer.take_effects(), fx.Send)]


def after_two_reducers() -> tuple[SyncPeer, list[str]]:
    """A member of a round of four that has sent its contribution to the first reducer; and the reducers in order."""
    ranked = make_peer().context.reducers(1, UNIT, ["me", *(f"x{index}" for index in range(9999))])
    names = ["a", *ranked[: min(2, ranked.index("me"))], "me"]
    peer = in_round(names)
    peer.take_effects()
    return peer, peer.context.reducers(1, UNIT, names)


def test_a_packet_that_does_not_come_through_is_given_up_for_the_next_reducer() -> None:
    peer, (first, second, *_) = after_two_reducers()
    slow = entry_of(peer, "a")
    announce(peer, 0.5, slow, first)
    (stuck,) = of_kind(peer.take_effects(), fx.Fetch)
    end = 0.2 + peer.context.committing.seconds
    peer.on_time(end - 0.1)
    assert not of_kind(peer.take_effects(), fx.SendContribution)
    peer.rounds[1].commit_seconds = 8.0  # as after some rounds in which packets came quickly
    peer.on_time(8.3)
    assert [effect.to for effect in of_kind(peer.take_effects(), fx.SendContribution)] == [second]
    assert first in peer.context.late

    names = tuple(Contributor(name, 100, digest(name)) for name in ("a", second))
    better = Entry(UNIT, genesis(UNIT), Head(1, digest("quick"), 200), digest("quick packet"), 100, names)
    announce(peer, 8.5, better, second)
    (fetch,) = of_kind(peer.take_effects(), fx.Fetch)
    assert fetch.blob == better.packet, "the fetch under way holds nobody up"
    peer.on_fetched(8.6, stuck, True)
    assert of_kind(peer.take_effects(), fx.Discard) == [fx.Discard((slow.packet,))], "what comes too late is dropped"
    peer.on_fetched(8.7, fetch, True)
    (commit,) = of_kind(peer.take_effects(), fx.Commit)
    peer.on_committed(8.8, commit, True)
    (ended,) = of_kind(peer.take_effects(), fx.RoundEnded)
    assert ended.units[UNIT].outcome is Outcome.PARTIAL


def test_who_contributes_to_a_round_that_is_over_is_told_its_packet() -> None:
    peer = in_round(["me", "a"])
    entry = entry_of(peer, "a", "me")
    announce(peer, 0.5, entry, "a")
    (fetch,) = of_kind(peer.take_effects(), fx.Fetch)
    peer.on_fetched(0.6, fetch, True)
    (commit,) = of_kind(peer.take_effects(), fx.Commit)
    peer.on_committed(0.7, commit, True)
    peer.take_effects()
    assert peer.on_contribution(0.8, "a", 1, UNIT, digest("late")) is not None
    assert ("a", Announce(entries=[EntryInfo.of(entry)])) in sent(peer)
    assert peer.on_contribution(0.8, "a", 1, "no unit", digest("late")) is not None
    assert not sent(peer)


def test_a_fetch_under_way_postpones_the_answer_to_a_call_but_not_for_ever() -> None:
    peer = make_peer("me", ["a"])
    names = (Contributor("a", 100, digest("theirs")),)
    announce(peer, 0.0, Entry(UNIT, genesis(UNIT), Head(1, digest("x"), 100), digest("packet"), 100, names), "a")
    peer.take_effects()
    peer.on_message(1.0, "a", Call(round=2, attempt=1, seconds=2.0))
    peer.on_time(1.9)
    assert not of_kind(peer.take_effects(), fx.TakeSnapshot)
    assert peer.deadline() <= 2.0
    peer.on_time(2.0)
    assert of_kind(peer.take_effects(), fx.TakeSnapshot)
    peer.on_snapshot(2.1, 2)
    (join,) = [message for _, message in sent(peer) if isinstance(message, Join)]
    assert join.units[UNIT].head() == genesis(UNIT)


# A round of too few ------------------------------------------------------------------------------------------------


def test_a_round_waits_for_most_of_the_last_ones_members_but_not_for_ever() -> None:
    peer = make_peer("me", ["a", "b"])
    peer.context.members = frozenset({"me", "a", "b", "gone"})
    peer.on_message(0.0, "a", Ready(round=1))
    peer.on_snapshot(0.1, 1)
    peer.on_time(2.0)
    assert not peer.rounds, "a and b are live and were in the last round"
    now = 2.0
    while not peer.rounds:
        assert now < 2.0 + peer.context.stage.limit + 2 * peer.context.gathering.limit
        now += 0.5
        peer.on_time(now)
        for effect in of_kind(peer.take_effects(), fx.TakeSnapshot):
            peer.on_snapshot(now, effect.round)
    assert now >= 2.0 + peer.context.stage.limit


def test_half_of_the_members_make_no_round_but_slow_ones_do_not_count() -> None:
    """Else the two that come first and the two that come after them would fork."""
    for slow in ((), ("c",)):
        peer = make_peer("me", ["a", "b", "c"])
        peer.context.members, peer.context.slow = frozenset({"me", "a", "b", "c"}), frozenset(slow)
        peer.on_message(0.0, "a", Ready(round=1))
        peer.on_snapshot(0.1, 1)
        peer.on_message(0.2, "a", join_of(UNIT))
        peer.on_time(2.0)
        assert (1 in peer.rounds) is bool(slow)


def test_a_round_does_not_wait_for_members_that_are_gone() -> None:
    peer = make_peer("me", ["a", "b"])
    peer.context.members = frozenset({"me", "a", "b", "c", "d"})
    peer.on_message(0.0, "a", Ready(round=1))
    peer.on_snapshot(0.1, 1)
    peer.on_message(0.2, "a", join_of(UNIT))
    peer.on_time(2.0)
    assert peer.rounds


# Sitting a round out -----------------------------------------------------------------------------------------------


def test_a_slow_peer_whose_line_is_still_busy_sits_a_round_out_but_not_for_ever() -> None:
    busy = [True]
    peer = make_peer("me", ["a"], sending=lambda: busy[0])
    limit = peer.context.stage.limit
    rounds = iter(range(1, 99))

    def joins(now: float) -> bool:
        """Whether it joins the round that is called now."""
        number = next(rounds)
        peer.on_message(now, "a", Call(round=number, attempt=1, seconds=2.0))
        effects = peer.take_effects()
        declined = [effect for effect in of_kind(effects, fx.Send) if isinstance(effect.message, Join)]
        assert all(not effect.message.units for effect in declined)  # type: ignore[union-attr]
        peer.member.reset()
        return bool(of_kind(effects, fx.TakeSnapshot)) and not declined

    assert joins(0.0), "its line is as good as those of others"
    peer.context.slow = frozenset({"me"})
    assert not joins(1.0)
    assert not joins(limit)
    assert joins(1.0 + limit)
    assert not joins(2.0 + limit), "then again for so long"
    busy[0] = False
    assert joins(3.0 + limit)


# Two calls for one round -------------------------------------------------------------------------------------------


def test_of_two_calls_for_one_round_everybody_goes_with_the_first_in_order() -> None:
    names = [f"x{index}" for index in range(20)]
    order = make_peer().context.in_order(1, ["a", *names])
    before, after = order[0], order[-1]
    peer = joined(["a", *names])
    call = Call(round=1, attempt=1, seconds=2.0)
    peer.on_message(0.2, after, call)
    assert [(to, message.units) for to, message in sent(peer) if isinstance(message, Join)] == [(after, {})]
    peer.on_message(0.3, before, call)
    peer.on_snapshot(0.4, 1)
    assert [to for to, message in sent(peer) if isinstance(message, Join) and message.units] == [before]
    peer.on_message(0.5, "a", signed(make(["a", "me"], [UNIT], tokens=0)))
    assert not peer.rounds, "the call that it left has no roster for it"


def test_a_coordinator_gives_way_to_one_before_it() -> None:
    names = [f"x{index}" for index in range(20)]
    peer = make_peer("me", names)
    first = peer.context.coordinators(1)[0]
    assert first != "me"
    peer.coordinator.wanted(0.0, 1)
    peer.on_time(0.0)
    assert peer.coordinator.gathering is not None
    peer.on_message(0.1, first, Call(round=1, attempt=1, seconds=2.0))
    assert peer.coordinator.gathering is None
    peer.on_message(0.2, names[0], join_of(UNIT))
    assert not peer.rounds


# Swarms ------------------------------------------------------------------------------------------------------------


def limited_world(seed: int, **sync: object) -> World:
    """Four peers at 100 kB/s up and 200 down, where a packet has 8 kB."""
    world = World(BIG, SETTINGS.model_copy(update=sync), Conditions(slowest_link=2000.0), seed)
    world.found("peer0", 3)
    for index in range(1, 4):
        world.join(f"peer{index}", 3)
    for name in world.nodes:
        world.network.lines[name].up, world.network.lines[name].down = 100_000.0, 200_000.0
    return world


def rounds_of_most(world: World, after: float) -> list[float]:
    """When the rounds began in which at least two of the fast peers took part."""
    began: dict[int, float] = {}
    for name in FAST:
        for ended in world.nodes[name].rounds:
            if ended.started > after and len(set(ended.members) & set(FAST)) >= 2:
                began[ended.round] = min(began.get(ended.round, ended.started), ended.started)
    return sorted(began.values())


def assert_agreed(world: World) -> None:
    heads = [node.peer.ledger.heads() for node in world.alive]
    assert all(row == heads[0] and len(row) == len(BIG) for row in heads)


@pytest.mark.parametrize(("factor", "ways", "seed"), [(3, UP, 0), (3, UP, 1), (5, UP, 1), (10, UP, 0), (10, BOTH, 1)])
def test_a_line_that_collapses_costs_the_others_one_deadline(factor: int, ways: tuple[str, ...], seed: int) -> None:
    """At a third or a fifth of its rate some of what a peer sends is in time, and some is not."""
    world = limited_world(seed)
    world.run(120)
    before = rounds_of_most(world, 60.0)
    usual = max(later - earlier for earlier, later in pairwise(before))
    collapsed, slow = world.now, world.network.lines["peer3"]
    for way in ways:
        setattr(slow, way, getattr(slow, way) / factor)
    world.run(120)
    gaps = [later - earlier for earlier, later in pairwise([before[-1], *rounds_of_most(world, collapsed)])]
    lost = sum(max(0.0, gap - usual) for gap in gaps)
    assert lost <= world.nodes["peer0"].peer.context.stage.limit, "one deadline in all"
    assert len(gaps) >= 1.7 * len(before), "twice the time"
    slow_rounds = [ended for ended in world.nodes["peer3"].rounds if ended.started > collapsed]
    taken_up = (Outcome.COMMITTED, Outcome.PARTIAL)
    own = world.nodes["peer3"].peer.trained
    accepted = [
        ended
        for ended in slow_rounds
        if any(
            ended.units[u].outcome in taken_up and "peer3" not in ended.units[u].missing
            for u in own & ended.units.keys()
        )
    ]
    assert len(accepted) >= 5, "the slow peer still contributes when it can"
    settle(world, 120)
    assert_invariant(world)
    assert_agreed(world)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]


def test_rounds_become_rarer_until_their_traffic_takes_its_share_of_the_time() -> None:
    share = 0.3
    world = limited_world(2, local_steps=2, max_local_steps=60, comm_share=share)
    world.run(240)
    settled = 120.0
    for name in FAST:
        rounds = [ended for ended in world.nodes[name].rounds if ended.started > settled]
        spent = sum(ended.ended - ended.started for ended in rounds)
        assert 0.8 * share <= spent / (world.now - settled) <= 1.2 * share
        assert 2 < world.nodes[name].peer.member.pace.needed < 60
    gaps = [later - earlier for earlier, later in pairwise(rounds_of_most(world, settled))]
    assert max(gaps) <= 2 * min(gaps), "the pace is steady"
    settle(world, 120)
    assert_agreed(world)
