"""Streams to other peers that wait for the next request.

A stream serves many requests, and the end that accepted it closes it first. For p2pd closes both directions of a stream
at once and resets it, and quic-go 0.40, which is in hivemind's p2pd, never forgets a stream whose reset comes before
its end was read. An end that accepted 256 such streams lets its peer open no more; one that opened them loses 1.5 kB.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import NamedTuple

KEPT_SECONDS = 20.0
"""Less than the other end waits for another request (`StreamLimits.waiting_seconds`)."""

KEPT_STREAMS = 128

MORE, GOODBYE, RECEIVED = b"\x01", b"\x00", b"\x02"
"""What the caller sends after an answer: another request follows; close the stream; the payload is here."""

RECEIPT_BYTES = 4096
"""Payloads of answers above this are receipted, so that who sends them knows what is still on its way."""

_FAREWELL_SECONDS = 5.0

Key = tuple[str, str]
"""Peer id and protocol."""


class Stream(NamedTuple):
    """Our end of a stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_open(self) -> bool:
        """Whether the other end has not closed it, as far as we know."""
        return not (self.reader.at_eof() or self.reader.exception() or self.writer.is_closing())


class KeptStreams:
    """Streams without a request, by peer and protocol. Use it from one event loop."""

    def __init__(self) -> None:
        self._kept: defaultdict[Key, list[Stream]] = defaultdict(list)
        self._timers: dict[Stream, asyncio.TimerHandle] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._timers)

    def take(self, key: Key) -> Stream | None:
        """The stream that was used last of those that are still open."""
        while streams := self._kept.get(key):
            stream = streams[-1]
            self._forget(key, stream)
            if stream.is_open:
                return stream
            stream.writer.close()
        return None

    def keep(self, key: Key, stream: Stream) -> None:
        """Keep a stream for the next request, for a while and if there are not too many."""
        if len(self) >= KEPT_STREAMS:
            self.dismiss(stream)
            return
        self._kept[key].append(stream)
        self._timers[stream] = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._expire, key, stream)

    def dismiss(self, stream: Stream) -> None:
        """Have the other end close a stream on which everything was answered."""
        farewell = asyncio.create_task(_part(stream))
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """Close all streams at once."""
        for key in list(self._kept):
            for stream in list(self._kept[key]):
                self._forget(key, stream)
                stream.writer.close()
        for farewell in self._farewells:
            farewell.cancel()
        await asyncio.gather(*self._farewells, return_exceptions=True)

    def _expire(self, key: Key, stream: Stream) -> None:
        self._forget(key, stream)
        self.dismiss(stream)

    def _forget(self, key: Key, stream: Stream) -> None:
        self._timers.pop(stream).cancel()
        self._kept[key].remove(stream)
        if not self._kept[key]:
            del self._kept[key]


async def _part(stream: Stream) -> None:
    with contextlib.closing(stream.writer), contextlib.suppress(OSError, TimeoutError):
        stream.writer.write(GOODBYE)
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await stream.reader.read(1)
