"""Which blocks are drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spesd.data.sampler import Sampler, held_out_blocks
from spesd.data.shards import DataError

SHARDS = [
    np.arange(0, 500, dtype=np.uint16),
    np.arange(1000, 1005, dtype=np.uint16),
    np.arange(2000, 2300, dtype=np.uint16),
]


def sampler(peer="peer", position=0, run="run"):
    return Sampler(SHARDS, run, peer, sequence_length=16, position=position)


@given(position=st.integers(0, 2**40), before=st.integers(1, 9))
def test_a_position_always_yields_the_same_block(position, before):
    """However the batches before it were cut."""
    straight = sampler(position=position)
    blocks = straight.batch(10)
    assert straight.position == position + 10
    parts = sampler(position=position)
    again = np.concatenate([parts.batch(before), parts.batch(10 - before)]) if before < 10 else parts.batch(10)
    assert np.array_equal(blocks, again)
    assert np.array_equal(sampler(position=position + 9).batch(1)[0], blocks[9])


def test_blocks_lie_within_one_shard_and_cover_all():
    blocks = sampler().batch(20000)
    assert blocks.shape == (20000, 17)
    assert blocks.dtype == np.int64
    assert (np.diff(blocks, axis=1) == 1).all()
    assert set(blocks[:, 0]) == {*range(484), *range(2000, 2284)}


def test_peers_and_runs_draw_different_blocks():
    starts = [s.batch(200)[:, 0] for s in (sampler(), sampler("other"), sampler(run="other"))]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (starts[i] == starts[j]).mean() < 0.05


def test_held_out_blocks_are_evenly_spaced():
    blocks = held_out_blocks(SHARDS, 4, 16)
    assert blocks[:, 0].tolist() == [0, 192, 384, 2092]
    assert (np.diff(blocks, axis=1) == 1).all()
    assert len(held_out_blocks([np.arange(20)], 100, 16)) == 4


def test_shards_without_one_whole_sequence_are_refused():
    with pytest.raises(DataError, match=r"longest of 1 shard\(s\) has 16 tokens, a sequence needs 17"):
        Sampler([np.arange(16)], "run", "peer", 16)
    with pytest.raises(DataError, match="0 shard"):
        held_out_blocks([], 1, 16)
