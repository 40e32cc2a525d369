"""Chunk lists and the plan of a download, without a network."""

from __future__ import annotations

import os

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spesd.swarm.chunks import (
    CHUNK_BYTES,
    HEDGE_FACTOR,
    HEDGE_SECONDS,
    ChunkList,
    ChunkPlan,
    bitmap,
    chunk_count,
    chunk_hash,
    read_bitmap,
)
from spesd.swarm.holders import Offer
from spesd.swarm.wire import WireError


def test_a_list_from_outside_must_fit_size_and_name() -> None:
    data = os.urandom(CHUNK_BYTES + 1)
    hashes = chunk_hash(data[:CHUNK_BYTES]) + chunk_hash(data[CHUNK_BYTES:])
    name = blake3(data).hexdigest()
    chunks = ChunkList.checked(len(data), hashes, name)
    assert chunks.count == 2 and [chunks.length(index) for index in range(2)] == [CHUNK_BYTES, 1]
    assert chunks.fits(1, data[CHUNK_BYTES:]) and not chunks.fits(0, data[CHUNK_BYTES:])
    with pytest.raises(WireError, match="64 bytes of chunk hashes"):
        ChunkList.checked(CHUNK_BYTES, hashes, name)
    with pytest.raises(WireError, match="another hash"):  # a single chunk is the blob
        ChunkList.checked(3, chunk_hash(b"abc"), name)


@given(st.integers(1, 100).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_bitmaps_come_back(case: tuple[int, set[int]]) -> None:
    count, present = case
    assert read_bitmap(bitmap(present, count), count) == present


@pytest.mark.parametrize(
    "body", [{}, {"size": "1"}, {"size": -1}, {"size": 11}, {"size": 5, "part": b""}, {"size": 5, "part": b"12"}]
)
def test_offers_of_a_strange_shape_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(WireError):
        Offer.parse(body, bytes(31), "00" * 32, range(11))


@given(st.data())
def test_whatever_the_sources_do_each_chunk_is_kept_once_and_none_is_forgotten(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    parts = {"whole": None, "part": data.draw(st.frozensets(st.integers(0, count - 1)))}
    plan = ChunkPlan(count, data.draw(st.integers(0, count - 1)), data.draw(st.sets(st.integers(0, count - 1))))
    kept: list[int] = sorted(plan.present)
    under_way: list[tuple[str, int]] = []
    now = 0.0
    for _ in range(200):
        if plan.complete:
            break
        now += 0.1
        source = data.draw(st.sampled_from(sorted(parts)))
        if (index := plan.ask(source, parts[source], now)) is not None:
            assert parts[source] is None or index in parts[source]
            assert (source, index) not in under_way and index not in kept
            under_way.append((source, index))
        if under_way and data.draw(st.booleans()):
            source, index = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            if data.draw(st.booleans()):
                plan.failed(source, index)
            elif plan.arrived(source, index, now):
                kept.append(index)
    while not plan.complete:
        now += 100.0
        for source, index in under_way:
            plan.failed(source, index)
        under_way.clear()
        index = plan.ask("whole", None, now)
        assert index is not None and plan.arrived("whole", index, now)
        kept.append(index)
    assert sorted(kept) == list(range(count)) and plan.present == set(range(count))


def test_a_plan_begins_where_it_is_told_and_goes_round() -> None:
    plan = ChunkPlan(4, 2, {3})
    assert [plan.ask("a", None, 0.0) for _ in range(4)] == [2, 0, 1, None]


def test_only_a_chunk_that_takes_much_longer_than_usual_is_asked_for_twice() -> None:
    plan = ChunkPlan(3, 0)
    assert [plan.ask("slow", None, 0.0) for _ in range(2)] == [0, 1]
    assert plan.ask("fast", None, 0.0) == 2
    assert plan.arrived("fast", 2, 1.0)
    late = max(HEDGE_SECONDS, HEDGE_FACTOR * 1.0)
    assert plan.ask("fast", None, late) is None
    assert plan.ask("fast", None, late + 0.1) == 0, "its source has delivered nothing"
    assert plan.ask("other", None, late + 0.2) == 1 and plan.ask("other", None, late + 0.3) is None
    assert plan.arrived("fast", 0, late + 1) and not plan.arrived("slow", 0, late + 2)
    plan.failed("other", 1)
    assert not plan.complete and plan.arrived("slow", 1, late + 3) and plan.complete


def test_a_source_that_delivers_is_slow_but_not_dead() -> None:
    late = HEDGE_SECONDS + 0.1
    plan = ChunkPlan(1, 0, heard={"slow": late - 0.5, "fast": 0.0}.__getitem__)
    assert plan.ask("slow", None, 0.0) == 0
    assert plan.ask("fast", None, late) is None
    assert plan.ask("fast", None, late + HEDGE_SECONDS) == 0


def test_a_partial_source_is_asked_only_for_what_it_has() -> None:
    plan = ChunkPlan(3, 0)
    assert plan.wants_from(frozenset({1})) and not plan.wants_from(frozenset())
    assert plan.ask("part", frozenset({1}), 0.0) == 1 and plan.ask("part", frozenset({1}), 0.0) is None
    assert chunk_count(0) == 1
