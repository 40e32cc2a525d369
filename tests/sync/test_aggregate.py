"""Aggregation: the authors' reference values, and what must never touch a weight."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file
from sync_harness import digest, settings

from spesd.sync import aggregate, packet
from spesd.sync.codec import Fp16, Fp32, Values
from spesd.sync.codec_blocks import Int4, Int8, TopK
from spesd.sync.effects import Adopt, Commit, Encode, Reduce
from spesd.sync.ledger import Contributor, Entry, Head
from spesd.sync.simulation import RUN
from spesd.sync.toys import MemoryBlobs
from spesd.sync.workshop import Rejected, Workshop, state_hash

VECTORS = Path(__file__).parent / "vectors"
ROSTER = digest("roster")
BAD = [np.nan, np.inf, -np.inf, 1e25]


def reference() -> tuple[dict[str, dict[str, Values]], dict[str, Values]]:
    """What each peer uploads, and what the authors' server makes of it."""
    peers: dict[str, dict[str, Values]] = {}
    for name, values in load_file(VECTORS / "peers.safetensors").items():
        peer, parameter = name.split("/")
        peers.setdefault(peer, {})[parameter] = values
    return peers, load_file(VECTORS / "aggregated.safetensors")


def test_plain_functions_give_the_reference_values() -> None:
    """Parameters under `expert_{w1|v1|w2}.{e}` have one owner and are copied; all others are a plain mean."""
    peers, expected = reference()
    for name, want in expected.items():
        owners = {peer: tensors[name].ravel() for peer, tensors in peers.items() if name in tensors}
        weights = aggregate.capped_weights(dict.fromkeys(owners, 1000), cap=2.0)
        got = aggregate.weighted_mean([(values, weights[peer]) for peer, values in owners.items()])
        if re.search(r"expert_(w1|v1|w2)\.\d+$", name):
            assert len(owners) == 1
            np.testing.assert_array_equal(got, want.ravel())
        else:
            assert len(owners) == 4
            np.testing.assert_allclose(got, want.ravel(), atol=1e-6, rtol=0)


def test_a_round_of_real_packets_gives_the_reference_values_on_every_peer() -> None:
    """From a common base of zeros: encode at each owner, reduce at one, commit the same packet everywhere."""
    peers, expected = reference()
    sizes = {name: values.size for name, values in expected.items()}
    shops = {peer: zero_workshop(sizes) for peer in peers}
    for name, want in expected.items():
        base = zero_head(sizes[name])
        contributions = []
        for peer, tensors in peers.items():
            if name in tensors:
                blob = shops[peer].encode(Encode(1, ROSTER, name, base), tensors[name].ravel())
                assert blob is not None
                contributions.append(Contributor(peer, 1000, blob))
        done = shops["peer0"].reduce(Reduce(1, ROSTER, name, base, tuple(contributions)))
        assert done.entry is not None and not done.refused
        for shop in shops.values():
            shop.commit(Commit(done.entry, (), anchor=False))
            exact = len(contributions) == 1
            np.testing.assert_allclose(shop.agreed[name], want.ravel(), atol=0 if exact else 1e-6, rtol=0)
            assert state_hash(shop.agreed[name]) == done.entry.after.hash


def zero_head(size: int) -> Head:
    return Head(0, state_hash(np.zeros(size, np.float32)), 0)


SHARED_BLOBS = MemoryBlobs()


def zero_workshop(sizes: dict[str, int], blobs: MemoryBlobs = SHARED_BLOBS, max_rms: float = 100.0) -> Workshop:
    shop = Workshop(RUN, sizes, settings(max_delta_rms=max_rms), blobs)
    for unit, size in sizes.items():
        shop.restore(unit, zero_head(size), np.zeros(size, np.float32))
    return shop


# Checks --------------------------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-10, 10, width=32)), st.data())
def test_one_bad_value_anywhere_is_refused(values: Values, data: st.DataObject) -> None:
    values[data.draw(st.integers(0, values.size - 1))] = data.draw(st.sampled_from(BAD))
    with pytest.raises(aggregate.Refused):
        aggregate.check(values, values.size, 10.0)


@given(st.integers(1, 30), st.integers(0, 30))
def test_another_shape_is_refused(count: int, other: int) -> None:
    values = np.zeros(other, np.float32)
    if other == count:
        aggregate.check(values, count, 1.0)
    else:
        with pytest.raises(aggregate.Refused, match="shape"):
            aggregate.check(values, count, 1.0)


def test_one_element_does_not_broadcast_and_another_dtype_is_refused() -> None:
    for values in (np.zeros(1, np.float32), np.zeros((4, 1), np.float32), np.zeros(4, np.float64)):
        with pytest.raises(aggregate.Refused):
            aggregate.check(values, 4, 1.0)  # type: ignore[arg-type]


@given(hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-1e6, 1e6, width=32)), st.floats(1e-3, 10))
def test_what_is_clipped_passes_the_gate_in_every_codec(values: Values, limit: float) -> None:
    clipped = aggregate.clip(values, limit)
    for codec in (Fp32(), Fp16(), Int8(16), Int4(16), TopK(0.05)):
        decoded = codec.decode(codec.encode(clipped), values.size)
        if aggregate.rms(values) > limit:
            aggregate.check(decoded, values.size, limit * codec.growth)
        else:
            np.testing.assert_array_equal(clipped, values)


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1 << 40), min_size=1, max_size=9), st.floats(1, 4)
)
def test_weights_are_positive_and_no_more_than_the_cap_allows(tokens: dict[str, int], cap: float) -> None:
    weights = aggregate.capped_weights(tokens, cap)
    median = sorted(tokens.values())[(len(tokens) - 1) // 2]
    assert weights.keys() == tokens.keys()
    for peer, weight in weights.items():
        assert 1 <= weight <= max(1, int(cap * median))
        assert weight <= max(1, tokens[peer])


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8), st.integers(0, 1 << 40))
def test_a_lying_minority_cannot_move_what_a_majority_weighs(honest: list[int], lie: int) -> None:
    tokens = {f"p{index}": count for index, count in enumerate(honest)} | {"liar": lie}
    weights = aggregate.capped_weights(tokens, 2.0)
    assert weights["liar"] <= 2 * max(honest)
    # of two contributors the larger claim is the one that is bounded
    assert aggregate.capped_weights({"a": 100, "liar": 1 << 40}, 2.0) == {"a": 100, "liar": 200}


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 9)), min_size=1, max_size=6))
def test_the_mean_lies_between_what_was_sent(rows: list[tuple[int, int]]) -> None:
    mean = aggregate.weighted_mean([(np.full(3, value, np.float32), weight) for value, weight in rows])
    exact = sum(value * weight for value, weight in rows) / sum(weight for _, weight in rows)
    np.testing.assert_allclose(mean, exact, atol=1e-3)


# In the workshop -----------------------------------------------------------------------------------------------------

SIZE = 4
UNIT = "expert-0"
BASE = zero_head(SIZE)


def raw(
    kind: packet.Kind, values: Values, *, after: str = packet.NO_HASH, names: tuple[Contributor, ...] = ()
) -> bytes:
    """Bytes as an attacker writes them, past every check of `encode` and `reduce`."""
    header = packet.Header(kind, RUN, 0, 0, 1, SIZE, ROSTER, BASE.hash, after, names)
    return packet.write(header, Fp32(), values.tobytes())


@pytest.mark.parametrize("value", BAD)
def test_a_poisoned_contribution_is_refused_and_named_and_the_others_count(value: float) -> None:
    blobs = MemoryBlobs()
    shop = zero_workshop({UNIT: SIZE}, blobs, max_rms=10)
    good = shop.encode(Encode(1, ROSTER, UNIT, BASE), np.ones(SIZE, np.float32))
    poison = blobs.put(raw(packet.Kind.CONTRIBUTION, np.array([0, value, 0, 0], np.float32)))
    rows = (Contributor("bad", 5, poison), Contributor("good", 5, str(good)), Contributor("gone", 5, digest("no")))
    done = shop.reduce(Reduce(1, ROSTER, UNIT, BASE, rows))
    assert done.refused.keys() == {"bad", "gone"}
    assert done.entry is not None
    shop.commit(Commit(done.entry, (), anchor=False))
    np.testing.assert_array_equal(shop.agreed[UNIT], np.ones(SIZE))


@pytest.mark.parametrize("value", [*BAD, 100.0])
def test_a_poisoned_packet_changes_nothing_whoever_made_it(value: float) -> None:
    blobs = MemoryBlobs()
    shop = zero_workshop({UNIT: SIZE}, blobs, max_rms=10)
    poison = np.array([0, value, 0, 0], np.float32)
    names = (Contributor("bad", 5, digest("b")),)
    data = raw(packet.Kind.PACKET, poison, after=state_hash(poison), names=names)
    entry = Entry(UNIT, BASE, Head(1, state_hash(poison), 5), blobs.put(data), len(data), names)
    with pytest.raises(Rejected, match=r"finite|max_delta_rms"):
        shop.commit(Commit(entry, (), anchor=True))
    assert shop.head(UNIT) == BASE
    assert not shop.agreed[UNIT].any()


def test_a_state_that_is_not_finite_is_not_adopted() -> None:
    blobs = MemoryBlobs()
    shop = zero_workshop({UNIT: SIZE}, blobs)
    poison = np.array([0, np.nan, 0, 0], np.float32)
    head = Head(9, blobs.put(poison.tobytes()), 1000)
    with pytest.raises(Rejected, match="not finite"):
        shop.adopt(Adopt(UNIT, head, (), ()))
    assert shop.head(UNIT) == BASE


def test_a_trainer_that_diverged_contributes_nothing() -> None:
    shop = zero_workshop({UNIT: SIZE})
    assert shop.encode(Encode(1, ROSTER, UNIT, BASE), np.full(SIZE, np.nan, np.float32)) is None


def test_a_packet_whose_result_has_another_hash_changes_nothing() -> None:
    blobs = MemoryBlobs()
    shop = zero_workshop({UNIT: SIZE}, blobs)
    names = (Contributor("bad", 5, digest("b")),)
    data = raw(packet.Kind.PACKET, np.ones(SIZE, np.float32), after=digest("lie"), names=names)
    entry = Entry(UNIT, BASE, Head(1, digest("lie"), 5), blobs.put(data), len(data), names)
    with pytest.raises(Rejected, match="hash"):
        shop.commit(Commit(entry, (), anchor=False))
    assert shop.head(UNIT) == BASE
