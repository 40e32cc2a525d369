"""Own work: which of this peer's contributions the swarm may still accept, and which it has accepted.

This is the book-keeping behind the invariant of `rebase`: whatever path a unit's agreed state takes, from one chain to
another if need be, it tells which contributions became accepted on the way and which ceased to be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from spesd.sync.ledger import Entry, Head, PeerId, UnitId

MAX_OFFERED = 8
"""Contributions of one unit, beside as many as a lost fork can return, that may still be accepted."""


class OwnWork:
    """Contributions of `me`, by the hash of their bytes. Forgets accepted ones after `keep_rounds` rounds."""

    def __init__(self, me: PeerId, keep_rounds: int) -> None:
        self._me = me
        self._keep = keep_rounds
        self._most = MAX_OFFERED + keep_rounds
        self._offered: defaultdict[UnitId, list[str]] = defaultdict(list)
        self._accepted: defaultdict[UnitId, list[tuple[int, str]]] = defaultdict(list)
        self._versions: dict[UnitId, dict[str, int]] = {}

    def offered(self, unit: UnitId, blob: str) -> list[str]:
        """A contribution was encoded; it is part of `theta - agreed`. Returns blobs that are no longer needed."""
        row = self._offered[unit]
        if blob not in row:
            row.append(blob)
        dropped, self._offered[unit] = row[: -self._most], row[-self._most :]
        return dropped

    def accepted_by(self, entry: Entry) -> tuple[str, ...]:
        """Our contributions that `entry` takes up."""
        return tuple(c.blob for c in entry.contributors if c.peer == self._me and c.blob in self._offered[entry.unit])

    def committed(self, entry: Entry, accepted: Iterable[str]) -> list[str]:
        """The entry is part of our chain. Returns blobs that are no longer needed."""
        unit, version = entry.unit, entry.after.version
        self._accept(unit, version, accepted)
        return self._forget(unit, version - self._keep)

    def moved(self, unit: UnitId, common: Head | None, entries: Iterable[Entry]) -> tuple[tuple[str, ...], ...]:
        """The unit goes from our chain to another that parts from it at `common` and then has `entries`.

        Returns (accepted, returned). Without a common state nothing is known, and nothing is claimed.
        """
        if common is None:
            return (), ()
        ours = [blob for version, blob in self._accepted[unit] if version > common.version]
        known = set(ours) | set(self._offered[unit])
        links = [(entry.after.version, c) for entry in entries for c in entry.contributors]
        theirs = {c.blob: version for version, c in reversed(links) if c.peer == self._me and c.blob in known}
        self._versions[unit] = theirs
        return tuple(b for b in theirs if b not in ours), tuple(b for b in ours if b not in theirs)

    def adopted(self, unit: UnitId, version: int, accepted: Iterable[str], returned: Iterable[str]) -> list[str]:
        """The move is done. Returned work may be accepted again by what follows. Returns blobs no longer needed."""
        gone, versions = set(returned), self._versions.pop(unit, {})
        self._accept(unit, version, accepted)
        # what both chains contain may have been accepted in another round on this one
        rows = [(versions.get(blob, old), blob) for old, blob in self._accepted[unit] if blob not in gone]
        self._accepted[unit] = rows
        dropped = [old for blob in returned for old in self.offered(unit, blob)]
        return dropped + self._forget(unit, version - self._keep)

    def clear(self, units: Iterable[UnitId]) -> list[str]:
        """The trainer lost its parameters of `units`: nothing of ours is in them. Returns blobs no longer needed."""
        dropped: list[str] = []
        for unit in units:
            dropped += self._offered.pop(unit, [])
            dropped += [blob for _, blob in self._accepted.pop(unit, [])]
        return dropped

    def blobs(self) -> set[str]:
        """Contributions that may still be accepted or returned."""
        accepted = {blob for rows in self._accepted.values() for _, blob in rows}
        return accepted | {blob for row in self._offered.values() for blob in row}

    def _accept(self, unit: UnitId, version: int, blobs: Iterable[str]) -> None:
        # what was cleared while the step was under way is not ours any more
        for blob in set(blobs) & set(self._offered[unit]):
            self._offered[unit].remove(blob)
            self._accepted[unit].append((version, blob))

    def _forget(self, unit: UnitId, before: int) -> list[str]:
        rows = self._accepted[unit]
        self._accepted[unit] = [row for row in rows if row[0] >= before]
        return [blob for version, blob in rows if version < before]
