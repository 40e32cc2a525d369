"""Caps: what may pass in a window, in which order, and what a change of the cap does. The clock is the test's."""

from __future__ import annotations

import asyncio
from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spesd.swarm.gate import Gate
from spesd.swarm.rate import BURST_BYTES, BYTES_PER_MBIT, LATER_COST, FairQueue, Limiter, TokenBucket
from spesd.swarm.traffic import KEPT_DAYS, Traffic, TrafficLog
from spesd.swarm.wire import FRAME_BYTES, read_payload

RATES = st.floats(1e3, 1e9)


@given(RATES, st.lists(st.tuples(st.floats(0, 5), st.integers(1, BURST_BYTES)), max_size=60))
def test_no_window_sees_more_than_rate_and_burst_allow(rate: float, wishes: list[tuple[float, int]]) -> None:
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, [(0.0, 0)]
    for pause, size in wishes:
        now += pause
        if bucket.take(size, now):
            taken.append((now, size))
    for begin, (start, _) in enumerate(taken):
        total = 0
        for end, size in taken[begin:]:
            total += size
            assert total <= (rate * (end - start) + BURST_BYTES) * (1 + 1e-9)


@given(RATES, st.lists(st.integers(1, BURST_BYTES), min_size=1, max_size=30))
def test_who_waits_as_long_as_told_may_pass(rate: float, sizes: list[int]) -> None:
    bucket, now = TokenBucket(rate, 0.0), 0.0
    for size in sizes:
        now += bucket.seconds_until(size, now) * (1 + 1e-9) + 1e-9
        assert bucket.take(size, now)
    assert sum(sizes) >= rate * now * 0.99 - 1e-6 * len(sizes) * rate  # and nothing of the rate is lost by waiting


def test_a_cap_of_4_mbit_holds_for_a_minute_also_when_it_was_another_one() -> None:
    rate, now, sent = 4 * BYTES_PER_MBIT, 0.0, 0
    bucket = TokenBucket(100 * rate, now)
    bucket.change(rate, now)
    while now < 60:
        pause = bucket.seconds_until(FRAME_BYTES, now)
        now += pause + 1e-6
        sent += FRAME_BYTES * bucket.take(FRAME_BYTES, now)
    assert sent == pytest.approx(60 * rate, rel=0.01)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=50))
def test_transfers_get_equal_shares_and_keep_their_order(rows: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, (transfer, size) in enumerate(rows):
        queue.push(transfer, size, 1, (transfer, number))
    left = {name: sum(1 for transfer, _ in rows if transfer == name) for name in "abc"}
    passed = dict.fromkeys("abc", 0)
    order: dict[str, list[int]] = {name: [] for name in "abc"}
    while queue:
        size, _ = queue.first()
        transfer, number = queue.pop()
        left[transfer] -= 1
        passed[transfer] += size
        order[transfer].append(number)
        busy = [passed[name] for name in "abc" if left[name]]
        assert max(busy, default=0) - min(busy, default=0) <= 2 * 100
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_urgent_bytes_get_the_larger_share_and_others_are_not_starved() -> None:
    queue: FairQueue[bool] = FairQueue()
    for _ in range(900):
        queue.push("urgent", 10, 1, True)
        queue.push("later", 10, LATER_COST, False)
    first = [queue.pop() for _ in range(9 * LATER_COST)]
    assert first.count(True) == LATER_COST * first.count(False)


async def test_a_cap_can_be_set_changed_and_lifted_while_others_wait() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    await limiter.wait(1 << 30, "a", True)  # no cap
    limiter.limit(1.0)
    await limiter.wait(BURST_BYTES, "a", True)  # the bucket begins full
    waiting = [asyncio.create_task(limiter.wait(FRAME_BYTES, name, True)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    now[0] += FRAME_BYTES
    limiter.limit(0.5)  # what was earned at the old rate is kept
    await waiting[1]
    assert not waiting[2].done() and limiter.rate == 0.5
    limiter.limit(None)
    await waiting[2]
    assert limiter.rate is None and limiter.backlog_seconds() == 0.0
    with pytest.raises(ValueError, match="would stop all traffic"):
        limiter.limit(0.0)


async def test_what_is_promised_under_a_cap_is_the_backlog() -> None:
    limiter = Limiter(lambda: 0.0)
    limiter.limit(100.0)
    with limiter.promise(1000):
        assert limiter.backlog_seconds() == 10.0
    assert limiter.backlog_seconds() == 0.0


async def test_a_capped_reader_takes_no_byte_before_it_may_and_counts_those_that_came() -> None:
    now = [0.0]
    traffic = Traffic(down_limit=Limiter(lambda: now[0]))
    traffic.down_limit.limit(1.0)
    reader = asyncio.StreamReader()
    reader.feed_data(bytes(3 * FRAME_BYTES))
    reading = asyncio.create_task(read_payload(reader, 3 * FRAME_BYTES, 10.0, traffic.down("peer", "p", True)))
    for frames in (1, 2, 3):
        while traffic.total.down < frames * FRAME_BYTES:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert traffic.total.down == frames * FRAME_BYTES
        now[0] += FRAME_BYTES
        traffic.down_limit.limit(1.0)  # looks at the clock again
    assert await reading == bytes(3 * FRAME_BYTES) and traffic.peers["peer"].down == 3 * FRAME_BYTES


async def test_the_gate_is_bounded_in_all_and_per_source_and_urgent_goes_first() -> None:
    gate, leave = Gate(lambda: 3, per_source=2), asyncio.Event()
    entered: list[tuple[str, bool]] = []
    inside: list[str] = []

    async def work(source: str, urgent: bool) -> None:
        async with gate.slot(source, urgent):
            entered.append((source, urgent))
            inside.append(source)
            assert len(inside) <= 3 and inside.count(source) <= 2
            try:
                await leave.wait()
            finally:
                inside.remove(source)

    tasks = [asyncio.create_task(work(source, False)) for source in "aaabb"]
    await asyncio.sleep(0)
    assert entered == [("a", False), ("a", False), ("b", False)]
    tasks.append(asyncio.create_task(work("c", True)))
    await asyncio.sleep(0)
    tasks[4].cancel()  # one that waits
    tasks[0].cancel()  # one that is inside
    await asyncio.gather(tasks[0], tasks[4], return_exceptions=True)
    await asyncio.sleep(0)
    assert entered[3:] == [("c", True)]
    leave.set()
    await asyncio.gather(*tasks[1:4], tasks[5])
    assert entered[4:] == [("a", False)] and not inside


def test_days_add_up_to_months_come_back_from_disk_and_are_forgotten_in_the_end() -> None:
    log, day = TrafficLog(), date(2027, 1, 31)
    for other in (day - timedelta(1), day, day, day + timedelta(1)):
        log.add(other, 10, 1)
    log = TrafficLog.model_validate_json(log.model_dump_json())
    assert (log.day(day).up, log.day(day).down) == (20, 2)
    assert log.month(day).up == 30 and log.month(day + timedelta(1)).up == 10
    assert log.day(date(2020, 1, 1)).up == 0
    for later in range(KEPT_DAYS + 5):
        log.add(day + timedelta(later), 1, 1)
    assert len(log.days) == KEPT_DAYS and day not in log.days
