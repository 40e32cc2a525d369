"""Lazy refresh: those who do not train an expert fetch it once in some rounds, and lose nothing but freshness."""

from __future__ import annotations

import pytest
from sync_harness import entry, head, links
from test_simulation import SETTINGS, SIZES, assert_invariant, disturb, make_world, settle

from spesd.sync.ledger import Chain, Entry, Head, shortest_way
from spesd.sync.messages import EntryInfo, HeadInfo, Trail
from spesd.sync.simulation import Node, World
from spesd.sync.trail import plan

EVERY = 4
LAZY = SETTINGS.model_copy(update={"refresh_every": EVERY})


def refresh(entries: list[Entry], base: Head) -> list[Entry]:
    """The last of `entries` as a refresh that starts at `base`."""
    last = entries[-1]
    changed = Entry(last.unit, last.before, last.after, last.packet, last.size, last.contributors, base)
    return [*entries[:-1], changed]


def one_state_per_version(world: World) -> bool:
    """Whether no two live peers have different states of one version of a unit."""
    states: dict[tuple[str, int], set[str]] = {}
    for node in world.alive:
        for unit, state in node.peer.ledger.heads().items():
            states.setdefault((unit, state.version), set()).add(state.hash)
    return all(len(hashes) == 1 for hashes in states.values())


def assert_fresh_enough(world: World) -> None:
    """Trained units are everywhere the newest; no follower is a refresh behind an owner."""
    assert one_state_per_version(world)
    for unit in SIZES:
        newest = max(node.peer.ledger[unit].head.version for node in world.alive)
        for node in world.alive:
            version = node.peer.ledger[unit].head.version
            if unit in node.peer.trained:
                assert version == newest, (node.name, unit)
            assert version // EVERY == newest // EVERY, (node.name, unit)


def test_followers_have_only_refreshes_and_are_never_a_refresh_behind() -> None:
    world = make_world(4, settings=LAZY)
    world.run(120)
    assert_invariant(world)
    settle(world)
    assert_fresh_enough(world)
    follower, unit = next((n, u) for n in world.alive for u in SIZES if u not in n.peer.trained)
    entries = follower.peer.ledger[unit].entries
    assert entries
    assert all(item.base is not None and item.after.version % EVERY == 0 for item in entries)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]
    # a round does not stay open for units that nobody here fetches
    assert all(not node.peer.rounds for node in world.alive)


def test_fewer_bytes_for_as_many_rounds() -> None:
    worlds = [make_world(4, settings=settings) for settings in (SETTINGS, LAZY)]
    for world in worlds:
        world.run(120)
    eager, lazy = (
        sum(line.down_bytes for line in w.network.lines.values())
        / max(node.peer.context.newest_round for node in w.alive)
        for w in worlds
    )
    assert lazy < 0.75 * eager


def test_a_follower_that_takes_over_an_expert_has_its_newest_state() -> None:
    world = make_world(3, settings=LAZY, budget=4)
    world.run(60)
    unit = next(unit for unit in SIZES if unit.startswith("expert") and len(owners(world, unit)) == 1)
    (owner,) = owners(world, unit)
    world.kill(owner.name)
    world.run(60)
    assert owners(world, unit), "nobody took over the expert"
    world.restart(owner.name)
    world.run(60)
    assert_invariant(world)
    settle(world)
    assert_fresh_enough(world)


def owners(world: World, unit: str) -> list[Node]:
    return [node for node in world.alive if unit in node.peer.context.owned]


@pytest.mark.parametrize("seed", [1, 2])
def test_churn_loss_and_late_joiners(seed: int) -> None:
    world = make_world(12, seed=seed, settings=LAZY, loss=0.02, delay=(0.01, 0.4))
    world.run(30)
    disturb(world, 8, 8)
    world.run(60)  # a follower leaves a lost fork at the next refresh
    settle(world, 90)
    assert_invariant(world)
    assert_fresh_enough(world)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]


# Chains and ways ------------------------------------------------------------------------------------------------------


def test_the_shortest_way_jumps_over_what_a_refresh_holds() -> None:
    start = head(0, 0)
    entries = refresh(links(start, 4), start)
    more = [*entries, *links(entries[-1].after, 2)]
    assert shortest_way(more, start) == more[3:]
    assert shortest_way(more, entries[0].after) == more[1:]
    assert shortest_way(more, head(9, 9)) == []


def test_a_chain_takes_a_refresh_from_its_base_and_keeps_it_as_the_next_base() -> None:
    start = head(0, 0)
    *_, jump = refresh(links(start, 4), start)
    chain = Chain([start])
    chain.append(jump)
    assert (chain.head, chain.refreshed) == (jump.after, jump.after)
    assert chain.after(start) == [jump]


def test_the_way_of_a_follower_ends_at_the_last_refresh() -> None:
    start = head(0, 0)
    entries = refresh(links(start, 4), start)
    more = [*entries, *links(entries[-1].after, 2)]
    trail = Trail(unit="expert-0", common=HeadInfo.of(start), anchor=None, entries=[EntryInfo.of(e) for e in more])
    assert plan(trail, start, 0, lazy=True) == ([entries[-1]], entries[-1].after)
    assert plan(trail, start, 0) == (more, more[-1].after)


def test_a_refresh_cannot_start_in_the_future() -> None:
    with pytest.raises(ValueError, match="newer than version"):
        refresh([entry(head(3, 3))], head(5, 5))
