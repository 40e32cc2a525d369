"""What the local API answers. Stable: fields are added, never renamed or removed; see `docs/api.md`.

`SCHEMA_VERSION` grows when a field changes its meaning. Times are seconds, sizes bytes, losses nats per token.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from spesd.config.peer import LEAST_MBIT

SCHEMA_VERSION = 1


class State(StrEnum):
    """What the daemon is doing as a whole."""

    STARTING = "starting"
    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    DRAINING = "draining"
    STOPPED = "stopped"


class Reason(StrEnum):
    """Why the daemon is in its state, where that needs a word. `detail` beside it has the particulars."""

    NONE = "none"
    PREPARING_DATA = "preparing-data"
    WAITING_FOR_BOOTSTRAP = "waiting-for-bootstrap"
    FETCHING_MANIFEST = "fetching-manifest"
    FETCHING_DATA = "fetching-data"
    FETCHING_STATES = "fetching-states"
    STARTING_TRAINER = "starting-trainer"
    CATCHING_UP = "catching-up"
    ALONE = "alone"
    TRAINER_RESTARTING = "trainer-restarting"
    NETWORK_RESTARTING = "network-restarting"
    DISK_FULL = "disk-full"
    NO_MEMORY = "no-memory"
    CLOCK_WRONG = "clock-wrong"
    ASKED_TO_STOP = "asked-to-stop"


class Phase(StrEnum):
    """Where the current round stands (`spesd.sync.round`)."""

    IDLE = "idle"
    GATHERING = "gathering"
    CONTRIBUTING = "contributing"
    REDUCING = "reducing"
    COMMITTING = "committing"


class UnitResult(StrEnum):
    """What a round brought for one unit."""

    COMMITTED = "committed"
    PARTIAL = "partial"
    UNCHANGED = "unchanged"
    PENDING = "pending"


class Answer(BaseModel):
    """Base of all answers. Unknown fields are ignored, so that an older client reads a newer daemon."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class UnitOutcome(Answer):
    """Result of one unit in one round: `missing` are the owners left out of a partial one."""

    result: UnitResult
    detail: str = Field(default="", description="why the unit is unchanged, for people")
    missing: tuple[str, ...] = Field(default=(), description="peer ids")
    seconds: float = Field(default=0.0, ge=0, description="from the start of the round here")


class Waiting(Answer):
    """Something the current round waits for."""

    unit: str = Field(default="", description="unit id such as expert-5; empty: the whole round")
    peer: str = Field(default="", description="peer id; empty: any peer")
    seconds_left: float = Field(description="until the deadline")


class RoundStatus(Answer):
    """The newest round that this peer takes part in or knows of."""

    number: int = Field(default=0, ge=0, description="0: no round yet")
    phase: Phase = Phase.IDLE
    committed: int = Field(default=0, ge=0, description="units that got a new version, partial ones included")
    total: int = Field(default=0, ge=0, description="units of the model")
    waiting_for: tuple[Waiting, ...] = ()
    local_steps: int = Field(default=0, ge=0, description="steps after which this peer asks for the next round")
    results: dict[str, UnitOutcome] = Field(default_factory=dict, description="by unit id")


class HeldOut(Answer):
    """Mean loss over the held-out sequences, the same ones on every peer."""

    round: int
    loss: float


class TrainerStatus(Answer):
    """The trainer process."""

    state: str = Field(default="absent", description="absent, starting, training or restarting")
    pid: int | None = None
    device: str | None = None
    step: int = 0
    tokens: int = Field(default=0, description="trained on by this peer in this run")
    tokens_per_second: float = 0.0
    loss: float | None = Field(default=None, description="training loss, mean of the last second or so")
    held_out: HeldOut | None = Field(default=None, description="the newest evaluation")
    first_held_out: HeldOut | None = Field(default=None, description="the first evaluation of this daemon")
    snapshot_share: float = Field(default=0.0, description="share of training time spent on snapshots")
    load_share: float = Field(default=0.0, description="share of training time spent on shifts")
    stalled_seconds: float = Field(default=0.0, description="spent on snapshots and shifts since the trainer started")
    restarts: int = Field(default=0, description="since the daemon started")


class UnitVersion(Answer):
    """One link of a unit's ledger."""

    version: int
    hash: str = Field(description="blake3 of the agreed state, hex")


class UnitStatus(Answer):
    """A unit's agreed state on this peer. `history`: versions that its ledger still has, at most 32, oldest first."""

    unit: str
    version: int
    hash: str
    owners: tuple[str, ...] = Field(default=(), description="peer ids of live owners")
    mine: bool = False
    history: tuple[UnitVersion, ...] = ()


class Transferred(Answer):
    """Bytes through our own streams in some time."""

    up_bytes: int = 0
    down_bytes: int = 0


class Limits(Answer):
    """`POST /v1/limit`: caps on all streams together, as they are from now on; null is no cap."""

    up_mbit: float | None = None
    down_mbit: float | None = None


class LimitChange(BaseModel):
    """Body of `POST /v1/limit`: caps that are given change, null lifts one. They hold until the daemon ends."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    up_mbit: float | None = Field(default=None, ge=LEAST_MBIT)
    down_mbit: float | None = Field(default=None, ge=LEAST_MBIT)


class Traffic(Transferred):
    """Bytes since the daemon started, and of this day and month over all its lives, by the local calendar."""

    today: Transferred = Transferred()
    month: Transferred = Transferred()
    limits: Limits = Limits()


class Line(StrEnum):
    """How a peer is connected to this one."""

    NONE = "none"
    DIRECT = "direct"
    RELAYED = "relayed"


class Neighbour(Answer):
    """The line to a live peer."""

    peer: str
    line: Line = Field(default=Line.NONE, description="whether we are connected, and whether through a relay")
    rtt_ms: float | None = Field(default=None, description="round trip, as far as it was measured")
    up_mbit: float = Field(default=0.0, description="sent to it lately, Mbit/s")
    down_mbit: float = Field(default=0.0, description="received from it lately, Mbit/s")


class Status(Answer):
    """`GET /v1/status`."""

    schema_version: int = SCHEMA_VERSION
    state: State
    reason: Reason = Reason.NONE
    detail: str = Field(default="", description="particulars of the reason, for people")
    peer: str = Field(default="", description="own peer id; empty until the network is up")
    run: str = Field(default="", description="run id; empty until it is known")
    run_name: str = ""
    version: str = Field(description="version of spesd")
    pid: int
    uptime_s: float
    addresses: tuple[str, ...] = Field(default=(), description="multiaddrs that others can dial")
    join: str = Field(default="", description="the line that others paste")
    round: RoundStatus = RoundStatus()
    trainer: TrainerStatus = TrainerStatus()
    owned: tuple[str, ...] = Field(default=(), description="ids of the experts trained here")
    units: tuple[UnitStatus, ...] = ()
    traffic: Traffic = Traffic()
    peers_live: int = Field(default=0, description="this one included")
    neighbours: tuple[Neighbour, ...] = Field(default=(), description="the other live peers")
    warnings: tuple[str, ...] = ()


class Peer(Neighbour):
    """A peer as its signed record tells, and the line to it."""

    me: bool = False
    state: State
    round: int = 0
    owned: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    version: str = ""
    age_s: float = Field(default=0.0, description="since the record was issued")


class Peers(Answer):
    """`GET /v1/peers`."""

    peers: tuple[Peer, ...] = ()


class Expert(Answer):
    """One expert, its owners and its agreed state on this peer."""

    expert: int
    owners: tuple[str, ...] = ()
    version: int
    hash: str
    mine: bool = False


class Experts(Answer):
    """`GET /v1/experts`."""

    experts: tuple[Expert, ...] = ()


class RoundRecord(Answer):
    """A round that is over."""

    number: int
    coordinator: str = ""
    members: tuple[str, ...] = ()
    results: dict[str, UnitOutcome] = Field(default_factory=dict)
    own_seconds: float = Field(default=0.0, ge=0, description="until the units that this peer trains had ended")
    seconds: float = Field(default=0.0, ge=0, description="until all had")


class Rounds(Answer):
    """`GET /v1/rounds`: the last rounds, oldest first."""

    rounds: tuple[RoundRecord, ...] = ()


class Losses(Answer):
    """`GET /v1/loss`: held-out losses since the daemon started, oldest first; a long run keeps the newest 4096."""

    points: tuple[HeldOut, ...] = ()


class Stop(Answer):
    """`POST /v1/stop`: the daemon has begun to drain."""

    pid: int


class Error(Answer):
    """Body of every answer that is not 200."""

    error: str = Field(description="bad-request, not-found, method-not-allowed, forbidden, not-ready or internal")
    detail: str = ""
