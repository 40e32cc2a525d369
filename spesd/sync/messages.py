"""The small messages of the protocol. Bulk (contributions, packets, states) never travels in them.

They are pydantic models so that everything from outside is checked: unknown fields, types, lengths and ranges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, model_validator

from spesd.sync.ledger import Contributor, Entry, Head

MAX_ROUND = 1 << 24
MAX_TOKENS = 1 << 28
"""Most tokens that a peer may bring to one round."""

MAX_PEERS = 4096
MAX_UNITS = 8192
MAX_ENTRIES = 4096
MAX_CONTRIBUTORS = 1024
MAX_LATE = 256

MAX_ROUND_WEIGHT = MAX_TOKENS * MAX_CONTRIBUTORS
"""Most weight that one round can add to a chain; with MAX_ROUND of them the sum still fits a `Count`."""

Round = Annotated[int, Field(ge=0, le=MAX_ROUND)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Peer = Annotated[str, Field(min_length=1, max_length=96, pattern=r"^[A-Za-z0-9_-]+$")]
UnitName = Annotated[str, Field(pattern=r"^(shared|expert)-[0-9]{1,5}$")]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class HeadInfo(Message):
    """A `Head` on the wire."""

    version: Round
    hash: Hash
    weight: Count

    @classmethod
    def of(cls, head: Head) -> HeadInfo:
        return cls(version=head.version, hash=head.hash, weight=head.weight)

    def head(self) -> Head:
        return Head(self.version, self.hash, self.weight)


class ContributorInfo(Message):
    """A `Contributor` on the wire."""

    peer: Peer
    weight: Annotated[int, Field(ge=1, le=1 << 62)]
    blob: Hash


class EntryInfo(Message):
    """An `Entry` on the wire."""

    unit: UnitName
    before: HeadInfo
    after: HeadInfo
    packet: Hash
    size: Annotated[int, Field(ge=1, le=1 << 40)]
    contributors: Annotated[list[ContributorInfo], Field(min_length=1, max_length=MAX_CONTRIBUTORS)]
    base: HeadInfo | None = None

    @classmethod
    def of(cls, entry: Entry) -> EntryInfo:
        return cls(
            unit=entry.unit,
            before=HeadInfo.of(entry.before),
            after=HeadInfo.of(entry.after),
            packet=entry.packet,
            size=entry.size,
            contributors=[ContributorInfo(peer=c.peer, weight=c.weight, blob=c.blob) for c in entry.contributors],
            base=HeadInfo.of(entry.base) if entry.base else None,
        )

    def entry(self) -> Entry:
        """Raises ValueError if version or weight do not follow."""
        names = tuple(Contributor(c.peer, c.weight, c.blob) for c in self.contributors)
        base = self.base.head() if self.base else None
        return Entry(self.unit, self.before.head(), self.after.head(), self.packet, self.size, names, base)


class Ready(Message):
    """To the coordinator: I have done my local steps and want `round`."""

    round: Round


class Call(Message):
    """From the coordinator: take a snapshot and join `round` within `seconds`."""

    round: Round
    attempt: Count
    seconds: Annotated[float, Field(gt=0, le=3600)]


class Join(Message):
    """To the coordinator: what I bring to `round`. Without `units`: count me out (I am syncing, or have no trainer).

    `late` are peers that I waited for in vain.
    """

    round: Round
    attempt: Count
    tokens: Tokens
    units: Annotated[dict[UnitName, HeadInfo], Field(max_length=MAX_UNITS)]
    late: Annotated[list[Peer], Field(max_length=MAX_LATE)] = []


class RosterUnit(Message):
    """One unit of a roster: the state from which the round starts, and who contributes."""

    head: HeadInfo
    contributors: Annotated[list[Peer], Field(min_length=1, max_length=MAX_CONTRIBUTORS)]


class Roster(Message):
    """The frozen list of who takes part in a round. `tokens` counts each member's since its last round.

    Peers whose line is slow by what the members say reduce only where nobody else can, and do not coordinate the next.
    """

    round: Round
    attempt: Count
    coordinator: Peer
    tokens: Annotated[dict[Peer, Tokens], Field(min_length=1, max_length=MAX_PEERS)]
    units: Annotated[dict[UnitName, RosterUnit], Field(max_length=MAX_UNITS)]
    late: Annotated[list[Peer], Field(max_length=MAX_LATE)] = []

    @model_validator(mode="after")
    def _contributors_are_members(self) -> Roster:
        for unit, row in self.units.items():
            if len(set(row.contributors)) < len(row.contributors) or not self.tokens.keys() >= set(row.contributors):
                raise ValueError(f"units.{unit}: a contributor is listed twice or is no member")
        return self

    def canonical_bytes(self) -> bytes:
        """What is hashed and signed."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        return blake3(self.canonical_bytes()).hexdigest()


class SignedRoster(Message):
    """A roster with its coordinator's signature."""

    roster: Roster
    signature: Annotated[bytes, Field(max_length=4096)]


class Announce(Message):
    """Entries whose packets I have committed and serve."""

    entries: Annotated[list[EntryInfo], Field(min_length=1, max_length=MAX_ENTRIES)]


class Heads(Message):
    """My agreed states. `reply` marks an answer, which is not answered again."""

    round: Round
    heads: Annotated[dict[UnitName, HeadInfo], Field(max_length=MAX_UNITS)]
    reply: bool


class TrailRequest(Message):
    """How do I get to your head? For each unit all states that my history remembers, newest first (none: nothing)."""

    units: Annotated[
        dict[UnitName, Annotated[list[HeadInfo], Field(max_length=256)]], Field(min_length=1, max_length=MAX_UNITS)
    ]


class Trail(Message):
    """The way to my head of `unit`.

    `common` is the newest state that both of us know, `entries` all that follow it here. If `common` is not your head,
    `anchor` is the full state to take first; entries up to it are told for the account, those after it are replayed.
    """

    unit: UnitName
    common: HeadInfo | None
    anchor: HeadInfo | None
    entries: Annotated[list[EntryInfo], Field(max_length=MAX_ENTRIES)]


KINDS: Mapping[str, type[Message]] = MappingProxyType(
    {kind.__name__: kind for kind in (Ready, Call, Join, SignedRoster, Announce, Heads, TrailRequest, Trail)}
)
"""Every message that may arrive, by the name under which it travels."""


def parse(kind: str, body: Mapping[str, Any]) -> Message:
    """Check a message from outside. Raises ValueError (pydantic's ValidationError is one) that names the field."""
    if kind not in KINDS:
        raise ValueError(f"message kind {kind!r} is unknown")
    return KINDS[kind].model_validate(body)
