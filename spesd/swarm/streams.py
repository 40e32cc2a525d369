"""The serving side of one stream: admission, deadlines, refusals. It knows nothing of libp2p."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog

from spesd.swarm.errors import Refused
from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import Buffer, WireError, encode_header, read_header, read_payload, write_message

log = structlog.get_logger(__name__)

_POLITE_REFUSALS = 16
"""So many streams beyond the limit are told that we are busy; the others are just closed."""

_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 64 << 20
_HANG_UP_SECONDS = 5.0
"""So long a caller may take to close the stream once it was answered."""


@dataclass(frozen=True)
class Reply:
    """An answer: a small body and a raw payload. Under a cap those that are `urgent` go first."""

    body: dict[str, Any] = field(default_factory=dict)
    payload: Buffer = b""
    urgent: bool = True


Handler = Callable[[str, dict[str, Any], bytes], Awaitable[Reply | dict[str, Any]]]
"""(proven peer id of the caller, body, payload) -> answer. May raise Refused."""

PayloadLimit = int | Callable[[dict[str, Any]], int]
"""Most payload bytes of a request, or a function of its body."""


@dataclass(frozen=True)
class StreamLimits:
    """What a stranger may cost us."""

    header_seconds: float = 10.0
    idle_seconds: float = 15.0
    least_rate: float = 16 << 10
    """Bytes per second below which a payload is too slow, after `idle_seconds` of grace."""
    handler_seconds: float = 600.0
    streams: int = 256
    streams_per_peer: int = 64
    inbound_bytes: int = 2 << 30
    """Payload bytes that all open requests together may promise."""

    def payload_seconds(self, size: int) -> float:
        """Deadline for `size` payload bytes."""
        return self.idle_seconds + size / self.least_rate


@dataclass
class Admission:
    """Counts open inbound streams and promised bytes."""

    limits: StreamLimits
    open_streams: Counter[str] = field(default_factory=Counter)
    promised_bytes: int = 0

    @contextlib.contextmanager
    def stream(self, peer: str) -> Iterator[int]:
        """Yields by how many streams this peer, or all together, are beyond the limit; 0 or less admits the stream."""
        limits = self.limits
        self.open_streams[peer] += 1
        try:
            yield max(self.open_streams[peer] - limits.streams_per_peer, self.open_streams.total() - limits.streams)
        finally:
            self.open_streams[peer] -= 1
            if not self.open_streams[peer]:
                del self.open_streams[peer]

    @contextlib.contextmanager
    def payload(self, size: int) -> Iterator[None]:
        """Holds `size` bytes of the common budget. Raises Refused when it is used up."""
        if self.promised_bytes + size > self.limits.inbound_bytes:
            raise Refused("busy", f"{self.promised_bytes} payload bytes are on their way here already; retry later")
        self.promised_bytes += size
        try:
            yield
        finally:
            self.promised_bytes -= size


@dataclass(frozen=True)
class _Encoded:
    """An answer as it goes out."""

    header: bytes
    payload: Buffer = b""
    urgent: bool = True


@dataclass(frozen=True)
class Service:
    """One protocol that this peer answers."""

    protocol: str
    handler: Handler
    max_payload: PayloadLimit
    admission: Admission
    traffic: Traffic

    async def serve(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a stream from `peer`. Never raises, except when cancelled."""
        try:
            with self.admission.stream(peer) as excess:
                if excess <= 0:
                    await self._answer(peer, reader, writer)
                elif excess <= _POLITE_REFUSALS:
                    await self._refuse(peer, reader, writer, Refused("busy", "too many requests at once; retry later"))
                else:
                    return
                await _hung_up(reader)
        except WireError as error:
            log.warning("garbage from peer", peer=peer, protocol=self.protocol, reason=str(error))
        except TimeoutError:
            log.warning("peer too slow, stream closed", peer=peer, protocol=self.protocol)
        except (OSError, EOFError) as error:
            log.debug("stream broke", peer=peer, protocol=self.protocol, reason=repr(error))
        except Exception:
            log.exception("stream failed", peer=peer, protocol=self.protocol)
        finally:
            writer.close()

    async def _answer(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits, received = self.admission.limits, self.traffic.down(peer, self.protocol, True)
        async with asyncio.timeout(limits.header_seconds) as received.deadline:
            header = await read_header(reader, received)
        body, size, seconds = _parse_request(header)
        try:
            self._check_size(body, size)
            with self.admission.payload(size):
                async with asyncio.timeout(limits.payload_seconds(size)) as received.deadline:
                    payload = await read_payload(reader, size, limits.idle_seconds, received)
                size = 0
                answer = await self._handle(peer, body, payload, min(seconds, limits.handler_seconds))
            await self._send(peer, writer, answer)
        except Refused as refusal:
            await self._refuse(peer, reader if size else None, writer, refusal)

    async def _refuse(
        self, peer: str, unread: asyncio.StreamReader | None, writer: asyncio.StreamWriter, refusal: Refused
    ) -> None:
        answer = {"ok": False, "code": refusal.code, "message": str(refusal), "fields": refusal.fields}
        await self._send(peer, writer, _Encoded(encode_header(answer)))
        if unread:
            await _discard(unread)

    def _check_size(self, body: dict[str, Any], size: int) -> None:
        try:
            limit = self.max_payload(body) if callable(self.max_payload) else self.max_payload
        except (KeyError, TypeError, ValueError):
            raise Refused("bad-request", "the body does not say what the payload is") from None
        if size > limit:
            raise Refused(
                "too-large", f"payload of {size} bytes, at most {limit} are accepted", {"size": size, "limit": limit}
            )

    async def _handle(self, peer: str, body: dict[str, Any], payload: bytes, seconds: float) -> _Encoded:
        try:
            async with asyncio.timeout(seconds):
                answer = await self.handler(peer, body, payload)
            reply = answer if isinstance(answer, Reply) else Reply(answer)
            size = memoryview(reply.payload).nbytes
            return _Encoded(
                encode_header({"ok": True, "body": reply.body, "payload": size}), reply.payload, reply.urgent
            )
        except Refused:
            raise
        except TimeoutError:
            raise Refused("timeout", f"not answered within {seconds:.1f} s") from None
        except Exception:
            log.exception("handler failed", peer=peer, protocol=self.protocol)
            raise Refused("internal", "the request failed here; see this peer's log") from None

    async def _send(self, peer: str, writer: asyncio.StreamWriter, answer: _Encoded) -> None:
        limits, sent = self.admission.limits, self.traffic.up(peer, self.protocol, answer.urgent)
        size = memoryview(answer.payload).nbytes
        with sent.limiter.promise(size):
            async with asyncio.timeout(limits.payload_seconds(size)) as sent.deadline:
                await write_message(writer, answer.header, answer.payload, limits.idle_seconds, sent)


def _parse_request(header: dict[str, Any]) -> tuple[dict[str, Any], int, float]:
    """Body, payload length and the seconds that the caller will wait. Raises WireError."""
    match header:
        case {"body": dict() as body, "payload": int() as size, "timeout": int() | float() as seconds}:
            if size >= 0 and math.isfinite(seconds) and seconds > 0:
                return body, size, float(seconds)
    raise WireError("request header has an unknown shape")


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read on until a refused caller has seen the refusal: closing with unread bytes would drop the answer."""
    left = _DISCARD_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while left > 0 and (frame := await reader.read(1 << 20)):
                left -= len(frame)


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Wait until the caller has closed the stream. p2pd resets a stream that we close first, and a reset overtakes what
    the caller's p2pd has not read yet: the answer would be lost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HANG_UP_SECONDS):
            await reader.read(1)
