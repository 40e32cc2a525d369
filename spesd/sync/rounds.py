"""The open rounds of a peer, and what came for one whose roster is still on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from spesd.sync.belated import MAX_AGE
from spesd.sync.context import Context
from spesd.sync.effects import RoundEnded
from spesd.sync.ledger import Head, PeerId, UnitId
from spesd.sync.messages import Announce, EntryInfo, Roster
from spesd.sync.pipeline import Pipeline
from spesd.sync.round import Round

MAX_EARLY = 4096
"""Contributions that are kept while the roster to which they belong is still on its way to us."""


class Rounds:
    """Rounds by number, from the roster to the last commit."""

    def __init__(self, context: Context, pipeline: Pipeline) -> None:
        self._context, self._pipeline = context, pipeline
        self._open: dict[int, Round] = {}
        self._past: deque[Round] = deque(maxlen=MAX_AGE * context.settings.stagger)
        self._early: list[tuple[int, PeerId, UnitId, str]] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def __getitem__(self, number: int) -> Round:
        return self._open[number]

    def get(self, number: int) -> Round | None:
        """The round of that number, None if it is not open here."""
        return self._open.get(number)

    @property
    def newest(self) -> Round | None:
        """The newest open round."""
        return self._open[max(self._open)] if self._open else None

    def settled(self, unit: UnitId) -> bool:
        """Whether `unit` has ended in every open round."""
        return all(round_.settled([unit]) for round_ in self._open.values())

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [round_.deadline() for round_ in self._open.values()]
        return min((time for time in times if time is not None), default=None)

    def begin(self, now: float, roster: Roster) -> None:
        """The roster lists us: contribute, and take up what has come before it."""
        round_ = self._open[roster.round] = Round(self._context, roster, now)
        round_.start()
        for unit in roster.units:  # a packet can be faster than its roster
            chain = self._context.ledger[unit]
            if chain.entries and chain.entries[-1].after.version >= roster.round:
                round_.announced(now, chain.entries[-1])
                round_.committed(now, unit, chain.entries[-1].after)
        early, self._early = self._early, []
        for number, peer, unit, blob in early:
            if number != roster.round or self.contribution(now, number, peer, unit, blob) is not None:
                self._pipeline.discard([blob])

    def contribution(self, now: float, number: int, sender: PeerId, unit: UnitId, blob: str) -> str | None:
        """A contribution to an open round, or to one that is over. Returns why it is refused, or None."""
        round_ = self._open.get(number) or next((past for past in self._past if past.number == number), None)
        if number not in self._open:
            self._tell(sender, number, unit)
        if round_ is not None:
            round_.arrived(now, sender, unit)
        if round_ is not None and round_.comes_late(sender, unit):
            round_.tell(sender, unit)
            self._pipeline.discard(self._context.belated.keep(unit, sender, round_.origin(unit), blob))
            return None
        if number not in self._open:
            return f"round {number} is not open here"
        return self._open[number].contribution(now, sender, unit, blob)

    def keep_early(self, number: int, sender: PeerId, unit: UnitId, blob: str) -> str | None:
        """Keep a contribution for the roster that we wait for. Returns why it is refused, or None."""
        if len(self._early) >= MAX_EARLY:
            return f"round {number} is not open here"
        if any(row[:3] == (number, sender, unit) for row in self._early):
            return f"a contribution of round {number} is kept already"
        self._early.append((number, sender, unit, blob))
        return None

    def _tell(self, sender: PeerId, number: int, unit: UnitId) -> None:
        """Who still contributes to a round that is over here may not know that there is a packet."""
        entries = self._context.ledger[unit].entries if unit in self._context.sizes else []
        made = [EntryInfo.of(entry) for entry in entries if entry.after.version == number]
        if made:
            self._context.send(sender, Announce(entries=made))

    def forget_early(self) -> None:
        """No roster is waited for any more."""
        early, self._early = self._early, []
        self._pipeline.discard(blob for *_, blob in early)

    def lost(self, now: float, peer: PeerId) -> None:
        """`peer` cannot be reached."""
        for round_ in self._open.values():
            round_.lost(now, peer)

    def withdraw(self, units: Iterable[UnitId]) -> None:
        """Our contributions to `units` are gone."""
        for round_ in self._open.values():
            round_.withdraw(units)

    def committed(self, now: float, unit: UnitId, head: Head) -> None:
        """The agreed state of `unit` is now `head`."""
        for round_ in self._open.values():
            round_.committed(now, unit, head)

    def tick(self, now: float) -> None:
        """Do what is due in each."""
        for round_ in self._open.values():
            round_.tick(now)

    def close(self, now: float) -> list[RoundEnded]:
        """End those that are over, and report them."""
        reports = []
        for number in [number for number, round_ in self._open.items() if round_.over]:
            round_ = self._open.pop(number)
            reports.append(round_.report(now))
            self._past.append(round_)
            self._keep_belated(round_)
        return reports

    def _keep_belated(self, round_: Round) -> None:
        """Of what came for this round, keep what came too late for its packet."""
        belated, dropped = self._context.belated, []
        for unit, peer, blob, used in round_.received_from_others():
            dropped += [blob] if used else belated.keep(unit, peer, round_.origin(unit), blob)
        self._pipeline.discard(dropped + belated.forget(self._context.newest_round))
