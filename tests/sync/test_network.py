"""The simulated network: bulk takes its turn on lines of limited rate, and is broken off at its deadline."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from test_simulation import SETTINGS, SIZES

from spesd.sync.effects import Fetch, SendContribution
from spesd.sync.network import Line, transfer
from spesd.sync.simulation import Conditions, World


def test_transfers_take_turns_at_the_rate_of_the_slower_side() -> None:
    sender, near, far = Line(up=100.0), Line(down=1000.0), Line(down=50.0)
    assert transfer(0.0, 200, sender, near, inf) == 2.0
    assert transfer(0.0, 100, sender, far, inf) == 4.0, "it begins when the uplink is free, and the downlink is slower"
    assert transfer(0.0, 100, sender, near, inf) == 4.0, "a slow reader does not hold up the sender's line"
    assert (sender.up_bytes, near.down_bytes, far.down_bytes) == (400, 300, 100)


def test_lines_without_limit_take_no_time() -> None:
    assert transfer(3.0, 10**9, Line(), Line(), 3.1) == 3.0


def test_a_transfer_past_its_deadline_uses_the_line_until_then_and_counts_nothing() -> None:
    sender, receiver = Line(up=10.0), Line()
    assert transfer(0.0, 1000, sender, receiver, 5.0) is None
    assert transfer(0.0, 1000, sender, receiver, 5.0) is None, "not even begun"
    assert sender.up_bytes == receiver.down_bytes == 0
    assert transfer(0.0, 100, sender, receiver, 20.0) == 15.0
    sender.cut()
    assert transfer(6.0, 10, sender, receiver, 20.0) == 7.0


@pytest.fixture
def world() -> World:
    """Three peers that have the genesis states and do nothing by themselves."""
    world = World(SIZES, SETTINGS, Conditions(delay=(0.0, 0.0), step_seconds=(1e9, 1e9)), seed=0)
    genesis = {unit: np.zeros(size, np.float32) for unit, size in SIZES.items()}
    for name in "abc":
        world.place(name, 3, genesis)
    return world


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


def test_a_contribution_that_takes_too_long_is_given_up_at_its_deadline(world: World) -> None:
    lost: list[tuple[float, str]] = []
    a = world.nodes["a"]
    a.peer.on_unreachable = lambda now, peer: lost.append((now, peer))  # type: ignore[method-assign]
    blob = a.blobs.put(b"x" * 100)
    world.network.lines["a"].up = 10.0
    world.network.push(a, SendContribution("b", 1, "roster", "shared-0", blob), b"x" * 100)
    world.run(20.0)
    assert lost == [(SETTINGS.contribute_seconds, "b")]
    assert blob not in world.nodes["b"].blobs.data
