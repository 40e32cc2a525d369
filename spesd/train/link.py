"""What daemon and trainer say to each other: message types and frames. Imported by both sides, without torch.

A frame is a big-endian u32 length and a msgpack map whose "type" names the message. Commands go from daemon to trainer
and are obeyed strictly in order, at step boundaries; events go back. Bulk values travel through the files of
`exchange`: a command hands a unit's values over, the event that answers it hands them back.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spesd.config.manifest import MAX_MANIFEST_BYTES

MAX_FRAME_BYTES = MAX_MANIFEST_BYTES + (4 << 20)
"""Longest payload of a frame: a manifest, and a path for each of its shards."""

LENGTH = struct.Struct(">I")


class LinkError(ValueError):
    """Bytes that are no frame, or a frame that is no message."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Start(Message):
    """First command. The trainer reads every unit from `inbound` and answers `Ready`."""

    type: Literal["start"] = "start"
    manifest: bytes = Field(max_length=MAX_MANIFEST_BYTES, description="canonical bytes")
    peer_id: str
    owned: tuple[str, ...] = Field(description="expert units to train")
    round: int = Field(ge=0)
    position: int = Field(ge=0)
    shards: dict[str, str] = Field(description="hash of each shard to its path")
    inbound: str
    snapshot: str
    checkpoint: str | None = None
    device: str = Field(default="auto", max_length=16, description="auto, cpu, cuda or cuda:1")
    threads: int = Field(default=1, ge=1, le=1024)
    max_steps_per_second: float | None = Field(default=None, gt=0)


class Load(Message):
    """Add (trained units only) or copy values from `inbound`; answered by `Loaded`."""

    type: Literal["load"] = "load"
    units: tuple[str, ...]
    mode: Literal["add", "replace"]
    round: int = Field(ge=0)


class Snapshot(Message):
    """Copy all trained units to the snapshot file; answered by `SnapshotTaken`."""

    type: Literal["snapshot"] = "snapshot"
    round: int = Field(ge=0)


class Round(Message):
    """The swarm's round, which sets the learning rate. Not answered."""

    type: Literal["round"] = "round"
    round: int = Field(ge=0)


class Evaluate(Message):
    """Measure the held-out loss; answered by `Evaluated`."""

    type: Literal["evaluate"] = "evaluate"
    round: int = Field(ge=0)


class Own(Message):
    """Train exactly these experts from now on, with fresh moments for new ones; answered by `Owned`."""

    type: Literal["own"] = "own"
    experts: tuple[str, ...]


class Pause(Message):
    """Stop stepping; commands are still obeyed. Not answered."""

    type: Literal["pause"] = "pause"


class Resume(Message):
    """Step again. Not answered."""

    type: Literal["resume"] = "resume"


class Checkpoint(Message):
    """Write the optimizer's moments to `path`; answered by `Checkpointed`."""

    type: Literal["checkpoint"] = "checkpoint"
    path: str
    round: int = Field(ge=0)


class Stop(Message):
    """End; answered by `Stopped` and exit code 0."""

    type: Literal["stop"] = "stop"


class Ready(Message):
    """The trainer holds its weights and begins to step."""

    type: Literal["ready"] = "ready"
    pid: int
    device: str
    trained_values: int = Field(description="values with gradient and moments")
    frozen_values: int
    position: int


class Progress(Message):
    """About once a second. Counts and seconds are totals of this process, `loss` is the mean since the last one."""

    type: Literal["progress"] = "progress"
    step: int
    skipped: int = Field(description="steps whose gradient was not finite")
    tokens: int
    position: int
    loss: float | None
    tokens_per_second: float = Field(description="since the last report")
    seconds: float = Field(description="spent in steps")
    snapshot_seconds: float
    load_seconds: float
    evaluate_seconds: float
    peak_rss_bytes: int


class Loaded(Message):
    """The trainer has read these units; their part of `inbound` is the daemon's again."""

    type: Literal["loaded"] = "loaded"
    units: tuple[str, ...]
    round: int


class SnapshotTaken(Message):
    """The snapshot file is the daemon's until its next `Snapshot`. Counts are since the last snapshot."""

    type: Literal["snapshot_taken"] = "snapshot_taken"
    round: int
    steps: int
    tokens: int
    position: int
    loss: float | None = Field(description="mean training loss, None without a step")
    units: tuple[str, ...]


class Evaluated(Message):
    """Held-out cross-entropy in nats per token."""

    type: Literal["evaluated"] = "evaluated"
    round: int
    loss: float
    tokens: int


class Owned(Message):
    """The experts that are trained now."""

    type: Literal["owned"] = "owned"
    experts: tuple[str, ...]


class Checkpointed(Message):
    """The file is on disk, whole; `error` says why it is not."""

    type: Literal["checkpointed"] = "checkpointed"
    path: str
    round: int
    error: str | None = None


class Warned(Message):
    """Something went wrong that training survives."""

    type: Literal["warned"] = "warned"
    detail: str


class Stopped(Message):
    """Last event of an orderly end."""

    type: Literal["stopped"] = "stopped"
    position: int
    step: int


class FailureReason(StrEnum):
    """Why a trainer gave up."""

    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    BAD_DATA = "bad_data"
    BAD_COMMAND = "bad_command"
    BAD_EXCHANGE = "bad_exchange"
    NO_DEVICE = "no_device"
    INTERNAL = "internal"


class Failed(Message):
    """Last event before an exit with code 1."""

    type: Literal["failed"] = "failed"
    reason: FailureReason
    detail: str


Command = Start | Load | Snapshot | Round | Evaluate | Own | Pause | Resume | Checkpoint | Stop
Event = Ready | Progress | Loaded | SnapshotTaken | Evaluated | Owned | Checkpointed | Warned | Stopped | Failed

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="type")])
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


class AsyncBytes(Protocol):
    """The part of `asyncio.StreamReader` that is needed here."""

    async def readexactly(self, n: int, /) -> bytes: ...


def encode(message: Command | Event) -> bytes:
    """Return the whole frame. Raises LinkError when it would be too long."""
    payload: bytes = msgpack.packb(message.model_dump())
    if len(payload) > MAX_FRAME_BYTES:
        raise LinkError(f"{message.type} of {len(payload)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
    return LENGTH.pack(len(payload)) + payload


def decode_command(payload: bytes) -> Command:
    """Parse a frame's payload. Raises LinkError."""
    command: Command = _parse(_COMMANDS, payload)
    return command


def decode_event(payload: bytes) -> Event:
    """Parse a frame's payload. Raises LinkError."""
    event: Event = _parse(_EVENTS, payload)
    return event


def read_command(stream: BinaryIO) -> Command | None:
    """Read one command, blocking; None at the end of the stream. Raises LinkError, also for a frame cut short."""
    prefix = stream.read(LENGTH.size)
    if not prefix:
        return None
    if len(prefix) < LENGTH.size:
        raise LinkError("the stream ended inside a frame")
    size = _checked_size(prefix)
    payload = stream.read(size)
    if len(payload) < size:
        raise LinkError("the stream ended inside a frame")
    return decode_command(payload)


async def read_event(stream: AsyncBytes) -> Event:
    """Read one event. Raises LinkError, and asyncio.IncompleteReadError at the end of the stream."""
    size = _checked_size(await stream.readexactly(LENGTH.size))
    return decode_event(await stream.readexactly(size))


def _checked_size(prefix: bytes) -> int:
    (size,) = LENGTH.unpack(prefix)
    if size > MAX_FRAME_BYTES:
        raise LinkError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are accepted")
    return int(size)


def _parse(messages: TypeAdapter[Any], payload: bytes) -> Any:
    try:
        fields = msgpack.unpackb(payload, ext_hook=_refuse_ext, max_ext_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise LinkError(f"frame is not msgpack: {type(error).__name__}") from None
    if not isinstance(fields, Mapping):
        raise LinkError(f"frame holds {type(fields).__name__}, not a map")
    try:
        return messages.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise LinkError(f"message field {'.'.join(map(str, first['loc'])) or 'type'}: {first['msg']}") from None


def _refuse_ext(code: int, data: bytes) -> None:
    raise LinkError(f"msgpack extension type {code} is not accepted")
