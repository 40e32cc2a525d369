"""Bytes through our own streams: caps, totals for the peers met last, and totals per day that outlive the process."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import date

from pydantic import BaseModel, ConfigDict, Field

from spesd.swarm.kept_streams import RECEIPT_BYTES
from spesd.swarm.rate import Limiter
from spesd.swarm.window import Windows

MAX_PEERS = 1024
"""Peer ids cost nothing to make, so the table of peers is bounded; the totals count everybody."""

KEPT_DAYS = 400


@dataclass
class Count:
    """Bytes sent (`up`) and received (`down`)."""

    up: int = 0
    down: int = 0

    def add(self, up: int, down: int) -> None:
        self.up += up
        self.down += down


WINDOW_SECONDS = 10.0


@dataclass
class Recent:
    """Bytes of this span of ten seconds and of the one before."""

    began: float
    now: Count = field(default_factory=Count)
    before: Count = field(default_factory=Count)

    def add(self, at: float, up: int, down: int) -> None:
        self._turn(at)
        self.now.add(up, down)

    def per_second(self, at: float) -> tuple[float, float]:
        """Bytes a second sent and received, over the last ten to twenty seconds."""
        self._turn(at)
        seconds = WINDOW_SECONDS + at - self.began
        return (self.before.up + self.now.up) / seconds, (self.before.down + self.now.down) / seconds

    def _turn(self, at: float) -> None:
        spans = int((at - self.began) / WINDOW_SECONDS)
        if spans:
            self.before, self.now = self.now if spans == 1 else Count(), Count()
            self.began += spans * WINDOW_SECONDS


@dataclass
class StreamMeter:
    """The meter of one direction of one stream. Time that it waits for our own cap is added to `deadline`, if set."""

    limiter: Limiter
    peer: str
    protocol: str
    urgent: bool
    count: Callable[[int], None]
    deadline: asyncio.Timeout | None = None

    async def wait(self, size: int) -> None:
        if self.limiter.rate is None:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.limiter.wait(size, (self.peer, self.protocol, self.urgent), self.urgent)
        if self.deadline is not None and (until := self.deadline.when()) is not None:
            self.deadline.reschedule(until + loop.time() - began)


@dataclass
class Traffic:
    """Running totals since the start of the process, and the caps."""

    total: Count = field(default_factory=Count)
    peers: OrderedDict[str, Count] = field(default_factory=OrderedDict)
    recent: dict[str, Recent] = field(default_factory=dict)
    windows: Windows = field(default_factory=lambda: Windows(time.monotonic))
    heard: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)
    """When the last byte of a protocol came from a peer, by `clock`."""
    clock: Callable[[], float] = time.monotonic
    up_limit: Limiter = field(default_factory=lambda: Limiter(time.monotonic))
    down_limit: Limiter = field(default_factory=lambda: Limiter(time.monotonic))

    def up(self, peer: str, protocol: str, urgent: bool) -> StreamMeter:
        """The meter for bytes to `peer`. Streams of one peer, protocol and urgency share one turn."""
        return StreamMeter(self.up_limit, peer, protocol, urgent, lambda size: self._add(peer, size, 0))

    def down(self, peer: str, protocol: str, urgent: bool) -> StreamMeter:
        """The meter for bytes from `peer`."""
        return StreamMeter(self.down_limit, peer, protocol, urgent, lambda size: self._received(peer, protocol, size))

    def _received(self, peer: str, protocol: str, size: int) -> None:
        self._add(peer, 0, size)
        self.heard[peer, protocol] = self.clock()
        self.heard.move_to_end((peer, protocol))
        if len(self.heard) > MAX_PEERS:
            self.heard.popitem(last=False)

    def _add(self, peer: str, up: int, down: int) -> None:
        self.total.add(up, down)
        self.peers.setdefault(peer, Count()).add(up, down)
        self.peers.move_to_end(peer)
        now = self.clock()
        self.recent.setdefault(peer, Recent(now)).add(now, up, down)
        if len(self.peers) > MAX_PEERS:
            oldest, _ = self.peers.popitem(last=False)
            del self.recent[oldest]

    @asynccontextmanager
    async def sending(self, peer: str, size: int, urgent: bool) -> AsyncIterator[None]:
        """Wait until `size` payload bytes may go to `peer`. The block ends when they have come.

        Few bytes need not wait, and do not count.
        """
        if size > RECEIPT_BYTES:
            async with self.windows.turn(peer, size, urgent):
                yield
        else:
            yield

    def heard_since(self, peer: str, moment: float) -> bool:
        """Whether a byte of any protocol has come from `peer` since that moment of `clock`."""
        return any(at >= moment for (sender, _), at in self.heard.items() if sender == peer)

    def per_second(self, peer: str) -> tuple[float, float]:
        """Bytes a second that lately went to `peer` and came from it."""
        recent = self.recent.get(peer)
        return recent.per_second(self.clock()) if recent is not None else (0.0, 0.0)


class DayCount(BaseModel):
    """Bytes of one day."""

    model_config = ConfigDict(extra="forbid")

    up: int = Field(default=0, ge=0)
    down: int = Field(default=0, ge=0)


class TrafficLog(BaseModel):
    """Bytes per day, by the local calendar: the one by which providers count. It is kept as JSON."""

    model_config = ConfigDict(extra="forbid")

    days: dict[date, DayCount] = Field(default_factory=dict)

    def add(self, day: date, up: int, down: int) -> None:
        """Count bytes of `day`; days of long ago are forgotten."""
        kept = self.days.setdefault(day, DayCount())
        kept.up += up
        kept.down += down
        for old in sorted(self.days)[:-KEPT_DAYS]:
            del self.days[old]

    def day(self, day: date) -> DayCount:
        """Bytes of one day."""
        return self.days.get(day, DayCount())

    def month(self, day: date) -> DayCount:
        """Bytes of the calendar month in which `day` lies."""
        there = [count for other, count in self.days.items() if (other.year, other.month) == (day.year, day.month)]
        return DayCount(up=sum(count.up for count in there), down=sum(count.down for count in there))
