"""Who is not waited for: peers that missed a deadline, until they have been in time again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from spesd.sync.ledger import PeerId

MAX_MISSES = 6
"""Misses that lengthen a sentence: more than 2 ** 5 rounds in time are asked of nobody."""

FORGOTTEN = 4
"""A peer that stays in time for so many times its sentence begins anew."""


MAX_PEERS = 1024
"""Peer ids cost nothing to make, so no more are remembered: those that missed a deadline last."""


@dataclass(slots=True)
class Record:
    """Misses that count, and rounds in time since the last one."""

    misses: int = 0
    streak: int = 0

    @property
    def sentence(self) -> int:
        """Rounds in time, one after the other, that make up for the misses."""
        return 1 << (self.misses - 1)


class Lateness:
    """Peers that missed a deadline. Each further miss takes twice as many rounds in time to make up for.

    So a line that is almost fast enough costs the others a deadline ever more rarely, and not every other round.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, Record] = OrderedDict()

    def __contains__(self, peer: object) -> bool:
        record = self._records.get(peer) if isinstance(peer, str) else None
        return record is not None and record.streak < record.sentence

    def __iter__(self) -> Iterator[PeerId]:
        return (peer for peer in self._records if peer in self)

    def missed(self, peer: PeerId) -> None:
        """A deadline has passed without it, or it was late again while nobody waited for it."""
        if peer not in self:
            record = self._records.setdefault(peer, Record())
            record.misses = min(record.misses + 1, MAX_MISSES)
        self._records[peer].streak = 0
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)

    def in_time(self, peer: PeerId) -> None:
        """All that was due from it in a round came in time."""
        record = self._records.get(peer)
        if record is not None:
            record.streak += 1
            if record.streak >= FORGOTTEN * record.sentence:
                del self._records[peer]
