"""What can go wrong between peers. Every message names the peer, the wait or the blob that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SwarmError(Exception):
    """Base of all expected errors of this package."""


class IdentityError(SwarmError):
    """The identity file cannot be used; the message says what to do."""


class NetworkNotStarted(SwarmError):
    """p2pd did not come up; the message has its own words."""


class TransportError(SwarmError):
    """A request to one peer failed. `peer` is its id, or the address that was dialled."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(message)
        self.peer = peer


class PeerUnreachable(TransportError):
    """The peer could not be dialled, or the connection broke before it had answered."""


class PeerTimeout(TransportError):
    """The peer did not answer by the deadline."""


class PeerMisbehaved(TransportError):
    """The peer answered with bytes that no honest peer sends."""


class PeerRefused(TransportError):
    """The peer understood the request and said no. `code` is for programs, the message for people."""

    def __init__(self, peer: str, code: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(peer, f"peer {peer} refused ({code}): {message}")
        self.code = code
        self.fields = dict(fields or {})


class Refused(Exception):
    """Raised by a handler to say no; it reaches the caller as :class:`PeerRefused`."""

    def __init__(self, code: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.fields = dict(fields or {})


class CannotJoin(SwarmError):
    """None of the given addresses led into the swarm. Retry with backoff. `reasons` maps address to reason."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("cannot join: " + ("; ".join(f"{a}: {r}" for a, r in reasons.items()) or "no address given"))
        self.reasons = dict(reasons)


class DirectoryTimeout(SwarmError):
    """The DHT did not finish by the deadline."""


class BlobMissing(SwarmError):
    """The blob is not in the store, or its file was damaged and has been removed."""


class BlobUnavailable(SwarmError):
    """No source delivered the blob. `reasons` maps peer to reason."""

    def __init__(self, hash: str, message: str, reasons: Mapping[str, str]) -> None:
        super().__init__(f"blob {hash[:16]}: {message}: " + "; ".join(f"{p}: {r}" for p, r in reasons.items()))
        self.hash = hash
        self.reasons = dict(reasons)
