"""Swarms under rarer disturbances: unequal speed, lost disks, repeated messages, failing fetches, heavy churn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from test_simulation import SETTINGS, SIZES, agree, assert_invariant, make_world, settle

from spesd.sync import effects as fx
from spesd.sync.ledger import PeerId
from spesd.sync.messages import SignedRoster
from spesd.sync.simulation import Node, World


def set_speeds(world: World, seconds: dict[str, float]) -> None:
    for name, step_seconds in seconds.items():
        world.nodes[name].step_seconds = step_seconds


def repeat_and_reorder(world: World) -> None:
    """A third of all messages arrives twice, and a tenth much later than sent."""
    deliver = world.network.deliver

    def twice(sender: Node, to: PeerId, act: Callable[[Node], None]) -> None:
        if world.random.random() < 0.1:
            world.after(world.random.uniform(1, 6), lambda: deliver(sender, to, act))
        else:
            deliver(sender, to, act)
        if world.random.random() < 0.3:
            deliver(sender, to, act)

    world.network.deliver = twice  # type: ignore[method-assign]


def lose_fetches(world: World, share: float) -> None:
    """So many fetches find nobody who serves the blob."""
    fetch = world.network.fetch

    def lossy(node: Node, effect: fx.Fetch) -> None:
        lost = world.random.random() < share
        fetch(node, fx.Fetch(effect.unit, effect.blob, effect.size, () if lost else effect.sources, effect.urgent))

    world.network.fetch = lossy  # type: ignore[method-assign]


def assert_healthy(world: World) -> None:
    """All live peers agree, nobody was accused, and nobody's work was lost or counted twice."""
    assert agree(world)
    assert_invariant(world)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]


def test_peers_of_unequal_speed_all_take_part_in_every_round() -> None:
    world = make_world(3)
    set_speeds(world, {"peer0": 0.2, "peer1": 0.4, "peer2": 0.8})
    world.run(90)
    members = [set(ended.members) for ended in world.nodes["peer0"].rounds[8:]]
    assert members
    assert sum(names == {"peer0", "peer1", "peer2"} for names in members) >= 0.8 * len(members)
    settle(world)
    assert_healthy(world)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_peers_whose_steps_take_longer_than_the_fastest_waits_still_take_part_in_most_rounds(seed: int) -> None:
    world = make_world(4, seed=seed, settings=SETTINGS.model_copy(update={"local_steps": 5}))
    set_speeds(world, {"peer0": 1.0, "peer1": 0.5, "peer2": 0.25, "peer3": 1.0})
    world.run(200)
    rounds = [ended for ended in world.nodes["peer2"].rounds if ended.started > 50]
    assert len(rounds) >= 50
    for name in world.nodes:
        took_part = sum(name in ended.members for ended in rounds)
        assert took_part > 0.5 * len(rounds), name


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_killed_peer_makes_the_others_wait_at_most_once(seed: int) -> None:
    world = make_world(4, seed=seed)
    world.run(60)
    world.kill("peer3")
    world.run(60)
    for name in ("peer0", "peer1", "peer2"):
        began = [ended.started for ended in world.nodes[name].rounds if ended.started > 20]
        gaps = [(later, later - earlier) for earlier, later in pairwise(began)]
        usual = max(gap for at, gap in gaps if at < 60)
        after = [gap for at, gap in gaps if at >= 60]
        assert max(after) <= usual + world.nodes[name].peer.context.stage.limit
        assert sum(gap > usual + 0.5 for gap in after) <= 1


def test_a_coordinator_that_dies_between_call_and_roster_is_replaced() -> None:
    world = make_world(4)
    world.run(40)
    while not (calling := [node for node in world.alive if node.peer.coordinator.gathering is not None]):
        world.run(0.02)
    victim = calling[0]
    before = max(node.peer.context.newest_round for node in world.alive)
    world.kill(victim.name)
    world.run(40)
    assert all(node.peer.context.newest_round >= before + 3 for node in world.alive)
    world.restart(victim.name)
    world.run(20)
    settle(world)
    assert_healthy(world)


def test_a_peer_that_lost_its_disk_comes_back_with_nothing() -> None:
    world = make_world(4)
    world.run(40)
    world.kill("peer0")
    world.run(10)
    world.join("peer0", 3)
    world.run(30)
    assert world.nodes["peer0"].peer.training
    assert world.nodes["peer0"].rounds
    settle(world)
    assert_healthy(world)


def test_a_member_that_never_gets_a_roster_holds_nobody_up() -> None:
    world = make_world(4)
    world.run(30)
    deaf, on_message = world.nodes["peer3"].peer, world.nodes["peer3"].peer.on_message

    def without_rosters(now: float, sender: PeerId, message: object) -> None:
        if not isinstance(message, SignedRoster):
            on_message(now, sender, message)  # type: ignore[arg-type]

    deaf.on_message = without_rosters  # type: ignore[method-assign, assignment]
    before = world.nodes["peer0"].peer.context.newest_round
    world.run(60)
    assert world.nodes["peer0"].peer.context.newest_round >= before + 4
    deaf.on_message = on_message  # type: ignore[method-assign]
    world.run(20)
    settle(world)
    assert_healthy(world)


def test_repeated_and_reordered_messages_do_no_harm() -> None:
    world = make_world(5, seed=1)
    repeat_and_reorder(world)
    world.run(90)
    assert world.nodes["peer0"].peer.context.newest_round >= 6
    settle(world)
    assert_healthy(world)


def test_fetches_that_fail_are_tried_again_elsewhere() -> None:
    world = make_world(5, seed=3)
    lose_fetches(world, 0.3)
    world.run(90)
    assert world.nodes["peer0"].peer.context.newest_round >= 6
    settle(world)
    assert_healthy(world)


def test_half_of_the_swarm_is_replaced_again_and_again() -> None:
    world = heavy_churn(7)
    assert_healthy(world)
    assert max(node.peer.context.newest_round for node in world.alive) >= 6
    for node in world.alive:
        assert all(node.workshop.head(unit) == node.peer.ledger[unit].head for unit in SIZES)
        assert node.peer.ledger.blobs() <= node.blobs.data.keys(), "what a restart needs is kept"


def heavy_churn(seed: int) -> World:
    """Twelve peers, of which six at a time are killed, in the middle of whatever they do."""
    world = make_world(12, seed=seed, loss=0.03, delay=(0.01, 0.4))
    world.run(20)
    for turn in range(5):
        victims = world.random.sample(sorted(node.name for node in world.alive), 6)
        for name in victims:
            world.kill(name)
            world.run(world.random.uniform(0, 0.5))
        world.run(world.random.uniform(2, 8))
        for index, name in enumerate(victims):
            if index % 3 == 2:
                world.join(f"new{turn}-{index}", 3)
            else:
                world.restart(name)
        world.run(world.random.uniform(2, 10))
    settle(world, 90)
    return world
