"""Coarse codecs: what encoding loses comes with a later packet, and replicas stay equal whatever is lost."""

from __future__ import annotations

import numpy as np
import pytest
from sync_harness import digest, settings
from test_simulation import SETTINGS, SIZES, agree, assert_invariant, settle

from spesd.config.manifest import MergeConfig, SyncConfig
from spesd.sync import packet
from spesd.sync.codec import Values
from spesd.sync.codecs import codecs_of
from spesd.sync.effects import Adopt, Commit, Encode, Reduce
from spesd.sync.feedback import Feedback
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.merge import Merging
from spesd.sync.simulation import RUN, Conditions, World
from spesd.sync.toys import MemoryBlobs
from spesd.sync.workshop import Workshop, state_hash

COUNT, UNIT = 1000, "expert-0"
LOSSY = ["fp16", "int8", "int4", "topk"]


class Owners:
    """Owners of one unit on one desk: each keeps its own parameters, the first reduces."""

    def __init__(self, config: SyncConfig, count: int, merging: Merging | None = None) -> None:
        self.blobs = MemoryBlobs()
        self.shop = Workshop(RUN, {UNIT: COUNT}, config, self.blobs, merging)
        zero = np.zeros(COUNT, np.float32)
        self.head = Head(0, state_hash(zero), 0)
        self.shop.restore(UNIT, self.head, zero)
        self.thetas = [zero.copy() for _ in range(count)]
        self.accepted = np.zeros(COUNT)

    def round(self, moves: list[Values]) -> Entry:
        """Everybody moves and contributes; the packet is made and committed."""
        number, names = self.head.version + 1, []
        for index, move in enumerate(moves):
            self.thetas[index] += move
            blob = self.shop.encode(Encode(number, digest("r"), UNIT, self.head), self.thetas[index])
            assert blob is not None
            names.append(Contributor(f"peer{index}", 10, blob))
        decoded = [self.shop.contribution(UNIT, name.blob) for name in names]
        self.accepted += np.mean(decoded, axis=0, dtype=np.float64)
        entry = self.shop.reduce(Reduce(number, digest("r"), UNIT, self.head, tuple(names))).entry
        assert entry is not None
        change = self.shop.commit(Commit(entry, (), anchor=False))
        self.thetas = [theta + change - mine for theta, mine in zip(self.thetas, decoded, strict=True)]
        self.head = entry.after
        return entry


@pytest.mark.parametrize("codec", LOSSY)
def test_the_sum_of_packets_follows_the_sum_of_what_was_accepted(codec: str) -> None:
    """Without the reducer's feedback the gap would grow with every round."""
    random = np.random.default_rng(0)
    owners = Owners(settings(codec=codec, max_delta_rms=10.0), 3)
    drift = random.standard_normal(COUNT).astype(np.float32)
    gaps = []
    for _ in range(60):
        owners.round([0.01 * (drift + random.standard_normal(COUNT).astype(np.float32)) for _ in range(3)])
        gaps.append(np.abs(owners.accepted - owners.shop.agreed[UNIT]).max())
    assert max(gaps[40:]) <= 1.5 * max(gaps[:40])
    assert np.abs(owners.accepted).max() > 3 * gaps[-1]
    # nothing is lost on the way from parameters to agreed state but what is still under way
    moved = np.mean(owners.thetas, axis=0)
    assert np.corrcoef(moved, drift)[0, 1] > 0.9


@pytest.mark.parametrize("codec", LOSSY)
def test_the_packet_of_a_single_contribution_equals_it(codec: str) -> None:
    random = np.random.default_rng(1)
    owners = Owners(settings(codec=codec), 1)
    for _ in range(3):
        before = owners.shop.agreed[UNIT].copy()
        accepted = owners.accepted.copy()
        owners.round([random.standard_normal(COUNT).astype(np.float32)])
        np.testing.assert_allclose(owners.shop.agreed[UNIT] - before, owners.accepted - accepted, atol=1e-6)


def test_a_state_from_elsewhere_ends_the_account_of_what_was_lost() -> None:
    owners = Owners(settings(codec="topk"), 2)
    noise = np.random.default_rng(2).standard_normal((2, COUNT)).astype(np.float32)
    owners.round(list(noise))
    other = np.ones(COUNT, np.float32)
    head = Head(5, state_hash(other), 500)
    owners.blobs.put(other.tobytes())
    owners.shop.adopt(Adopt(UNIT, head, (), ()))
    owners.head, owners.thetas, owners.accepted = head, [other.copy(), other.copy()], other.astype(np.float64)
    owners.round([np.zeros(COUNT, np.float32)] * 2)
    np.testing.assert_array_equal(owners.shop.agreed[UNIT], other)


def test_a_packet_that_was_not_committed_leaves_no_account() -> None:
    owners = Owners(settings(codec="topk"), 2)
    noise = np.random.default_rng(3).standard_normal((2, COUNT)).astype(np.float32)
    names = []
    for index in range(2):
        blob = owners.shop.encode(Encode(1, digest("r"), UNIT, owners.head), noise[index])
        assert blob is not None
        names.append(Contributor(f"peer{index}", 10, blob))
    owners.shop.reduce(Reduce(1, digest("r"), UNIT, owners.head, tuple(names)))  # and it never wins
    first = owners.shop.reduce(Reduce(2, digest("r"), UNIT, owners.head, tuple(names[:1])))
    assert first.entry is None, "made for another round"
    blob = owners.shop.encode(Encode(2, digest("r"), UNIT, owners.head), np.zeros(COUNT, np.float32))
    assert blob is not None
    entry = owners.shop.reduce(Reduce(2, digest("r"), UNIT, owners.head, (Contributor("peer0", 10, blob),))).entry
    assert entry is not None
    assert entry.after.hash == owners.head.hash


def test_what_an_exact_packet_has_brought_is_not_brought_again() -> None:
    """A merging round's dense fp32 packet brings what the sparse one before it lost, and loses nothing itself."""
    config = settings(codec="topk", dense_codec="fp32", max_delta_rms=10.0)
    owners = Owners(config, 2, Merging(MergeConfig(interval=2, alpha=0.1), [UNIT], layers=1))
    noise = np.random.default_rng(4).standard_normal((2, COUNT)).astype(np.float32)
    owners.round(list(noise))
    assert np.abs(owners.accepted - owners.shop.agreed[UNIT]).max() > 0.1, "the sparse packet lost something"
    still = [np.zeros(COUNT, np.float32)] * 2
    for _ in range(3):
        owners.round(still)
        if owners.head.version % 2 == 0:
            np.testing.assert_allclose(owners.shop.agreed[UNIT], owners.accepted, atol=1e-6)


def test_debts_are_bounded_in_time_and_those_of_untaken_packets_do_not_count() -> None:
    feedback, lost = Feedback(stale_rounds=3), np.ones(4, np.float32)
    feedback.made("expert-0", 1, "mine", lost)
    assert feedback.owed("expert-0", 2) is None, "not committed yet"
    feedback.committed("expert-0", 1, "mine")
    assert feedback.owed("expert-0", 4) is lost
    assert feedback.owed("expert-0", 5) is None, "too old for that round"
    feedback.made("expert-0", 2, "mine", 2 * lost)
    feedback.committed("expert-0", 2, "another's")
    assert feedback.owed("expert-0", 3) is lost
    feedback.committed("expert-0", 4, "another's")
    assert feedback.owed("expert-0", 3) is None, "dropped, not only passed over"
    feedback.made("expert-0", 5, "mine", lost)
    feedback.committed("expert-0", 5, "mine")
    feedback.made("expert-0", 6, "mine", np.zeros(4, np.float32))
    feedback.committed("expert-0", 6, "mine")
    assert feedback.owed("expert-0", 7) is None, "the second packet has brought it"
    feedback.made("expert-0", 7, "mine", lost)
    feedback.forget("expert-0")
    feedback.committed("expert-0", 7, "mine")
    assert feedback.owed("expert-0", 8) is None


# Whole swarms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_a_swarm_stays_in_agreement_with_every_codec(codec: str, refresh: int) -> None:
    config = SETTINGS.model_copy(update={"codec": codec, "refresh_every": refresh})
    experts = [unit for unit in SIZES if unit.startswith("expert")]
    merging = Merging(MergeConfig(interval=2, alpha=0.1, top_k=2), experts, layers=2)
    world = World(SIZES, config, Conditions(), 0, merging=merging)
    world.found("peer0", 3)
    for index in range(1, 4):
        world.join(f"peer{index}", 3)
    world.run(60)
    world.kill("peer2")
    world.run(20)
    world.restart("peer2")
    world.run(40)
    assert_invariant(world)
    settle(world)
    if refresh == 1:
        assert agree(world)
    assert not [strike for node in world.nodes.values() for strike in node.strikes]
    assert max(node.peer.context.newest_round for node in world.alive) >= 15


def test_merging_moves_are_written_densely_and_any_other_codec_is_refused() -> None:
    config = settings(codec="topk", dense_codec="int4", max_delta_rms=10.0)
    sizes, blobs = {"shared-0": 64, "expert-0": 96, "expert-1": 96}, MemoryBlobs()
    merging = Merging(MergeConfig(interval=2, alpha=0.5, top_k=1), ["expert-0", "expert-1"], layers=2)
    shop = Workshop(RUN, sizes, config, blobs, merging)
    random, heads = np.random.default_rng(0), {}
    for unit, size in sizes.items():
        values = random.standard_normal(size).astype(np.float32)
        heads[unit] = Head(0, state_hash(values), 0)
        shop.restore(unit, heads[unit], values)
    made = {}
    for number in (1, 2):
        blob = shop.encode(Encode(number, digest("r"), "expert-0", heads["expert-0"]), shop.agreed["expert-0"])
        assert blob is not None
        contributors = (Contributor("me", 1, blob),)
        made[number] = shop.reduce(Reduce(number, digest("r"), "expert-0", heads["expert-0"], contributors)).entry
    codecs = codecs_of(config)
    assert made[1] is not None and made[2] is not None
    assert made[1].size < made[2].size
    data = blobs.get(made[2].packet)
    packet.read(data, kind=packet.Kind.PACKET, run=RUN, unit=1, count=96, codec=codecs.dense)
    with pytest.raises(packet.Malformed, match="codec"):
        packet.read(data, kind=packet.Kind.PACKET, run=RUN, unit=1, count=96, codec=codecs.usual)
    before = shop.agreed["expert-0"].copy()
    shop.commit(Commit(made[2], (), anchor=False))
    assert np.abs(shop.agreed["expert-0"] - before).mean() > 0.1, "the move of all values has arrived"
