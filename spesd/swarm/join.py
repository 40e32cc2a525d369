"""The first words between a joiner, who knows only an address, and any peer of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spesd.config.manifest import MAX_MANIFEST_BYTES, Hash
from spesd.swarm.errors import PeerMisbehaved
from spesd.swarm.transport import HELLO_PROTOCOL, Transport

PROTOCOL_VERSION = 4
MAX_CLOCK_SKEW_SECONDS = 3.0
"""hivemind's DHT refuses peers whose clocks differ by more."""


class HelloInfo(BaseModel):
    """What a peer tells a joiner about its run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: Hash
    manifest_hash: Hash
    manifest_bytes: int = Field(ge=1, le=MAX_MANIFEST_BYTES)
    version: str = Field(max_length=64, description="version of spesd")
    protocol: int = Field(default=PROTOCOL_VERSION, ge=0, le=2**31)


class Hello(BaseModel):
    """The answer: who answered, its run, and how far its clock is ahead of ours in seconds."""

    model_config = ConfigDict(frozen=True)

    peer: str
    info: HelloInfo
    clock_skew: float

    @property
    def clock_agrees(self) -> bool:
        """False when the DHT would refuse us for our clock."""
        return abs(self.clock_skew) <= MAX_CLOCK_SKEW_SECONDS


async def serve_hello(transport: Transport, info: Callable[[], HelloInfo]) -> None:
    """Answer joiners with what `info` says at that moment."""

    async def answer(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {"info": info().model_dump(), "time": time.time()}

    await transport.serve(HELLO_PROTOCOL, answer)


async def hello(transport: Transport, address: str, timeout: float) -> Hello:
    """Dial a full multiaddr and ask for the run behind it.

    Raises ValueError for a malformed address, and the errors of :meth:`Transport.request`.
    """
    deadline = time.monotonic() + timeout
    peer = await transport.connect(address, timeout)
    asked = time.time()
    left = max(0.1, deadline - time.monotonic())
    reply = await transport.request(peer, HELLO_PROTOCOL, {}, timeout=left, max_reply=0)
    middle = (asked + time.time()) / 2
    match reply.body:
        case {"info": dict() as fields, "time": int() | float() as remote}:
            try:
                return Hello(peer=peer, info=HelloInfo.model_validate(fields), clock_skew=remote - middle)
            except ValidationError as error:
                reason = f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
                raise PeerMisbehaved(peer, f"peer {peer} sent a malformed hello: {reason}") from None
    raise PeerMisbehaved(peer, f"peer {peer} sent a hello of unknown shape")


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two nested mappings differ, as dotted name -> (mine, theirs); None stands for absent."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= {f"{name}.{below}": pair for below, pair in differences(a, b).items()}
        elif a != b:
            found[name] = (a, b)
    return found
