"""Figures of the WAN bench: one row for each method, a table for people, an object for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from rich.table import Table

from bench.wan.arithmetic import Volume
from bench.wan.rig import Counters
from spesd.cli.console import amount

MOST_STALL, LEAST_PACE, MOST_LIMIT_RATIO = 0.02, 0.95, 1.35
"""What a round of spesd should keep to."""

LEAST_GAIN = {"fp16": (0.0, 0.0), "int8": (2.9, 3.5), "int4": (5.5, 7.0), "topk": (18.0, 15.0)}
"""How many times fewer bytes, and how many times less time, than the baseline a codec should take."""


class PeerFigures(NamedTuple):
    """One peer over all measured rounds."""

    device: Counters
    """Through its network device."""
    counted: Counters
    """By the program's own count."""
    stalled: float
    """Seconds in which training stood still for rounds."""
    pace: float
    """Training speed over that of a trainer that is left alone."""


class Measurement(NamedTuple):
    """What was seen of one method. `seconds` has the length of each round, from first contribution to last commit."""

    volume: Volume
    limit: float
    window: float
    seconds: Sequence[float]
    peers: Sequence[PeerFigures]


class Figures(NamedTuple):
    """Keys of the JSON object: means per peer and round, bytes by the device's count. Stable; see `bench/README.md`."""

    bytes_up: float
    bytes_down: float
    round_seconds: float
    stall_share: float
    limit_ratio: float


def figures(measured: Measurement) -> Figures:
    """Means over peers and rounds."""
    rounds, seconds = len(measured.seconds), mean(measured.seconds)
    return Figures(
        bytes_up=mean(peer.device.up for peer in measured.peers) / rounds,
        bytes_down=mean(peer.device.down for peer in measured.peers) / rounds,
        round_seconds=seconds,
        stall_share=mean(peer.stalled for peer in measured.peers) / measured.window,
        limit_ratio=seconds / measured.limit,
    )


def table(results: Mapping[str, Measurement], title: str) -> Table:
    """For people. Bytes are per peer and round: reckoned, by the program's count, through the device."""
    result = Table(title=title)
    for column in ("method", "up", "counted", "device", "down", "counted", "device", "round s", "limit s", "ratio"):
        result.add_column(column, justify="left" if column == "method" else "right")
    for column in ("stalled", "pace"):
        result.add_column(column, justify="right")
    for name, measured in results.items():
        row, rounds = figures(measured), len(measured.seconds)
        counted_up = mean(peer.counted.up for peer in measured.peers) / rounds
        counted_down = mean(peer.counted.down for peer in measured.peers) / rounds
        volumes = (measured.volume.up, counted_up, row.bytes_up, measured.volume.down, counted_down, row.bytes_down)
        times = (row.round_seconds, measured.limit, row.limit_ratio)
        pace = mean(peer.pace for peer in measured.peers)
        result.add_row(
            name,
            *(amount(volume) for volume in volumes),
            *(f"{value:.2f}" for value in times),
            f"{row.stall_share:.2%}",
            f"{pace:.1%}",
        )
    return result


def misses(results: Mapping[str, Measurement]) -> list[str]:
    """What is not as good as it should be, in words."""
    found = []
    rows = {name: figures(measured) for name, measured in results.items()}
    baseline = rows.get("baseline")
    for name, row in rows.items():
        if name == "baseline":
            continue
        if row.stall_share >= MOST_STALL:
            found.append(f"{name}: training stands still for {row.stall_share:.1%} of the time")
        if (pace := mean(peer.pace for peer in results[name].peers)) < LEAST_PACE:
            found.append(f"{name}: the trainers keep {pace:.1%} of their pace")
        if row.limit_ratio > MOST_LIMIT_RATIO:
            found.append(f"{name}: a round takes {row.limit_ratio:.2f} times the link's limit")
        if baseline is not None:
            found += _gain_misses(name, row, baseline)
    return found


def _gain_misses(name: str, row: Figures, baseline: Figures) -> list[str]:
    fewer, faster = LEAST_GAIN.get(name, (0.0, 0.0))
    both = baseline.bytes_up + baseline.bytes_down
    found = []
    if (gain := both / (row.bytes_up + row.bytes_down)) < fewer:
        found.append(f"{name}: {gain:.1f} times fewer bytes than the baseline, {fewer} wanted")
    if (gain := baseline.round_seconds / row.round_seconds) < faster:
        found.append(f"{name}: {gain:.1f} times less time than the baseline, {faster} wanted")
    return found
