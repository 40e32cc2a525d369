"""Who has what of one blob: sources are asked, and asked again while they lack something."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, Protocol

from spesd.swarm.chunks import ChunkList, chunk_count, read_bitmap
from spesd.swarm.errors import PeerMisbehaved, PeerRefused, TransportError
from spesd.swarm.wire import WireError

TRIES = 3
_PAUSE_SECONDS = (0.25, 4.0)
"""First and longest pause before a source is asked again what it has by now."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source has: the whole blob with its chunk list, or `part` of the chunks, without a word for them."""

    chunks: ChunkList | None
    part: Set[int] | None

    @classmethod
    def parse(cls, body: dict[str, Any], payload: bytes, name: str, sizes: range) -> Offer:
        """An offer of blob `name` as it came; its size must lie in `sizes`. Raises WireError."""
        match body:
            case {"size": int() as size} if size not in sizes:
                raise WireError(f"it says {size} bytes, {_spelled(sizes)} are accepted")
            case {"size": int() as size, "part": bytes() as part}:
                return cls(None, read_bitmap(part, chunk_count(size)))
            case {"size": int() as size}:
                return cls(ChunkList.checked(size, payload, name), None)
        raise WireError("an offer without a size")


class Sources(Protocol):
    """The network as the fetch of one blob needs it. Both raise TransportError."""

    async def offer(self, peer: str) -> Offer: ...

    async def chunk(self, peer: str, offset: int, length: int, urgent: bool) -> bytes: ...


def _spelled(sizes: range) -> str:
    return f"exactly {sizes.start}" if len(sizes) == 1 else f"at most {sizes.stop - 1}"


class News:
    """Something has changed: whoever waits looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Return at the next `tell`, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


class Holders:
    """The sources of one blob. `reasons` says of each that was given up why.

    Where the chunk list is `known` without asking, every source is taken to have the whole until it says otherwise.
    """

    def __init__(self, sources: Sources, news: News, known: ChunkList | None = None) -> None:
        self.reasons: dict[str, str] = {}
        self._sources = sources
        self._known = known
        self._news = news
        self._offers: dict[str, Offer] = {}
        self._lacking: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def add(self, peers: Iterable[str]) -> None:
        """Ask these too, unless all is over."""
        for peer in peers:
            if peer in self._tasks or peer in self._offers or self._closed:
                continue
            if self._known is None:
                self._tasks[peer] = asyncio.create_task(self._follow(peer))
            else:
                self._offers[peer] = Offer(self._known, None)
                self._news.tell()

    def lacks(self, peer: str, reason: str) -> None:
        """A source does not have what it was asked for: ask whether it has it by now, unless it had offered it."""
        if peer in self._tasks or self._closed:
            self.give_up(peer, reason)
            return
        del self._offers[peer]
        self._lacking[peer] = reason
        self._tasks[peer] = asyncio.create_task(self._follow(peer))

    async def close(self) -> None:
        """Ask nobody any more."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def give_up(self, peer: str, reason: str) -> None:
        """Have nothing to do with `peer` any more, as far as this blob goes."""
        self.reasons.setdefault(peer, reason)
        self._news.tell()

    @property
    def pending(self) -> bool:
        """Whether the first answer of some source is still to come."""
        return any(peer not in self._offers | self._lacking | self.reasons for peer in self._tasks)

    def lists(self) -> dict[ChunkList, list[str]]:
        """The chunk lists that are still believed by somebody, and by whom."""
        lists: defaultdict[ChunkList, list[str]] = defaultdict(list)
        for peer, offer in self._offers.items():
            if offer.chunks is not None and peer not in self.reasons:
                lists[offer.chunks].append(peer)
        return lists

    def serving(self, chunks: ChunkList) -> list[str]:
        """Sources that may be asked for the chunks of this list."""
        return [
            peer
            for peer, offer in self._offers.items()
            if peer not in self.reasons and (offer.chunks == chunks or offer.part is not None)
        ]

    def serves(self, peer: str) -> bool:
        """Whether `peer` has anything, as far as we know, and is not given up."""
        return peer in self._offers and peer not in self.reasons

    def vouches(self, peer: str) -> bool:
        """Whether `peer` gave a chunk list, and so is bound to it."""
        return self._offers[peer].chunks is not None

    def part(self, peer: str) -> Set[int] | None:
        """The chunks that `peer` has; None if it has all."""
        return self._offers[peer].part

    def excuses(self) -> dict[str, str]:
        """Why each source did not deliver all, as far as it is known."""
        partial = {peer: "it has only a part yet" for peer, offer in self._offers.items() if offer.part is not None}
        return self._lacking | partial | self.reasons

    async def _follow(self, peer: str) -> None:
        """Ask until `peer` has the whole blob, or is given up."""
        failures = 0
        pause, longest = _PAUSE_SECONDS
        while peer not in self.reasons:
            try:
                offer = await self._sources.offer(peer)
            except PeerRefused as refusal:
                if refusal.code == "not-found":
                    self._lacking[peer] = str(refusal)
                elif refusal.code != "busy":
                    self.give_up(peer, str(refusal))
            except TransportError as error:
                failures += 1
                if failures == TRIES or isinstance(error, PeerMisbehaved):
                    self.give_up(peer, str(error))
            else:
                if offer != self._offers.get(peer):
                    pause = _PAUSE_SECONDS[0]  # it gets on with it
                self._lacking.pop(peer, None)
                self._offers[peer] = offer
            self._news.tell()
            if peer in self._offers and self.vouches(peer):
                return
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, longest)
