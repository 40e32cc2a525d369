"""Whole swarms in one process: the protocol under delay, loss, churn and partition."""

from __future__ import annotations

import numpy as np
import pytest

from spesd.config.manifest import MergeConfig, SyncConfig
from spesd.sync.effects import Outcome
from spesd.sync.merge import Merging
from spesd.sync.simulation import Conditions, World

SETTINGS = SyncConfig(
    local_steps=10,
    codec="fp16",
    gather_seconds=2,
    contribute_seconds=4,
    packet_seconds=4,
    coordinator_seconds=3,
    shared_shards=2,
    anchor_rounds=4,
)
SIZES = {"shared-0": 40, "shared-1": 39} | {f"expert-{index}": 30 for index in range(8)}


def make_world(peers: int, *, seed: int = 0, budget: int = 3, settings: SyncConfig = SETTINGS, **kw: object) -> World:
    world = World(SIZES, settings, Conditions(**kw), seed)  # type: ignore[arg-type]
    world.found("peer0", budget)
    for index in range(1, peers):
        world.join(f"peer{index}", budget)
    return world


def agree(world: World) -> bool:
    """Whether all live peers have the same agreed state of every unit."""
    heads = [node.peer.ledger.heads() for node in world.alive]
    return all(row == heads[0] and len(row) == len(SIZES) for row in heads)


def settle(world: World, seconds: float = 60.0) -> None:
    """Stop the trainers, and let the swarm come to rest."""
    for node in world.alive:
        node.step_seconds = 1e9
    world.run(seconds)


def assert_invariant(world: World) -> None:
    """`theta - agreed` is exactly the work that was done and not accepted, on every peer and trained unit."""
    for node in world.alive:
        node.trainer.obey()
        for unit, theta in node.trainer.theta.items():
            difference = theta.astype(np.float64) - node.workshop.agreed[unit]
            np.testing.assert_allclose(difference, node.trainer.unaccepted[unit], atol=2e-6, err_msg=node.name + unit)


def test_without_disturbance_every_round_commits_every_unit() -> None:
    world = make_world(4)
    world.run(120)
    reports = [report for node in world.alive for ended in node.rounds for report in ended.units.values()]
    assert len(world.nodes["peer0"].rounds) >= 20
    assert {report.outcome for report in reports} == {Outcome.COMMITTED}
    assert_invariant(world)
    settle(world)
    assert agree(world)


def test_claims_spread_so_that_no_expert_is_left_and_none_is_crowded() -> None:
    world = make_world(4)
    world.run(90)
    counts = sorted(len(peers) for peers in world.owners(without="").values())
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2]


def test_one_peer_alone_commits_its_own_rounds() -> None:
    world = make_world(1)
    world.run(60)
    assert world.nodes["peer0"].peer.context.newest_round >= 5
    assert_invariant(world)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fifty_peers_with_churn_loss_and_delays_end_in_agreement(seed: int) -> None:
    trace, world = churn(seed)
    assert agree(world)
    assert_invariant(world)
    assert max(node.peer.context.newest_round for node in world.alive) >= 8
    assert not any(node.strikes for node in world.nodes.values())
    if seed == 1:
        assert churn(seed)[0] == trace, "the same seed must give the same trace"


def disturb(world: World, deaths: int, longest: float) -> None:
    """Kill one peer after the other; within `longest` seconds it comes back, or somebody new comes instead."""
    for at in range(deaths):
        victim = world.random.choice(sorted(node.name for node in world.alive))
        world.kill(victim)
        world.run(world.random.uniform(1, longest))
        if at % 3 == 2:
            world.join(f"late{at}", 3)
        else:
            world.restart(victim)


def churn(seed: int) -> tuple[str, World]:
    """Fifty peers; every few seconds one is killed, restarted or new."""
    world = make_world(50, seed=seed, loss=0.02, delay=(0.01, 0.4))
    world.run(20)
    disturb(world, 12, 5)
    settle(world, 90)
    return world.trace, world


def test_a_reducer_killed_in_mid_round_costs_one_deadline() -> None:
    world = make_world(4)
    world.run(40)
    while not any(node.peer.rounds for node in world.alive):
        world.run(0.05)
    world.kill("peer2")
    before = world.nodes["peer0"].peer.context.newest_round
    world.run(40)
    assert world.nodes["peer0"].peer.context.newest_round >= before + 3
    assert_invariant(world)
    world.restart("peer2")
    world.run(30)
    settle(world)
    assert agree(world)
    assert len(world.alive) == 4


def test_a_late_joiner_gets_there_and_takes_the_experts_with_the_fewest_owners() -> None:
    world = make_world(4)
    world.run(60)
    crowded = {unit for unit, peers in world.owners(without="").items() if len(peers) > 1}
    late = world.join("late", 3)
    world.run(30)
    assert late.peer.training
    assert late.peer.context.newest_round == world.nodes["peer0"].peer.context.newest_round
    assert not late.peer.context.owned & crowded
    settle(world)
    assert agree(world)


@pytest.mark.parametrize("side", [1, 2])
def test_a_healed_partition_agrees_again_and_loses_no_work(side: int) -> None:
    world = make_world(4, seed=side)
    world.run(40)
    world.network.partition = {f"peer{index}": int(index < side) for index in range(4)}
    world.run(40)
    assert not agree(world)
    world.network.partition = {}
    world.run(20)
    assert_invariant(world)
    settle(world)
    assert agree(world)


def test_a_poisoned_contribution_is_refused_and_named() -> None:
    world = make_world(4)
    world.run(40)
    bad = world.nodes["peer1"]

    def poison() -> None:
        for values in bad.trainer.theta.values():
            values[0] = np.float32(1e30)

    bad.trainer.commands.append(poison)
    world.run(20)
    assert all(np.isfinite(values).all() for node in world.alive for values in node.workshop.agreed.values())
    assert max(abs(values).max() for node in world.alive for values in node.workshop.agreed.values()) < 100


def test_merging_rounds_keep_replicas_identical_and_bring_experts_together() -> None:
    sizes = {"shared-0": 40} | {f"expert-{index}": 30 for index in range(8)}
    experts = [unit for unit in sizes if unit.startswith("expert")]

    def spread(interval: int) -> float:
        config = MergeConfig(interval=interval, alpha=0.2, decay_rounds=1000, top_k=3)
        merging = Merging(config, experts, layers=2)
        world = World(sizes, SETTINGS, Conditions(), seed=5, merging=merging)
        world.found("peer0", 3)
        for index in range(1, 4):
            world.join(f"peer{index}", 3)
        world.run(80)
        assert_invariant(world)
        settle(world)
        heads = [node.peer.ledger.heads() for node in world.alive]
        assert all(row == heads[0] for row in heads)
        return float(np.std([world.alive[0].workshop.agreed[unit] for unit in experts], axis=0).mean())

    assert spread(interval=2) < 0.7 * spread(interval=0)
