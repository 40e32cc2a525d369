"""The account of traffic: booked once, by day, and over the daemon's lives."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from spesd.api.schema import Limits
from spesd.daemon.traffic_book import TrafficBook
from spesd.swarm.traffic import Traffic

DAY, NEXT, NEXT_MONTH = date(2027, 5, 30), date(2027, 5, 31), date(2027, 6, 1)


def test_bytes_are_booked_once_on_their_day_and_kept_over_lives(tmp_path: Path) -> None:
    path, traffic = tmp_path / "traffic.json", Traffic()
    book = TrafficBook(path, traffic)
    traffic.total.add(100, 10)
    assert book.status(Limits(), DAY).today.up_bytes == book.status(Limits(), DAY).today.up_bytes == 100
    traffic.total.add(5, 1)
    book.book(NEXT)
    book.save()
    again = TrafficBook(path, Traffic()).status(Limits(up_mbit=4), NEXT)
    assert (again.up_bytes, again.today.up_bytes, again.month.up_bytes, again.month.down_bytes) == (0, 5, 105, 11)
    assert again.limits.up_mbit == 4
    assert TrafficBook(path, Traffic()).status(Limits(), NEXT_MONTH).month.up_bytes == 0


def test_a_damaged_account_and_a_full_disk_stop_nobody(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text("{")
    traffic = Traffic()
    book = TrafficBook(tmp_path / "traffic.json", traffic)
    traffic.total.add(1, 1)
    assert book.status(Limits(), DAY).month.up_bytes == 1
    nowhere = TrafficBook(tmp_path / "no such folder" / "traffic.json", traffic)
    nowhere.save()
    assert nowhere.status(Limits(), DAY).up_bytes == 1
