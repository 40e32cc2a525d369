"""The asking side of a stream: one request and its answer, on a stream that was kept or on a new one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from spesd.swarm.errors import PeerRefused
from spesd.swarm.kept_streams import MORE, RECEIPT_BYTES, RECEIVED, KeptStreams, Key, Stream
from spesd.swarm.lines import SMALL_BYTES, Lines
from spesd.swarm.streams import Reply
from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import Buffer, WireError, read_header, read_payload, write_message


@dataclass(frozen=True)
class Request:
    """What is sent to `peer`, and most bytes of the answer's payload."""

    peer: str
    protocol: str
    header: bytes
    payload: Buffer
    max_reply: int
    urgent: bool

    @property
    def key(self) -> Key:
        return self.peer, self.protocol

    @property
    def is_small(self) -> bool:
        """Whether the time to its answer tells of the line's delay."""
        return len(self.header) + memoryview(self.payload).nbytes <= SMALL_BYTES


@dataclass(frozen=True)
class _Answer:
    """A reply or a refusal, and whether the other end waits for another request on the same stream."""

    again: bool
    reply: Reply
    refusal: PeerRefused | None = None


class _Stale(Exception):
    """A kept stream that the other end has closed before it answered."""


class Outbound:
    """Asks other peers. A request may reach a peer twice, where a connection breaks before the answer."""

    def __init__(self, traffic: Traffic, lines: Lines, idle_seconds: float) -> None:
        self._traffic, self._lines, self._idle_seconds = traffic, lines, idle_seconds
        self._kept = KeptStreams()

    async def ask(self, request: Request, new_stream: Callable[[], Awaitable[Stream]]) -> Reply:
        """The answer. The caller sets the deadline.

        Raises PeerRefused, WireError, TimeoutError, EOFError, OSError, and what `new_stream` does.
        """
        async with self._traffic.sending(request.peer, memoryview(request.payload).nbytes, request.urgent):
            stream = self._kept.take(request.key)
            if stream is not None:
                try:
                    return await self._ask_on(stream, request, MORE)
                except _Stale:
                    pass
            return await self._ask_on(await new_stream(), request, b"")

    async def close(self) -> None:
        """Close the streams that wait for another request."""
        await self._kept.close()

    async def _ask_on(self, stream: Stream, request: Request, before: bytes) -> Reply:
        """Ask on `stream`, to which `before` goes first; afterwards it is kept if its other end waits for more."""
        sending = asyncio.create_task(self._send(stream, request, before))
        answered = False
        try:  # a refusal may come before all is sent, so read at the same time
            answer = await self._receive(stream, request, kept=bool(before))
            if answer.again or answer.refusal is None:
                await sending  # the other end has read it all, but our task may not have heard of that yet
            answered = sending.done()
            if memoryview(answer.reply.payload).nbytes > RECEIPT_BYTES:
                stream.writer.write(RECEIVED)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if not answered:
                stream.writer.close()
        if answered and answer.again and stream.is_open:
            self._kept.keep(request.key, stream)
        elif answered:
            self._kept.dismiss(stream)
        if answer.refusal is not None:
            raise answer.refusal
        return answer.reply

    async def _receive(self, stream: Stream, request: Request, kept: bool) -> _Answer:
        received = self._traffic.down(request.peer, request.protocol, request.urgent)
        asked = time.monotonic()
        try:
            header = await read_header(stream.reader, received)
        except (EOFError, ConnectionError):
            if kept:
                raise _Stale from None
            raise
        if request.is_small:
            self._lines.answered(request.peer, time.monotonic() - asked)
        answer, size = _parse_answer(request, header)
        payload = await read_payload(stream.reader, size, self._idle_seconds, received)
        return replace(answer, reply=replace(answer.reply, payload=payload))

    async def _send(self, stream: Stream, request: Request, before: bytes) -> None:
        sent = self._traffic.up(request.peer, request.protocol, request.urgent)
        try:
            await write_message(stream.writer, before + request.header, request.payload, self._idle_seconds, sent)
        except (TimeoutError, OSError):
            stream.writer.close()  # wakes the reader of the answer, which says what happened


def _parse_answer(request: Request, header: dict[str, Any]) -> tuple[_Answer, int]:
    """The answer but for its payload, and the size of that. Raises WireError."""
    again = header.get("again") is True
    match header:
        case {"ok": True, "body": dict() as body, "payload": int() as size} if size >= 0:
            if size > request.max_reply:
                raise WireError(f"answer of {size} bytes, at most {request.max_reply} were asked for")
            return _Answer(again, Reply(body)), size
        case {"ok": False, "code": str() as code, "message": str() as message, "fields": dict() as fields}:
            return _Answer(again, Reply(), PeerRefused(request.peer, code[:64], message[:1024], fields)), 0
    raise WireError("answer header has an unknown shape")
