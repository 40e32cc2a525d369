"""What the protocol asks of the world. The core returns effects; the daemon (or a simulation) carries them out.

Every effect that has a result is answered by one call of the `SyncPeer` method named in its docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spesd.sync.ledger import Contributor, Entry, Head, PeerId, UnitId
from spesd.sync.messages import Message


class Outcome(StrEnum):
    """How a unit ended in a round."""

    PENDING = "pending"
    COMMITTED = "committed"
    PARTIAL = "partial"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver a small message; on failure `on_unreachable`."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Push blob `blob` to the reducer `to`; on failure `on_unreachable`."""

    to: PeerId
    round: int
    roster: str
    unit: UnitId
    blob: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask the trainer for a snapshot at its next step boundary: `on_snapshot`."""

    round: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode `snapshot - agreed` of a unit as a contribution: `on_encoded`."""

    round: int
    roster: str
    unit: UnitId
    base: Head


@dataclass(frozen=True, slots=True)
class Origin:
    """For which round, roster and state a contribution was made."""

    round: int
    roster: str
    base: Head


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine contributions into a packet: `on_reduced`.

    With `refresh` its update starts at that older state. `recent` are the unit's entries that are known here, up to the
    base: momentum follows from them. `belated` are the contributors whose contribution was made for an earlier round.
    """

    round: int
    roster: str
    unit: UnitId
    base: Head
    contributions: tuple[Contributor, ...]
    refresh: Head | None = None
    recent: tuple[Entry, ...] = ()
    belated: Mapping[PeerId, Origin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a blob of exactly `size` bytes from `sources`, of which some may lack it: `on_fetched`."""

    unit: UnitId
    blob: str
    size: int
    sources: tuple[PeerId, ...]
    urgent: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """Verify and apply the packet of `entry`, all or nothing: `on_committed`.

    `accepted` are this peer's own contributions in it; `anchor` asks to keep the full new state on disk as well.
    """

    entry: Entry
    accepted: tuple[str, ...]
    anchor: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    """Replace a unit's agreed state by the blob `head.hash`: `on_adopted`."""

    unit: UnitId
    head: Head
    accepted: tuple[str, ...]
    returned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """These blobs are no longer needed by the protocol."""

    blobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Strike:
    """`peer` broke the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class UnitReport:
    """How one unit ended: who is `missing` from a partial packet, and `why` it is unchanged or partial.

    `seconds` went by from the roster's arrival.
    """

    outcome: Outcome
    missing: tuple[PeerId, ...] = ()
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round is over for this peer. The units that it trains had all ended at `own_ended`: then it could go on."""

    round: int
    coordinator: PeerId
    members: tuple[PeerId, ...]
    units: dict[UnitId, UnitReport]
    started: float
    own_ended: float
    ended: float


Effect = (
    Send | SendContribution | TakeSnapshot | Encode | Reduce | Fetch | Commit | Adopt | Discard | Strike | RoundEnded
)
