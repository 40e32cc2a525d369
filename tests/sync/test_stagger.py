"""Staggered commits: units take turns, so that a round carries few of them and each moves as often as before."""

from __future__ import annotations

import pytest
from test_simulation import SETTINGS, SIZES, agree, assert_invariant, disturb, make_world, settle

from spesd.config.manifest import MergeConfig
from spesd.sync.merge import Merging
from spesd.sync.simulation import World

EVERY = 3
STAGGERED = SETTINGS.model_copy(update={"stagger": EVERY, "local_steps": 4})
POSITION = {unit: index for index, unit in enumerate(SIZES)}


def assert_turns_kept(world: World) -> None:
    """Every packet of a unit is of a round in which it has its turn."""
    for node in world.alive:
        for unit in SIZES:
            versions = [entry.after.version for entry in node.peer.ledger[unit].entries]
            assert all(version % EVERY == POSITION[unit] % EVERY for version in versions), (node.name, unit, versions)


def test_a_round_is_about_the_units_in_turn_and_all_units_move_on() -> None:
    world = make_world(4, settings=STAGGERED)
    world.run(150)
    assert_turns_kept(world)
    assert_invariant(world)
    for node in world.nodes.values():
        newest = node.peer.context.newest_round
        assert newest >= 20
        for ended in node.rounds:
            assert {POSITION[unit] % EVERY for unit in ended.units} == {ended.round % EVERY}
        assert all(newest - head.version <= 2 * EVERY for head in node.peer.ledger.heads().values())
    settle(world)
    assert agree(world)


@pytest.mark.parametrize("seed", [1, 2])
def test_deaths_and_newcomers_end_in_agreement(seed: int) -> None:
    world = make_world(8, seed=seed, settings=STAGGERED, loss=0.02)
    world.run(30)
    disturb(world, 8, 8)
    settle(world, 90)
    assert agree(world)
    assert_turns_kept(world)
    assert_invariant(world)


def test_followers_fetch_one_turn_of_several() -> None:
    world = make_world(4, settings=STAGGERED.model_copy(update={"refresh_every": 2}))
    world.run(150)
    followed = [
        entry
        for node in world.alive
        for unit in SIZES
        if unit not in node.peer.trained
        for entry in node.peer.ledger[unit].entries
    ]
    assert followed
    assert all(entry.base is not None and entry.after.version // EVERY % 2 == 0 for entry in followed)
    assert_invariant(world)


def test_every_expert_merges_at_every_interval_of_its_turns() -> None:
    experts = [unit for unit in SIZES if unit.startswith("expert")]
    merging = Merging(MergeConfig(interval=2, alpha=0.1, decay_rounds=100), experts, layers=2, stagger=EVERY)
    for unit in experts:
        turns = [round_ for round_ in range(24) if round_ % EVERY == POSITION[unit] % EVERY]
        assert [merging.due(unit, round_) for round_ in turns] == [True, False] * 4
