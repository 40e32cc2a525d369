"""What the demo has seen: pure bookkeeping over statuses, and the verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from spesd.api.headline import short
from spesd.api.schema import Status
from spesd.cli.console import amount, number

if TYPE_CHECKING:
    from rich.table import Table

LEAST_ROUNDS = 8
"""Fewer committed rounds prove nothing."""


@dataclass
class Track:
    """What one peer has shown so far. `versions` maps a unit to its version -> hash."""

    status: Status | None = None
    versions: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    _first: tuple[float, int] | None = None
    _last: tuple[float, int] = (0.0, 0)

    def observe(self, status: Status, at: float) -> None:
        """Take in a status asked for at `at` (monotonic seconds)."""
        self.status = status
        for unit in status.units:
            known, shown = self.versions[unit.unit], {link.version: link.hash for link in unit.history}
            # A later history overrides: a fork that was settled leaves only the winner's chain. Where it does not reach
            # back to what was shown before, as after a full state, that may have been the losing side.
            oldest = min(known.keys() & shown.keys(), default=None)
            if oldest is None or known[oldest] != shown[oldest]:
                known.clear()
            known.update(shown)
        self._last = (at, status.trainer.tokens)
        if self._first is None:
            self._first = self._last

    @property
    def tokens_per_second(self) -> float:
        """Mean over the whole time of observation."""
        if self._first is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


class Summary(BaseModel):
    """The JSON object in the last line of `spesd demo`; lists have one entry per peer, in the same order."""

    model_config = ConfigDict(frozen=True)

    peers: tuple[str, ...]
    rounds: tuple[int, ...]
    loss_first: tuple[float | None, ...]
    loss_last: tuple[float | None, ...]
    hashes_agree: bool
    bytes_up: tuple[int, ...]
    bytes_down: tuple[int, ...]
    tokens_per_s: tuple[float, ...]


def summarise(tracks: Sequence[Track]) -> Summary:
    """The figures of all peers. Raises ValueError when a peer never answered."""
    statuses = [track.status for track in tracks if track.status is not None]
    if len(statuses) != len(tracks):
        raise ValueError(f"{len(tracks) - len(statuses)} of {len(tracks)} peers never answered")
    first = [status.trainer.first_held_out for status in statuses]
    last = [status.trainer.held_out for status in statuses]
    return Summary(
        peers=tuple(status.peer for status in statuses),
        rounds=tuple(max((unit.version for unit in status.units), default=0) for status in statuses),
        loss_first=tuple(held_out.loss if held_out else None for held_out in first),
        loss_last=tuple(held_out.loss if held_out else None for held_out in last),
        hashes_agree=not any(disagreements(tracks)) and not any(incomparable(tracks)),
        bytes_up=tuple(status.traffic.up_bytes for status in statuses),
        bytes_down=tuple(status.traffic.down_bytes for status in statuses),
        tokens_per_s=tuple(round(track.tokens_per_second, 1) for track in tracks),
    )


def problems(summary: Summary, tracks: Sequence[Track]) -> Iterator[str]:
    """Why the demo failed; nothing when it did not."""
    losses = zip(summary.peers, summary.loss_first, summary.loss_last, strict=True)
    for peer, first, last in losses:
        if first is None or last is None:
            yield f"{short(peer)} has no held-out loss"
        elif not last < first:
            yield f"the held-out loss of {short(peer)} did not fall: {first:.3f}, then {last:.3f}"
    if min(summary.rounds, default=0) < LEAST_ROUNDS:
        yield f"only {min(summary.rounds, default=0)} rounds were committed, {LEAST_ROUNDS} are wanted"
    yield from disagreements(tracks)
    yield from incomparable(tracks)


def disagreements(tracks: Sequence[Track]) -> Iterator[str]:
    """Versions of units whose hash is not the same on all peers that have them."""
    for unit in _units(tracks):
        for version in sorted({version for track in tracks for version in track.versions[unit]}):
            hashes = {track.versions[unit][version] for track in tracks if version in track.versions[unit]}
            if len(hashes) > 1:
                yield f"{unit} version {version} has {len(hashes)} different hashes"


def incomparable(tracks: Sequence[Track]) -> Iterator[str]:
    """Units of which a peer shares no version with any other, so that nothing is proved."""
    for unit in _units(tracks):
        for index, track in enumerate(tracks):
            others = (other.versions[unit].keys() for other in tracks if other is not track)
            if not any(track.versions[unit].keys() & keys for keys in others):
                yield f"peer {index} shares no version of {unit} with another peer"


def live_table(tracks: Sequence[Track], title: str) -> Table:
    """The four peers, for a terminal."""
    from rich.table import Table

    table = Table("peer", "state", "round", "held-out loss", "tokens/s", "experts", "up", "down", title=title)
    for index, track in enumerate(tracks):
        status = track.status
        if status is None:
            table.add_row(f"{index}", "starting", *[""] * 6)
            continue
        held_out = status.trainer.held_out
        table.add_row(
            f"{index} {short(status.peer)}",
            status.state.value,
            str(status.round.number),
            number(held_out.loss if held_out else None),
            f"{status.trainer.tokens_per_second:.0f}",
            " ".join(unit.removeprefix("expert-") for unit in status.owned),
            amount(status.traffic.up_bytes),
            amount(status.traffic.down_bytes),
        )
    return table


def plain_line(tracks: Sequence[Track]) -> str:
    """The same in one line, for a log."""
    statuses = [track.status for track in tracks if track.status is not None]
    losses = [status.trainer.held_out.loss if status.trainer.held_out else None for status in statuses]
    return (
        f"states {' '.join(status.state.value for status in statuses) or '–'}, "
        f"rounds {' '.join(str(status.round.number) for status in statuses)}, "
        f"held-out loss {' '.join(map(number, losses))}, "
        f"{sum(status.trainer.tokens_per_second for status in statuses):.0f} tokens/s in all"
    )


def summary_lines(summary: Summary) -> Iterator[str]:
    """The result, for people."""
    yield f"{len(summary.peers)} peers, {min(summary.rounds, default=0)} rounds committed on all of them"
    for index, peer in enumerate(summary.peers):
        yield (
            f"peer {index} {short(peer)}: held-out loss {number(summary.loss_first[index])} -> "
            f"{number(summary.loss_last[index])}, {summary.tokens_per_s[index]:.0f} tokens/s, "
            f"{amount(summary.bytes_up[index])} up, {amount(summary.bytes_down[index])} down"
        )
    yield f"every unit hash agrees: {'yes' if summary.hashes_agree else 'NO'}"


def _units(tracks: Sequence[Track]) -> list[str]:
    return sorted({unit for track in tracks for unit in track.versions})
