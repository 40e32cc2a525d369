"""The pipeline: for each unit at most one step under way from its head to a better one.

A step is an entry (fetch its packet, commit it) or a full state (fetch it, adopt it). Whoever learns of a way to a
better head, by announcement or by asking, puts its steps here; a step that fails drops the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spesd.sync.codecs import Codecs
from spesd.sync.context import Context
from spesd.sync.effects import Adopt, Commit, Discard, Fetch
from spesd.sync.ledger import Entry, Head, PeerId, UnitId, is_better
from spesd.sync.packet import max_size
from spesd.sync.rendezvous import rank
from spesd.sync.work import OwnWork

HELPERS = 3
"""So many live peers, other ones per peer and unit, are asked for a blob beside those who are known to have it: they
fetch it too, and serve what they have of it, so that nobody's uplink carries it to all."""


@dataclass(frozen=True, slots=True)
class TakeState:
    """Replace a unit's state by `head`; our chain and its chain part at `common`, after which it has `entries`."""

    head: Head
    common: Head | None
    entries: tuple[Entry, ...]


Step = Entry | TakeState


@dataclass(slots=True)
class _Way:
    """Steps to take. The blobs of the first `here` lie ready; with `whole` all must, before the first is taken."""

    steps: deque[Step]
    sources: tuple[PeerId, ...]
    whole: bool = False
    here: int = 0
    applying: bool = False

    @property
    def ready(self) -> bool:
        return self.here >= (len(self.steps) if self.whole else 1)


class Pipeline:
    """Moves units along, one step at a time, and keeps the ledger."""

    def __init__(self, context: Context, codecs: Codecs, work: OwnWork) -> None:
        self._context = context
        self._codecs = codecs
        self._work = work
        self._ways: dict[UnitId, _Way] = {}

    def busy(self, unit: UnitId) -> bool:
        """Whether a step of `unit` is under way."""
        return unit in self._ways

    def applying(self, unit: UnitId) -> bool:
        """Whether the state of `unit` is being changed; before that its blob is on its way, which may take long."""
        return unit in self._ways and self._ways[unit].applying

    def go(self, unit: UnitId, steps: Sequence[Step], sources: Sequence[PeerId]) -> None:
        """Take `steps` one after the other; `sources` may serve their blobs.

        A way to a fork begins with a state behind ours, on which we must not be left: it is taken in one go.
        """
        if unit not in self._ways and steps:
            context = self._context
            helpers = rank(f"{context.me}|{unit}|{context.newest_round}", context.live)[:HELPERS]
            distinct = dict.fromkeys(peer for peer in (*sources, *helpers) if peer != context.me)
            behind = not isinstance(steps[0], Entry) and not is_better(steps[0].head, context.ledger[unit].head)
            self._ways[unit] = _Way(deque(steps), tuple(distinct), whole=behind)
            self._fetch(unit)

    def commit_own(self, entry: Entry) -> bool:
        """Commit a packet that this peer has reduced: its bytes are here. False if another is being applied."""
        if self.applying(entry.unit):
            return False
        self._drop(entry.unit)
        self._ways[entry.unit] = _Way(deque([entry]), (), here=1)
        self._apply(entry.unit)
        return True

    def drop_fetch(self, unit: UnitId) -> None:
        """Give up a way whose blob is still to come: there is a better one."""
        if not self.applying(unit):
            self._drop(unit)

    def fetched(self, effect: Fetch, ok: bool) -> bool:
        """The blob of a step is here, or cannot be had. False if that step is not the present one any more."""
        unit, way = effect.unit, self._ways.get(effect.unit)
        blobs = [_blob(step) for step in way.steps] if way is not None else []
        if way is None or way.applying or blobs[way.here] != effect.blob:
            if ok and effect.blob not in blobs:
                self.discard([effect.blob])
            return False
        if ok:
            way.here += 1
            self._go_on(unit)
        else:
            self._drop(unit)
        return True

    def committed(self, effect: Commit, ok: bool) -> bool:
        """The present step, an entry, is applied, or was refused. Returns `ok`."""
        entry = effect.entry
        if not ok:
            self._drop(entry.unit)
            return False
        chain = self._context.ledger[entry.unit]
        chain.append(entry)
        self.discard(self._work.committed(entry, effect.accepted))
        if effect.anchor:
            self.discard(chain.add_anchor())
        self._next(entry.unit)
        return True

    def adopted(self, effect: Adopt, ok: bool) -> bool:
        """The present step, a full state, is applied, or was refused. Returns `ok`."""
        if not ok:
            self._drop(effect.unit)
            return False
        self.discard(self._context.ledger[effect.unit].reset(effect.head))
        self.discard(self._work.adopted(effect.unit, effect.head.version, effect.accepted, effect.returned))
        self._next(effect.unit)
        return True

    def discard(self, blobs: Iterable[str]) -> None:
        """Give up blobs, but for those that a chain or our own work still needs: equal bytes are one blob."""
        dropped = set(blobs)
        dropped -= self._work.blobs() | self._context.ledger.blobs() if dropped else set()
        if dropped:
            self._context.emit(Discard(tuple(sorted(dropped))))

    def _drop(self, unit: UnitId) -> None:
        """Give up the way of `unit`, and what was fetched for it."""
        way = self._ways.pop(unit, None)
        if way is not None:
            self.discard([_blob(step) for step in way.steps][: way.here])

    def _next(self, unit: UnitId) -> None:
        way = self._ways.get(unit)
        if way is None:
            return
        way.steps.popleft()
        way.here -= 1
        if way.steps:
            self._go_on(unit)
        else:
            del self._ways[unit]

    def _go_on(self, unit: UnitId) -> None:
        """Take the next step, or fetch what it needs."""
        if self._ways[unit].ready:
            self._apply(unit)
        else:
            self._fetch(unit)

    def _fetch(self, unit: UnitId) -> None:
        way, context = self._ways[unit], self._context
        way.applying = False
        step, count = way.steps[way.here], context.sizes[unit]
        urgent = unit in context.owned or unit.startswith("shared")
        most = max_size(self._codecs.largest_payload(count))
        size = min(step.size, most) if isinstance(step, Entry) else 4 * count
        context.emit(Fetch(unit, _blob(step), size, way.sources, urgent))

    def _apply(self, unit: UnitId) -> None:
        context, way = self._context, self._ways[unit]
        way.applying, step = True, way.steps[0]
        if isinstance(step, Entry):
            if not step.follows(context.ledger[unit].head):
                self._drop(unit)
                return
            # what the next refresh starts from must be there in full
            due = context.ledger[unit].since_anchor + 1 >= context.settings.anchor_rounds
            refreshes = context.settings.refresh_every > 1 and unit.startswith("expert")
            anchor = step.base is not None if refreshes else due
            context.emit(Commit(step, self._work.accepted_by(step), anchor))
        else:
            accepted, returned = self._work.moved(unit, step.common, step.entries)
            context.emit(Adopt(unit, step.head, accepted, returned))


def _blob(step: Step) -> str:
    """What must be here before the step can be taken."""
    return step.packet if isinstance(step, Entry) else step.head.hash
