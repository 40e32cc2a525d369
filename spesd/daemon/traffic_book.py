"""The daemon's account of its traffic: bytes per day, kept on disk over all its lives."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path

import structlog

from spesd.api.schema import Limits, Transferred
from spesd.api.schema import Traffic as TrafficStatus
from spesd.daemon.state_dir import write_atomically
from spesd.swarm.traffic import Count, DayCount, Traffic, TrafficLog

log = structlog.get_logger(__name__)

SAVE_SECONDS = 60.0
"""A killed daemon forgets the traffic of at most so long."""


class TrafficBook:
    """Reads the running totals of `traffic` now and then, and books what has been added to the day."""

    def __init__(self, path: Path, traffic: Traffic) -> None:
        self._path = path
        self._traffic = traffic
        self._booked = Count()
        self._log = _load(path)

    def status(self, limits: Limits, today: date) -> TrafficStatus:
        """What the local API shows."""
        self.book(today)
        return TrafficStatus(
            up_bytes=self._booked.up,
            down_bytes=self._booked.down,
            today=_transferred(self._log.day(today)),
            month=_transferred(self._log.month(today)),
            limits=limits,
        )

    def book(self, today: date) -> None:
        """Book what has passed since the last time."""
        total = self._traffic.total
        self._log.add(today, total.up - self._booked.up, total.down - self._booked.down)
        self._booked = Count(total.up, total.down)

    def save(self) -> None:
        """Book and write. A full disk costs the account, not the daemon."""
        self._write(self._booked_json())

    async def keep(self) -> None:
        """Save again and again, and at the end, when cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_SECONDS)
                await asyncio.to_thread(self._write, self._booked_json())
        finally:
            self.save()

    def _booked_json(self) -> bytes:
        self.book(date.today())
        return self._log.model_dump_json().encode()

    def _write(self, data: bytes) -> None:
        try:
            write_atomically(self._path, data)
        except OSError as error:
            log.warning("account of traffic not written", path=str(self._path), reason=str(error))


def _load(path: Path) -> TrafficLog:
    try:
        return TrafficLog.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return TrafficLog()
    except (OSError, ValueError) as error:
        log.warning("account of traffic is damaged, beginning a new one", path=str(path), reason=str(error)[:200])
        return TrafficLog()


def _transferred(count: DayCount) -> Transferred:
    return Transferred(up_bytes=count.up, down_bytes=count.down)
