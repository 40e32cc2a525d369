"""The workshop: the arithmetic behind the effects, on a peer's agreed states.

Pure computation over numpy arrays and a mapping of blobs. The daemon calls it in a thread pool, the simulation
directly. Every change of an agreed state is verified by hash before it becomes visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3

from spesd.config.manifest import OuterConfig, SyncConfig
from spesd.sync import aggregate, packet
from spesd.sync.codec import Codec, Values
from spesd.sync.codecs import codecs_of
from spesd.sync.effects import Adopt, Commit, Encode, Origin, Reduce
from spesd.sync.feedback import Feedback
from spesd.sync.ledger import Contributor, Entry, Head, PeerId, UnitId
from spesd.sync.merge import Merging
from spesd.sync.outer import OuterStep
from spesd.sync.rebase import shift

PACKET_SLACK = 2.0
"""A packet may be this many times `max_delta_rms`: the mean of what passed the gate, and what its codec adds."""


class Blobs(Protocol):
    """Bytes by their blake3 hash (hex)."""

    def get(self, hash: str) -> bytes:
        """Raises KeyError if they are not here."""
        ...

    def put(self, data: bytes, *, durable: bool = False) -> str:
        """Store bytes; what is `durable` outlives a power cut, the rest can be fetched again. Returns their hash."""
        ...


class Rejected(ValueError):
    """A packet or state that does not verify; nothing was changed."""


class NotHere(Rejected):
    """A blob that is needed is not here."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A packet and its entry (None if nothing passed the checks), and why contributions were refused."""

    entry: Entry | None
    refused: Mapping[PeerId, str]


def state_hash(values: Values) -> str:
    """Hex blake3 hash of the little-endian fp32 bytes of a unit: what ledgers compare, and the name of its blob."""
    return blake3(np.ascontiguousarray(values, "<f4").view(np.uint8).data).hexdigest()


class Workshop:
    """Agreed states of all units of one peer, float32 [size] each, and what is done with them.

    `sizes` in layout order. Methods for different units may run in parallel, for one unit one at a time.
    """

    def __init__(
        self,
        run: str,
        sizes: Mapping[UnitId, int],
        settings: SyncConfig,
        blobs: Blobs,
        merging: Merging | None = None,
        outer: OuterConfig | None = None,
    ) -> None:
        self._run = run
        self._sizes = sizes
        self._index = {unit: index for index, unit in enumerate(sizes)}
        self._settings = settings
        self._codecs = codecs_of(settings)
        self._blobs = blobs
        self._merging = merging
        self._outer = OuterStep(outer or OuterConfig())
        self._momentum: dict[UnitId, tuple[Head, Values]] = {}
        self.agreed: dict[UnitId, Values] = {}
        self._heads: dict[UnitId, Head] = {}
        self._feedback = Feedback(settings.stale_rounds)

    def head(self, unit: UnitId) -> Head | None:
        """The state that `agreed[unit]` holds."""
        return self._heads.get(unit)

    def encode(self, effect: Encode, snapshot: Values) -> str | None:
        """Store `snapshot - agreed` as a contribution; None if the agreed state is not the effect's base any more."""
        if self._heads.get(effect.unit) != effect.base:
            return None
        # a trainer whose parameters are not finite has nothing to contribute
        try:
            delta = aggregate.clip(snapshot - self.agreed[effect.unit], self._settings.max_delta_rms)
        except aggregate.Refused:
            return None
        header = self._header(packet.Kind.CONTRIBUTION, effect, effect.base)
        codec = self._codecs.usual
        return self._blobs.put(packet.write(header, codec, codec.encode(delta)))

    def reduce(self, effect: Reduce) -> Reduced:
        """Check contributions, take their weighted mean, merge if it is time, write the canonical packet.

        What the codec loses goes into this reducer's next packet of the unit.
        """
        accepted: list[tuple[Values, int]] = []
        names: list[Contributor] = []
        refused: dict[PeerId, str] = {}
        if self._heads.get(effect.unit) != effect.base:
            return Reduced(None, refused)
        for contributor in effect.contributions:
            try:
                accepted.append((self._read_contribution(effect, contributor), contributor.weight))
                names.append(contributor)
            except ValueError as error:
                if not (isinstance(error, NotHere) and contributor.peer in effect.belated):  # those may be dropped
                    refused[contributor.peer] = str(error)
        if not accepted:
            return Reduced(None, refused)
        entry = self._packet(effect, self._change(effect, accepted), tuple(names))
        return Reduced(entry, refused)

    def _change(self, effect: Reduce, accepted: Sequence[tuple[Values, int]]) -> Values:
        """What is to be added to the agreed state, float32 [size]: outer step, merging move, what is owed."""
        change = self._outer.move(aggregate.weighted_mean(accepted), self._momentum_of(effect))
        merge = self._merging.update(effect.unit, effect.round, self.agreed) if self._merging else None
        if merge is not None:
            change += merge
        owed = self._feedback.owed(effect.unit, effect.round)
        if owed is not None:
            change += owed
        return aggregate.clip(change, PACKET_SLACK * self._settings.max_delta_rms)

    def _momentum_of(self, effect: Reduce) -> Values:
        """Momentum of the unit at the effect's base: followed so far, or else from the packets that are here."""
        size = self._sizes[effect.unit]
        if not self._outer.has_momentum:
            return np.zeros(0, np.float32)
        head, momentum = self._momentum.get(effect.unit, (None, None))
        if momentum is None or head != effect.base:
            momentum = self._outer.replay(self._moves(effect), size)
            self._momentum[effect.unit] = effect.base, momentum
        return momentum

    def _moves(self, effect: Reduce) -> Iterator[Values]:
        """How far each of the recent packets moved the unit, float32 [size], as far as they are here.

        A refresh holds its own move and all those since its start.
        """
        starts = {entry.base for entry in effect.recent}
        start, since = None, np.zeros(self._sizes[effect.unit], np.float32)
        for entry in effect.recent:
            if entry.after.version > effect.base.version:
                return
            if entry.before in starts:
                start, since = entry.before, np.zeros_like(since)
            codec = self._codecs.of_packet(self._is_dense(effect.unit, entry.after.version, entry.base))
            try:
                move = self._read(entry.packet, packet.Kind.PACKET, effect.unit, codec)[1]
            except Rejected:
                start = None  # what the next refresh holds beside its own move is not known
                continue
            if entry.base is None:
                since += move
                yield move
            elif entry.base == start:
                yield move - since

    def _followed(self, entry: Entry, new: Values) -> tuple[Head, Values] | None:
        """The unit's momentum once `entry` leads to `new`; None if it is not known here or rounds were jumped over."""
        head, momentum = self._momentum.get(entry.unit, (None, None))
        if momentum is None or not head == entry.before == self._heads.get(entry.unit):
            return None
        return entry.after, self._outer.follow(new - self.agreed[entry.unit], momentum)

    def _packet(self, effect: Reduce, change: Values, contributors: tuple[Contributor, ...]) -> Entry:
        """Write the packet that adds `change`, or, of a refresh, leads to the same state from further back."""
        unit, start = effect.unit, effect.refresh or effect.base
        target = self.agreed[unit] + change
        try:
            values = self._state(unit, start)
        except Rejected:
            start, values = effect.base, self.agreed[unit]  # who waits for the refresh fetches a full state instead
        refresh = start if start == effect.refresh else None
        codec = self._codecs.of_packet(self._is_dense(unit, effect.round, refresh))
        payload = codec.encode(change if start == effect.base else target - values)
        after = values + codec.decode(payload, self._sizes[unit])
        header = self._header(packet.Kind.PACKET, effect, start, state_hash(after), contributors)
        data = packet.write(header, codec, payload)
        head = Head(effect.round, header.after, effect.base.weight + sum(c.weight for c in contributors))
        entry = Entry(unit, effect.base, head, self._blobs.put(data), len(data), contributors, refresh)
        self._feedback.made(unit, effect.round, entry.packet, target - after)
        return entry

    def _is_dense(self, unit: UnitId, round_: int, refresh: Head | None) -> bool:
        """Whether a packet holds more than the contributions of one round: every peer must give the same answer."""
        return refresh is not None or (self._merging is not None and self._merging.due(unit, round_))

    def commit(self, effect: Commit) -> Values:
        """Apply the packet of an entry to the agreed state. Returns the trainer's shift, float32 [size].

        Raises Rejected, with the agreed state unchanged, unless header, entry and resulting hash all agree.
        """
        entry = effect.entry
        unit = entry.unit
        if not entry.follows(self._heads.get(unit)):
            raise Rejected(f"{unit} is not at version {entry.before.version}")
        codec = self._codecs.of_packet(self._is_dense(unit, entry.after.version, entry.base))
        header, update = self._read(entry.packet, packet.Kind.PACKET, unit, codec)
        told = (header.from_version, header.round, header.before, header.after, header.contributors)
        if told != (entry.start.version, entry.after.version, entry.start.hash, entry.after.hash, entry.contributors):
            raise Rejected(f"packet {entry.packet[:12]} of {unit} says something else than its entry")
        rounds = entry.after.version - entry.start.version if entry.base else 1
        try:
            limit = PACKET_SLACK * self._settings.max_delta_rms * codec.growth * rounds
            aggregate.check(update, self._sizes[unit], limit)
        except aggregate.Refused as error:
            raise Rejected(f"packet {entry.packet[:12]} of {unit}: {error}") from None
        new = self._state(unit, entry.start) + update
        followed = self._followed(entry, new)
        shift = self._replace(unit, entry.after, new, effect.accepted, (), keep=effect.anchor)
        self._momentum.pop(unit, None)
        if followed is not None:
            self._momentum[unit] = followed
        self._feedback.committed(unit, entry.after.version, entry.packet)
        return shift

    def adopt(self, effect: Adopt) -> Values:
        """Replace the agreed state by a full one. Returns the trainer's shift, float32 [size]. Raises Rejected."""
        new = self._read_state(effect.unit, effect.head)
        self._feedback.forget(effect.unit)
        return self._replace(effect.unit, effect.head, new, effect.accepted, effect.returned, keep=False)

    def restore(self, unit: UnitId, head: Head, values: Values) -> None:
        """Set a state that comes from this peer's own disk. Raises Rejected if it does not have the head's hash."""
        if values.shape != (self._sizes[unit],) or state_hash(values) != head.hash:
            raise Rejected(f"{unit}: the values are not version {head.version}")
        self.agreed[unit], self._heads[unit] = values, head

    def contribution(self, unit: UnitId, blob: str) -> Values:
        """The decoded values of a contribution, float32 [size]. Raises Rejected."""
        return self._read(blob, packet.Kind.CONTRIBUTION, unit, self._codecs.usual)[1]

    # Inside ----------------------------------------------------------------------------------------------------------

    def _state(self, unit: UnitId, head: Head) -> Values:
        """The agreed state, or an older one that is kept in full. Raises Rejected."""
        return self.agreed[unit] if self._heads.get(unit) == head else self._read_state(unit, head)

    def _read_state(self, unit: UnitId, head: Head) -> Values:
        """The values of a full state among the blobs, float32 [size]. Raises Rejected."""
        data = self._get(head.hash)
        if len(data) != 4 * self._sizes[unit]:
            raise Rejected(f"state of {unit} has {len(data)} bytes, not {4 * self._sizes[unit]}")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.isfinite(aggregate.rms(values)):
            raise Rejected(f"state of {unit} is not finite")
        return values

    def _replace(
        self,
        unit: UnitId,
        head: Head,
        new: Values,
        accepted: Iterable[str],
        returned: Iterable[str],
        keep: bool,
    ) -> Values:
        if state_hash(new) != head.hash:
            raise Rejected(f"{unit} would not have the hash of version {head.version}")
        old = self.agreed.get(unit)
        change = shift(
            old if old is not None else np.zeros_like(new), new, self._own(unit, accepted), self._own(unit, returned)
        )
        if keep:
            self._blobs.put(np.ascontiguousarray(new, "<f4").tobytes(), durable=True)
        self.agreed[unit], self._heads[unit] = new, head
        return change

    def _own(self, unit: UnitId, blobs: Iterable[str]) -> list[Values]:
        return [self.contribution(unit, blob) for blob in blobs]

    def _read_contribution(self, effect: Reduce, contributor: Contributor) -> Values:
        header, values = self._read(contributor.blob, packet.Kind.CONTRIBUTION, effect.unit, self._codecs.usual)
        made_for = effect.belated.get(contributor.peer) or Origin(effect.round, effect.roster, effect.base)
        if (header.round, header.roster, header.before) != (made_for.round, made_for.roster, made_for.base.hash):
            raise aggregate.Refused("made for another round, roster or base")
        limit = self._settings.max_delta_rms * self._codecs.usual.growth
        aggregate.check(values, self._sizes[effect.unit], limit)
        return values

    def _read(self, blob: str, kind: packet.Kind, unit: UnitId, codec: Codec) -> tuple[packet.Header, Values]:
        data = self._get(blob)
        try:
            return packet.read(
                data, kind=kind, run=self._run, unit=self._index[unit], count=self._sizes[unit], codec=codec
            )
        except packet.Malformed as error:
            raise Rejected(f"blob {blob[:12]}: {error}") from None

    def _get(self, blob: str) -> bytes:
        try:
            return self._blobs.get(blob)
        except KeyError:
            raise NotHere(f"blob {blob[:12]} is not here") from None

    def _header(
        self,
        kind: packet.Kind,
        effect: Encode | Reduce,
        base: Head,
        after: str = packet.NO_HASH,
        contributors: tuple[Contributor, ...] = (),
    ) -> packet.Header:
        return packet.Header(
            kind=kind,
            run=self._run,
            unit=self._index[effect.unit],
            from_version=base.version,
            round=effect.round,
            count=self._sizes[effect.unit],
            roster=effect.roster,
            before=base.hash,
            after=after,
            contributors=contributors,
        )
