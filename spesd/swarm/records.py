"""Signed records of the directory: what a peer says about itself, and how others check it.

A stored value is msgpack of [name, payload, public key, signature]. The signature covers run id, name and payload,
and the public key must hash to the peer id in the payload: a record can neither be forged nor moved to another key or
run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spesd.swarm.identity import MAX_PUBLIC_KEY_BYTES, Identity, verify
from spesd.swarm.wire import WireError, pack, unpack

MAX_RECORD_BYTES = 64 << 10
MAX_RECORD_SECONDS = 3600.0
PEERS = "peers"
ROUND = "round"

UnitId = Annotated[str, Field(pattern=r"^[a-z]{1,16}-[0-9]{1,6}$")]
PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{40,64}$")]
Address = Annotated[str, Field(pattern=r"^/[!-~]{1,255}$")]


class Record(BaseModel):
    """What every record has: its writer and its life, in unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    peer: PeerId
    round: int = Field(ge=0, le=2**53)
    issued: float = Field(ge=0)
    expires: float = Field(ge=0)

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Raises ValidationError."""
        return cls.model_validate_json(payload)

    def payload(self) -> bytes:
        """The bytes that are signed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


class PeerRecord(Record):
    """Under `peers`: who is here, where, in which state and round, and which units it trains."""

    kind: Literal["peer"] = "peer"
    addresses: tuple[Address, ...] = Field(max_length=16)
    state: str = Field(pattern=r"^[a-z][a-z-]{0,31}$", description="'gone' withdraws the record")
    owned: tuple[UnitId, ...] = Field(default=(), max_length=2048)
    version: str = Field(max_length=64, description="version of spesd")


class Claim(Record):
    """Under `owners/<unit>` and under `round`: the peer trains this unit, or has reached this round."""

    kind: Literal["claim"] = "claim"
    held: bool = True


def owners_name(unit: str) -> str:
    """Name of the record set of a unit's owners."""
    return f"owners/{unit}"


def dht_key(run_id: str, name: str) -> str:
    """Key under which a record set lies in the DHT."""
    return f"{run_id}/{name}"


def seal(run_id: str, name: str, record: Record, identity: Identity) -> bytes:
    """The stored value of `record`."""
    payload = record.payload()
    return pack([name, payload, identity.public_key, identity.sign(_signed_bytes(run_id, name, payload))])


def unseal(run_id: str, value: bytes, peer: str, now: float) -> tuple[str, Record]:
    """Check a stored value found under subkey `peer`; returns the name it was signed for and the record.

    Raises WireError with a short reason.
    """
    match unpack(value, MAX_RECORD_BYTES, max_depth=1):
        case [str() as name, bytes() as payload, bytes() as public_key, bytes() as signature]:
            pass
        case _:
            raise WireError("shape")
    if len(public_key) > MAX_PUBLIC_KEY_BYTES:
        raise WireError("key too long")
    kind: type[Record] = PeerRecord if name == PEERS else Claim
    try:
        record = kind.parse(payload)
    except ValidationError:
        raise WireError("fields") from None
    if record.peer != peer:
        raise WireError("other peer")
    if record.expires <= now:
        raise WireError("expired")
    if record.expires > now + MAX_RECORD_SECONDS:
        raise WireError("expires too late")
    if not verify(peer, public_key, _signed_bytes(run_id, name, payload), signature):
        raise WireError("signature")
    return name, record


def _signed_bytes(run_id: str, name: str, payload: bytes) -> bytes:
    context = f"spesd record {run_id} {name}\n".encode()
    return context + hashlib.sha256(payload).digest()
