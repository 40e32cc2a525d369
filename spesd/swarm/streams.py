"""The serving side of a stream: admission, deadlines, refusals. It knows nothing of libp2p."""

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
from spesd.swarm.kept_streams import MORE, RECEIPT_BYTES, RECEIVED
from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import Buffer, WireError, encode_header, read_header, read_payload, write_message

log = structlog.get_logger(__name__)

_POLITE_REFUSALS = 16
"""So many streams beyond the limit are told that we are busy; the others are just closed."""

_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 64 << 20
_HANG_UP_SECONDS = 5.0
"""So long a caller may take to say goodbye once it was answered."""


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
    waiting_seconds: float = 30.0
    """So long a stream is kept open for another request."""
    streams: int = 256
    streams_per_peer: int = 64
    waiting_streams: int = 128
    waiting_per_peer: int = 32
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
    waiting_streams: Counter[str] = field(default_factory=Counter)
    promised_bytes: int = 0

    @contextlib.contextmanager
    def stream(self, peer: str) -> Iterator[int]:
        """Yields by how many streams this peer, or all together, are beyond the limit; 0 or less admits the stream."""
        limits = self.limits
        with _one_more(self.open_streams, peer):
            yield max(self.open_streams[peer] - limits.streams_per_peer, self.open_streams.total() - limits.streams)

    def may_wait(self, peer: str) -> bool:
        """Whether another stream of this peer may be kept open without a request."""
        limits, waiting = self.limits, self.waiting_streams
        return waiting[peer] < limits.waiting_per_peer and waiting.total() < limits.waiting_streams

    @contextlib.contextmanager
    def waiting(self, peer: str) -> Iterator[float]:
        """Count a stream that is open without a request. Yields how long it may be: not long if there are too many."""
        seconds = self.limits.waiting_seconds if self.may_wait(peer) else _HANG_UP_SECONDS
        with _one_more(self.waiting_streams, peer):
            yield seconds

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


@contextlib.contextmanager
def _one_more(count: Counter[str], peer: str) -> Iterator[None]:
    count[peer] += 1
    try:
        yield
    finally:
        count[peer] -= 1
        if not count[peer]:
            del count[peer]


@dataclass(frozen=True)
class _Encoded:
    """An answer as it goes out."""

    header: bytes
    payload: Buffer = b""
    urgent: bool = True


@dataclass
class Service:
    """One protocol that this peer answers. A stream carries one request after the other; `handler` may change."""

    protocol: str
    handler: Handler
    max_payload: PayloadLimit
    admission: Admission
    traffic: Traffic

    async def serve(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a stream from `peer`, one after the other. Never raises, except when cancelled."""
        try:
            while await self._serve_one(peer, reader, writer):
                with self.admission.waiting(peer) as seconds:
                    if not await _asks_again(reader, seconds):
                        break
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

    async def _serve_one(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Returns whether the caller was told that another may follow."""
        with self.admission.stream(peer) as excess:
            if excess <= 0:
                if await self._answer(peer, reader, writer):
                    return True
            elif excess <= _POLITE_REFUSALS:
                await self._refuse(peer, writer, Refused("busy", "too many requests at once; retry later"))
            else:
                return False
            # p2pd resets a stream that we close, which would overtake what the caller's p2pd has not read yet
            await _asks_again(reader, _HANG_UP_SECONDS)
            return False

    async def _answer(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request and answer it. Returns whether the caller was told that another may follow."""
        limits, received = self.admission.limits, self.traffic.down(peer, self.protocol, True)
        async with asyncio.timeout(limits.header_seconds) as received.deadline:
            header = await read_header(reader, received)
        body, size, seconds = _parse_request(header)
        seconds = min(seconds, limits.handler_seconds)
        again = self.admission.may_wait(peer)
        try:
            self._check_size(body, size)
            with self.admission.payload(size):
                async with asyncio.timeout(limits.payload_seconds(size)) as received.deadline:
                    payload = await read_payload(reader, size, limits.idle_seconds, received)
                size = 0
                answer = await self._handle(peer, body, payload, seconds, again)
            await self._send(peer, reader, writer, answer, seconds)
            return again
        except Refused as refusal:
            await self._refuse(peer, writer, refusal, again and not size)
            if size:
                await _discard(reader)
            return again and not size

    async def _refuse(self, peer: str, writer: asyncio.StreamWriter, refusal: Refused, again: bool = False) -> None:
        answer = {"ok": False, "code": refusal.code, "message": str(refusal), "fields": refusal.fields, "again": again}
        await self._write(peer, writer, _Encoded(encode_header(answer)))

    def _check_size(self, body: dict[str, Any], size: int) -> None:
        try:
            limit = self.max_payload(body) if callable(self.max_payload) else self.max_payload
        except (KeyError, TypeError, ValueError):
            raise Refused("bad-request", "the body does not say what the payload is") from None
        if size > limit:
            raise Refused(
                "too-large", f"payload of {size} bytes, at most {limit} are accepted", {"size": size, "limit": limit}
            )

    async def _handle(self, peer: str, body: dict[str, Any], payload: bytes, seconds: float, again: bool) -> _Encoded:
        try:
            async with asyncio.timeout(seconds):
                answer = await self.handler(peer, body, payload)
            reply = answer if isinstance(answer, Reply) else Reply(answer)
            size = memoryview(reply.payload).nbytes
            header = encode_header({"ok": True, "body": reply.body, "payload": size, "again": again})
            return _Encoded(header, reply.payload, reply.urgent)
        except Refused:
            raise
        except TimeoutError:
            raise Refused("timeout", f"not answered within {seconds:.1f} s") from None
        except Exception:
            log.exception("handler failed", peer=peer, protocol=self.protocol)
            raise Refused("internal", "the request failed here; see this peer's log") from None

    async def _send(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Encoded, seconds: float
    ) -> None:
        """Send an answer, if its turn comes within `seconds`; if it is not small, wait until it is there."""
        size = memoryview(answer.payload).nbytes
        async with asyncio.timeout(seconds) as turn, self.traffic.sending(peer, size, answer.urgent):
            turn.reschedule(None)
            await self._write(peer, writer, answer)
            if size > RECEIPT_BYTES:
                async with asyncio.timeout(self.admission.limits.payload_seconds(size)):
                    if await reader.readexactly(1) != RECEIVED:
                        raise WireError("no receipt for an answer's payload")

    async def _write(self, peer: str, writer: asyncio.StreamWriter, answer: _Encoded) -> None:
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


async def _asks_again(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Whether the caller announces another request; False if it says goodbye, closes the stream, or is silent."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await reader.read(1) == MORE
    return False
