"""The simulated network: bulk takes its turn on lines of limited rate, and is broken off at its deadline."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from test_simulation import SETTINGS, SIZES

from spesd.sync.effects import Fetch, SendContribution
from spesd.sync.network import Line
from spesd.sync.simulation import Conditions, World


@pytest.fixture
def world() -> World:
    """Three peers that have the genesis states and do nothing by themselves."""
    world = World(SIZES, SETTINGS, Conditions(delay=(0.0, 0.0), step_seconds=(1e9, 1e9)), seed=0)
    genesis = {unit: np.zeros(size, np.float32) for unit, size in SIZES.items()}
    for name in "abc":
        world.place(name, 3, genesis)
    return world


def send(world: World, sender: str, to: str, size: int, seconds: float = inf) -> list[tuple[float, bool]]:
    """Queue a transfer; the list gets when it ends, and whether all has come."""
    ended: list[tuple[float, bool]] = []
    world.network.transfer(sender, to, size, world.now + seconds, lambda ok: ended.append((world.now, ok)))
    return ended


def test_transfers_take_turns_at_the_rate_of_the_slower_side(world: World) -> None:
    lines = world.network.lines
    lines["a"], lines["b"], lines["c"] = Line(up=100.0), Line(down=1000.0, up=1000.0), Line(down=50.0)
    first, second, third = send(world, "a", "b", 200), send(world, "a", "c", 100), send(world, "a", "b", 100)
    other = send(world, "c", "b", 500)
    world.run(10)
    assert first == [(2.0, True)]
    assert second == [(4.0, True)], "it begins when the uplink is free, and the downlink is slower"
    assert third == [(4.0, True)], "a slow reader does not hold up the sender's line"
    assert other == [(pytest.approx(0.7), True)], "nor does a queue at one sender hold up another's"
    assert (lines["a"].up_bytes, lines["b"].down_bytes, lines["c"].down_bytes) == (400, 800, 100)


def test_lines_without_limit_take_no_time(world: World) -> None:
    world.run(3.0)
    sent = send(world, "a", "b", 10**9, 0.1)
    world.run(1.0)
    assert sent == [(3.0, True)]


def test_a_transfer_past_its_deadline_uses_the_line_until_then_and_counts_nothing(world: World) -> None:
    line = world.network.lines["a"] = Line(up=10.0)
    late, not_begun = send(world, "a", "b", 1000, 5.0), send(world, "a", "b", 1000, 5.0)
    world.run(5.0)
    assert late == not_begun == [(5.0, False)]
    assert line.up_bytes == 0
    in_time = send(world, "a", "b", 100, 20.0)
    world.run(1.0)
    line.cut()
    after_cut = send(world, "a", "c", 10, 20.0)
    world.run(20.0)
    assert (in_time, after_cut) == ([(15.0, True)], [(7.0, True)])


def watch(world: World, name: str) -> list[tuple[float, bool]]:
    """When fetches of that node end, and how."""
    ended: list[tuple[float, bool]] = []
    world.nodes[name].fetched = lambda effect, ok: ended.append((world.now, ok))  # type: ignore[method-assign]
    return ended


@pytest.mark.parametrize("disturbance", ["", "source dies", "parted", "too slow"])
def test_a_fetch_goes_on_with_the_next_source_where_one_breaks_off(world: World, disturbance: str) -> None:
    ended = watch(world, "c")
    world.network.lines["a"].up = 1.0 if disturbance == "too slow" else 50.0
    world.network.lines["b"].up = 100.0
    blob = world.nodes["a"].blobs.put(b"x" * 100)
    world.nodes["b"].blobs.put(b"x" * 100)
    world.network.fetch(world.nodes["c"], Fetch("shared-0", blob, 100, ("nobody", "a", "b"), True))
    world.run(1.0)
    if disturbance == "source dies":
        world.kill("a")
    if disturbance == "parted":
        world.network.partition = {"a": 1}
    world.run(9.0)
    late = SETTINGS.packet_seconds + 100 / world.conditions.slowest_link
    expected = {"": (2.0, True), "too slow": (late, False)}.get(disturbance, (3.0, True))
    assert ended == [pytest.approx(expected)]
    assert (blob in world.nodes["c"].blobs.data) is expected[1]


def test_a_contribution_that_takes_too_long_is_given_up_without_a_word(world: World) -> None:
    lost: list[tuple[float, str]] = []
    a = world.nodes["a"]
    a.peer.on_unreachable = lambda now, peer: lost.append((now, peer))  # type: ignore[method-assign]
    blob = a.blobs.put(b"x" * 100)
    world.network.lines["a"].up = 10.0
    world.network.push(a, SendContribution("b", 1, "roster", "shared-0", blob), b"x" * 100)
    world.run(20.0)
    assert not lost, "b is slow, not gone"
    assert blob not in world.nodes["b"].blobs.data
