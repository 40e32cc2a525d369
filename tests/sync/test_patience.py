"""How long is waited for whom: learned from the past, bounded, and one deadline for a link that collapses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import settings
from test_simulation import agree, assert_invariant, make_world, settle

from spesd.sync import effects as fx
from spesd.sync.ledger import PeerId, UnitId
from spesd.sync.patience import FLOOR, KEPT, LEAST, Pace, Patience
from spesd.sync.simulation import Node, World

seconds = st.floats(0.0, 100.0)


@given(st.lists(seconds, max_size=2 * KEPT), st.floats(0.1, 50))
def test_patience_stays_between_its_bounds_and_needs_some_experience(times: list[float], limit: float) -> None:
    patience = Patience(limit, FLOOR * limit)
    for time in times:
        patience.saw(time)
    assert FLOOR * limit <= patience.seconds <= limit
    if len(times) < LEAST:
        assert patience.seconds == limit


def test_patience_follows_the_median_and_its_spread_not_single_outliers() -> None:
    patience = Patience(100.0, 20.0)
    for time in [30.0, 31.0, 29.0] * 10 + [90.0] * 3:
        patience.saw(time)
    assert 30 < patience.seconds < 40
    for _ in range(KEPT):
        patience.saw(60.0)
    assert patience.seconds == 60.0


@pytest.mark.parametrize(
    ("traffic", "most", "needed"),
    [(1.0, 100, 20), (0.1, 100, 5), (30.0, 100, 100), (30.0, 0, 5)],
    ids=["half the time", "fast enough", "bounded", "fixed"],
)
def test_steps_between_rounds_follow_the_time_of_their_traffic(traffic: float, most: int, needed: int) -> None:
    pace = Pace(settings(local_steps=5, max_local_steps=most, comm_share=0.5))
    assert pace.needed == 5
    for second in range(20):
        pace.stepped(float(second), 10)
        pace.ended(traffic)
    assert pace.needed == needed


# Swarms ------------------------------------------------------------------------------------------------------------


def slow_down(world: World, name: str, seconds: float, only_bulk: bool = False) -> None:
    """From now on everything that `name` sends, or only its contributions and packets, arrives so much later."""
    node, deliver, fetch = world.nodes[name], world.network.deliver, world.network.fetch
    carry_out = node.carry_out

    def deliver_slowly(sender: Node, to: PeerId, act: Callable[[Node], None]) -> None:
        world.after(seconds if sender.name == name else 0.0, lambda: deliver(sender, to, act))

    def fetch_slowly(reader: Node, effect: fx.Fetch) -> None:
        world.after(seconds if effect.sources[:1] == (name,) else 0.0, lambda: fetch(reader, effect))

    def carry_out_slowly(effect: fx.Effect) -> None:
        if isinstance(effect, fx.SendContribution):
            world.after(seconds, lambda: carry_out(effect))
        else:
            carry_out(effect)

    world.network.fetch = fetch_slowly  # type: ignore[method-assign]
    if only_bulk:
        node.carry_out = carry_out_slowly  # type: ignore[method-assign]
    else:
        world.network.deliver = deliver_slowly  # type: ignore[method-assign]


def starts(world: World, name: str, after: float) -> list[float]:
    """When the rounds of `name` that began later than that began."""
    return [ended.started for ended in world.nodes[name].rounds if ended.started > after]


def test_waits_shrink_to_what_the_swarm_needs() -> None:
    world = make_world(4)
    world.run(90)
    contexts = [node.peer.context for node in world.alive]
    assert all(context.stage.seconds < context.stage.limit / 2 for context in contexts)
    # who reduces nothing that others contribute to has nothing to learn of their contributions
    assert any(context.contributing.seconds < context.contributing.limit / 2 for context in contexts)


@pytest.mark.parametrize("only_bulk", [False, True], ids=["all it sends", "its bulk"])
def test_a_link_that_collapses_costs_the_others_one_deadline_once(only_bulk: bool) -> None:
    world = make_world(4)
    world.run(90)
    usual = max(after - before for before, after in pairwise(starts(world, "peer0", 30.0)))
    collapsed, deadline = world.now, world.nodes["peer0"].peer.context.stage.seconds
    slow_down(world, "peer3", 3.0, only_bulk)
    world.run(90)
    gaps = [after - before for before, after in pairwise(starts(world, "peer0", collapsed))]
    assert len(gaps) >= 12, "the swarm goes on at its pace"
    assert max(gaps) <= usual + deadline
    assert sum(gap > usual + 0.5 for gap in gaps) <= 1
    settle(world, 120)
    assert_invariant(world)
    assert agree(world)


def has_work_of(peer: PeerId, ended: fx.RoundEnded, unit: UnitId) -> bool:
    """Whether the packet of `unit` in this round has a contribution of `peer`."""
    report = ended.units.get(unit, fx.UnitReport(fx.Outcome.UNCHANGED))
    made = report.outcome in (fx.Outcome.COMMITTED, fx.Outcome.PARTIAL) and not report.why
    return made and peer not in report.missing


@pytest.mark.parametrize("seed", range(6))
def test_a_peer_with_a_slow_link_still_contributes_a_round_later(seed: int) -> None:
    world = make_world(4, seed=seed)
    world.run(60)
    slow_down(world, "peer3", 1.5, only_bulk=True)
    at = world.now
    world.run(90)
    rounds = [ended for ended in world.nodes["peer3"].rounds if ended.started > at]
    assert len(rounds) >= 10
    for unit in world.nodes["peer3"].peer.trained:
        taken_up = [ended for ended in rounds if has_work_of("peer3", ended, unit)]
        assert len(taken_up) >= 0.4 * len(rounds), "of each unit every other time: what came late for the last round"
    assert not [strike for node in world.nodes.values() for strike in node.strikes]
    assert_invariant(world)
    settle(world)
    assert agree(world)


def test_a_peer_whose_link_recovers_is_waited_for_again() -> None:
    world = make_world(4)
    world.run(60)
    deliver, fetch = world.network.deliver, world.network.fetch
    slow_down(world, "peer3", 3.0)
    world.run(40)
    world.network.deliver, world.network.fetch = deliver, fetch  # type: ignore[method-assign]
    at = world.now
    world.run(60)
    recent = [ended for ended in world.nodes["peer0"].rounds if ended.started > at + 25]
    full = [ended for ended in recent if "peer3" in ended.members]
    assert len(full) >= 0.7 * len(recent)
    assert all("peer3" not in node.peer.context.late for node in world.alive)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]
