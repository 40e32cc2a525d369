"""The outer step: the numbers of torch's Nesterov, and momentum that is handed over with the packets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sync_harness import digest, settings
from test_simulation import SETTINGS, SIZES, agree, assert_invariant, settle

from spesd.config.manifest import OuterConfig
from spesd.sync.codec import Values
from spesd.sync.effects import Commit, Encode, Reduce
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.outer import OuterStep
from spesd.sync.simulation import RUN, Conditions, World
from spesd.sync.toys import MemoryBlobs
from spesd.sync.workshop import Workshop, state_hash

NESTEROV = OuterConfig(method="nesterov", learning_rate=0.7, momentum=0.9)
UNIT, COUNT, ROUNDS = "expert-0", 5, 6


def changes() -> Values:
    """Mean contributions of each round: float32 [ROUNDS, COUNT]."""
    return np.random.default_rng(0).standard_normal((ROUNDS, COUNT)).astype(np.float32)


def torch_states() -> list[Values]:
    """What torch's SGD with Nesterov momentum makes of the negated changes as gradients, after each step."""
    parameter = torch.nn.Parameter(torch.zeros(COUNT))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    states = []
    for change in changes():
        parameter.grad = -torch.from_numpy(change)
        sgd.step()
        states.append(parameter.detach().numpy().copy())
    return states


def test_moves_are_those_of_torch_and_momentum_follows_from_them() -> None:
    step, state, momentum = OuterStep(NESTEROV), np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    moves = []
    for change, wanted in zip(changes(), torch_states(), strict=True):
        moves.append(step.move(change, momentum))
        momentum = step.follow(moves[-1], momentum)
        state = state + moves[-1]
        np.testing.assert_allclose(state, wanted, atol=1e-5)
    np.testing.assert_allclose(step.replay(moves, COUNT), momentum, atol=1e-5)


def test_the_average_is_taken_as_it_is() -> None:
    change = changes()[0]
    assert OuterStep(OuterConfig()).move(change, np.zeros(0, np.float32)) is change


@pytest.mark.parametrize("fresh_from", [None, 3])
def test_a_reducer_that_takes_over_has_the_momentum_from_the_packets(fresh_from: int | None) -> None:
    """From round `fresh_from` on another workshop reduces, which has only seen packets."""
    blobs = MemoryBlobs()
    zero = np.zeros(COUNT, np.float32)
    shops = [Workshop(RUN, {UNIT: COUNT}, settings(), blobs, outer=NESTEROV) for _ in range(2)]
    head = Head(0, state_hash(zero), 0)
    entries: list[Entry] = []
    for shop in shops:
        shop.restore(UNIT, head, zero)
    for index, (change, wanted) in enumerate(zip(changes(), torch_states(), strict=True)):
        shop = shops[fresh_from is not None and index >= fresh_from]
        blob = shop.encode(Encode(index + 1, digest("r"), UNIT, head), shop.agreed[UNIT] + change)
        assert blob is not None
        reduce = Reduce(index + 1, digest("r"), UNIT, head, (Contributor("me", 1, blob),), recent=tuple(entries))
        entry = shop.reduce(reduce).entry
        assert entry is not None
        for each in shops:
            each.commit(Commit(entry, (), anchor=False))
        np.testing.assert_allclose(shop.agreed[UNIT], wanted, atol=1e-4)
        entries.append(entry)
        head = entry.after


class Refreshed:
    """Six rounds of one unit, whose fourth packet is a refresh from the state after the first."""

    def __init__(self) -> None:
        self.blobs, zero = MemoryBlobs(), np.zeros(COUNT, np.float32)
        self.shop = self.workshop()
        self.heads, self.entries = [Head(0, state_hash(zero), 0)], list[Entry]()
        self.shop.restore(UNIT, self.heads[0], zero)

    def workshop(self) -> Workshop:
        return Workshop(RUN, {UNIT: COUNT}, settings(), self.blobs, outer=NESTEROV)

    def reduce(self, shop: Workshop, recent: tuple[Entry, ...]) -> Entry:
        """The next round's packet, made by `shop`, which is at the newest state."""
        number, head = len(self.heads), self.heads[-1]
        blob = self.shop.encode(Encode(number, digest("r"), UNIT, head), self.shop.agreed[UNIT] + changes()[number - 1])
        assert blob is not None
        start = self.heads[1] if number == 4 else None
        entry = shop.reduce(Reduce(number, digest("r"), UNIT, head, (Contributor("me", 1, blob),), start, recent)).entry
        assert entry is not None
        assert entry.base == start
        return entry

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            entry = self.reduce(self.shop, tuple(self.entries))
            self.shop.commit(Commit(entry, (), anchor=True))
            self.entries.append(entry)
            self.heads.append(entry.after)


def test_a_restarted_reducer_finds_the_moves_inside_a_refresh() -> None:
    world = Refreshed()
    world.run(5)
    fresh = world.workshop()
    fresh.restore(UNIT, world.heads[5], world.shop.agreed[UNIT])
    fresh.commit(Commit(world.reduce(fresh, tuple(world.entries)), (), anchor=False))
    np.testing.assert_allclose(fresh.agreed[UNIT], torch_states()[5], atol=1e-4)


def test_who_jumps_over_rounds_does_not_take_them_for_one() -> None:
    world = Refreshed()
    world.run(1)
    lazy = world.workshop()
    lazy.restore(UNIT, world.heads[1], world.shop.agreed[UNIT])
    world.reduce(lazy, tuple(world.entries))  # now it has momentum
    world.run(3)
    lazy.commit(Commit(world.entries[3], (), anchor=False))
    before = lazy.agreed[UNIT].copy()
    lazy.commit(Commit(world.reduce(lazy, ()), (), anchor=False))
    without = OuterStep(NESTEROV).move(changes()[4], np.zeros(COUNT, np.float32))
    np.testing.assert_allclose(lazy.agreed[UNIT] - before, without, atol=1e-5)


def owned(world: World) -> dict[str, frozenset[str]]:
    """The experts of each live peer."""
    return {node.name: node.peer.context.owned for node in world.alive}


def test_a_swarm_with_momentum_agrees_through_a_death_and_new_owners_and_keeps_all_work() -> None:
    world = World(SIZES, SETTINGS, Conditions(), 3, outer=NESTEROV.model_copy(update={"learning_rate": 0.3}))
    world.found("peer0", 2)
    for index in range(1, 5):
        world.join(f"peer{index}", 2)
    world.run(50)
    before = owned(world)
    world.kill("peer1")  # the others have room for the eight experts, and none to spare
    world.run(40)
    taken_over = {unit for name, units in owned(world).items() for unit in units - before[name]}
    assert taken_over & before["peer1"], "no expert changed hands"
    world.restart("peer1")
    world.run(30)
    assert_invariant(world)
    settle(world)
    assert agree(world)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]
