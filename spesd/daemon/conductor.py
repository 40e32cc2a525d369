"""The conductor: runs one `SyncPeer` on the real world.

It hands events to the protocol and carries out its effects: messages over the transport, blobs through the exchange,
arithmetic in threads, snapshots and shifts at the trainer. All state is touched on the event loop only.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import structlog
from blake3 import blake3

from spesd.daemon.fetcher import Fetcher
from spesd.daemon.store import ChainFile, Store
from spesd.swarm.blobs import BlobExchange
from spesd.swarm.errors import BlobMissing, PeerRefused, PeerTimeout, Refused, TransportError
from spesd.swarm.transport import Transport, protocol_name
from spesd.swarm.wire import pack, unpack
from spesd.sync import effects as fx
from spesd.sync.codec import Values
from spesd.sync.codecs import codecs_of
from spesd.sync.ledger import PeerId, UnitId
from spesd.sync.messages import parse
from spesd.sync.packet import max_size
from spesd.sync.peer import SyncPeer
from spesd.sync.workshop import Reduced, Rejected, Workshop

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

TICK_SECONDS = 0.02
"""Least time between two looks at the protocol's deadlines."""

MAX_MESSAGE_BYTES = 4 << 20
"""Most bytes of a message of the protocol: a trail of many rounds among many peers is the longest."""

BUSY_SECONDS = 0.5
"""Pause before a peer that said it was busy is asked again."""

STRIKES, BAN_SECONDS = 3, 600.0
KEPT_ROUNDS = 64


class TrainerPort(Protocol):
    """What the protocol needs of the trainer."""

    def take_snapshot(self, round_: int) -> None: ...

    def snapshot(self, round_: int, unit: UnitId) -> Values | None:
        """Values of the snapshot for `round_`, None if there is none (any more)."""
        ...

    @property
    def life(self) -> int:
        """Grows when the trainer loses its parameters."""
        ...

    def moved(self, unit: UnitId, shift: Values, agreed: Values, round_: int, life: int) -> None:
        """The agreed state of a unit has changed; `shift` was worked out for the trainer's `life`."""
        ...

    def round_ended(self, report: fx.RoundEnded) -> None: ...


class Conductor:
    """Drives `peer`. Call `serve` once the ledger is restored. Blobs in `keep` are never removed."""

    def __init__(
        self,
        peer: SyncPeer,
        workshop: Workshop,
        store: Store,
        transport: Transport,
        blobs: BlobExchange,
        trainer: TrainerPort,
        keep: Iterable[str],
    ) -> None:
        self.peer, self.workshop, self.store = peer, workshop, store
        self.rounds: deque[fx.RoundEnded] = deque(maxlen=KEPT_ROUNDS)
        self.strikes: Counter[PeerId] = Counter()
        self.disk_error = ""
        self._transport, self._blobs, self._trainer = transport, blobs, trainer
        self._codec = codecs_of(peer.context.settings).usual
        self._keep_always = frozenset(keep)
        self._banned_until: dict[PeerId, float] = {}
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="workshop")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")  # no arithmetic waits for it
        self._locks: defaultdict[UnitId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetcher = Fetcher(blobs, peer.context.settings.packet_seconds, self._fetched)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def now(self) -> float:
        """The protocol's clock: monotonic seconds."""
        return self._loop.time()

    async def serve(self) -> None:
        """Answer other peers, and start the protocol's clock."""
        run = self.peer.context.run
        await self._transport.serve(protocol_name(run, "message"), self._on_message, max_payload=MAX_MESSAGE_BYTES)
        largest = max(max_size(self._codec.payload_size(size)) for size in self.peer.context.sizes.values())
        await self._transport.serve(protocol_name(run, "contribution"), self._on_contribution, max_payload=largest)
        self._fetcher.start()
        self.drain()

    async def close(self) -> None:
        """Stop the clock and everything under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._fetcher.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in (self._threads, self._disk):
            await asyncio.to_thread(threads.shutdown)

    def tell(self, event: Callable[[float], None]) -> None:
        """Hand the protocol an event, a call that takes the time, and carry out what follows from it."""
        try:
            event(self.now)
        finally:
            self.drain()  # also after an error: without it the protocol's clock would stand still

    def drain(self) -> None:
        """Carry out pending effects, and set the clock to the next deadline."""
        if self._closed:
            return
        while effects := self.peer.take_effects():
            for effect in effects:
                self._carry_out(effect)
        if self._timer is not None:
            self._timer.cancel()
        due = max(self.peer.deadline(), self.now + TICK_SECONDS)
        self._timer = self._loop.call_at(due, self.tell, self.peer.on_time)

    # Effects ---------------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Send():
                self._spawn(self._send(effect))
            case fx.SendContribution():
                self._spawn(self._send_contribution(effect))
            case fx.TakeSnapshot():
                self._trainer.take_snapshot(effect.round)
            case fx.Encode():
                self._spawn(self._encode(effect))
            case fx.Reduce():
                self._spawn(self._reduce(effect))
            case fx.Fetch():
                self._fetcher.ask(effect)
            case fx.Commit():
                self._spawn(self._commit(effect))
            case fx.Adopt():
                self._spawn(self._adopt(effect))
            case fx.Discard():
                self._spawn(self._discard(effect))
            case fx.Strike():
                self._strike(effect.peer, effect.reason)
            case fx.RoundEnded():
                self.rounds.append(effect)
                self._trainer.round_ended(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the protocol failed", exc_info=task.exception())

    async def _in_thread(self, unit: UnitId, work: Callable[..., _T], *args: Any) -> _T:
        """Arithmetic of one unit: never on the loop, never two at a time."""
        async with self._locks[unit]:
            return await self._loop.run_in_executor(self._threads, work, *args)

    async def _send(self, effect: fx.Send) -> None:
        kind = type(effect.message).__name__
        payload = pack(effect.message.model_dump())
        seconds, asked = self.peer.context.settings.coordinator_seconds, self._transport.traffic.clock()
        try:
            await self._transport.request(
                effect.to,
                protocol_name(self.peer.context.run, "message"),
                {"kind": kind},
                payload,
                timeout=seconds,
                max_reply=0,
            )
        except PeerRefused as error:
            log.info("message refused", to=effect.to, kind=kind, reason=str(error))
        except TransportError as error:
            log.info("message not delivered", to=effect.to, kind=kind, reason=str(error))
            if isinstance(error, PeerTimeout) and self._transport.traffic.heard_since(effect.to, asked):
                return  # its line is full, or ours
            self.tell(lambda now: self.peer.on_unreachable(now, effect.to))

    async def _send_contribution(self, effect: fx.SendContribution) -> None:
        body = {"round": effect.round, "roster": effect.roster, "unit": effect.unit}
        try:
            payload = await asyncio.to_thread(self.store.blobs.get, effect.blob)
            await self._push(effect.to, body, payload)
        except PeerRefused as error:
            log.info("contribution refused", to=effect.to, unit=effect.unit, round=effect.round, reason=str(error))
        except BlobMissing:
            log.info("contribution is no longer wanted", unit=effect.unit, round=effect.round)
        except PeerTimeout as error:  # it is slow, or we are, but not gone; the round has its own deadlines
            log.info("contribution not in time", to=effect.to, unit=effect.unit, reason=str(error))
        except TransportError as error:
            log.info("contribution not delivered", to=effect.to, unit=effect.unit, reason=str(error))
            self.tell(lambda now: self.peer.on_unreachable(now, effect.to))

    async def _push(self, to: PeerId, body: dict[str, Any], payload: bytes) -> None:
        """Send a contribution; a reducer that has its hands full is asked again until the time is over."""
        protocol, seconds = (
            protocol_name(self.peer.context.run, "contribution"),
            self.peer.context.settings.contribute_seconds,
        )
        deadline = self.now + seconds
        while True:
            try:
                await self._transport.request(to, protocol, body, payload, timeout=deadline - self.now, max_reply=0)
                return
            except PeerRefused as error:
                if error.code != "busy" or self.now + BUSY_SECONDS >= deadline:
                    raise
            await asyncio.sleep(BUSY_SECONDS)

    async def _encode(self, effect: fx.Encode) -> None:
        snapshot, life = self._trainer.snapshot(effect.round, effect.unit), self._trainer.life
        blob = None
        try:
            if snapshot is not None:
                blob = await self._in_thread(effect.unit, self.workshop.encode, effect, snapshot)
        except OSError as error:
            self._disk_failed(error, effect.unit)
        if life != self._trainer.life:
            blob = None  # the parameters from which it was made are gone
        self.tell(lambda now: self.peer.on_encoded(now, effect, blob))

    async def _reduce(self, effect: fx.Reduce) -> None:
        try:
            result = await self._in_thread(effect.unit, self.workshop.reduce, effect)
        except OSError as error:
            self._disk_failed(error, effect.unit)
            result = Reduced(None, {})
        self.tell(lambda now: self.peer.on_reduced(now, effect, result.entry, result.refused))

    async def _commit(self, effect: fx.Commit) -> None:
        unit, life = effect.entry.unit, self._trainer.life
        try:
            shift = await self._in_thread(unit, self.workshop.commit, effect)
        except (Rejected, OSError) as error:
            if isinstance(error, OSError):
                self._disk_failed(error, unit)
            log.warning("packet not committed", unit=unit, round=effect.entry.after.version, reason=str(error))
            self.tell(lambda now: self.peer.on_committed(now, effect, False))
            return
        # the shift enters the trainer's queue before any snapshot that the protocol may ask for next
        self._trainer.moved(unit, shift, self.workshop.agreed[unit], effect.entry.after.version, life)
        self.tell(lambda now: self.peer.on_committed(now, effect, True))
        await self._persist(unit)

    async def _adopt(self, effect: fx.Adopt) -> None:
        life = self._trainer.life
        try:
            shift = await self._in_thread(effect.unit, self.workshop.adopt, effect)
        except (Rejected, OSError) as error:
            log.warning("state not adopted", unit=effect.unit, version=effect.head.version, reason=str(error))
            self.tell(lambda now: self.peer.on_adopted(now, effect, False))
            return
        self._trainer.moved(effect.unit, shift, self.workshop.agreed[effect.unit], effect.head.version, life)
        self.tell(lambda now: self.peer.on_adopted(now, effect, True))
        await self._persist(effect.unit)

    async def _persist(self, unit: UnitId) -> None:
        """Write the unit's chain. A full disk is said, and survived: training goes on."""
        chain = ChainFile.of(self.peer.ledger[unit])
        try:
            await self._loop.run_in_executor(self._disk, self.store.save_chain, unit, chain)
            self.disk_error = ""
        except OSError as error:
            self._disk_failed(error, unit)

    def _disk_failed(self, error: OSError, unit: UnitId) -> None:
        self.disk_error = str(error)
        log.error("cannot write to disk", unit=unit, reason=str(error))

    async def _discard(self, effect: fx.Discard) -> None:
        def remove() -> None:
            for blob in effect.blobs:
                if blob not in self._keep_always:
                    self.store.blobs.remove(blob)

        await self._loop.run_in_executor(self._disk, remove)

    def _fetched(self, effect: fx.Fetch, ok: bool) -> None:
        self.tell(lambda now: self.peer.on_fetched(now, effect, ok))

    # What others send ------------------------------------------------------------------------------------------------

    async def _on_message(self, sender: PeerId, body: Mapping[str, Any], payload: bytes) -> dict[str, Any]:
        self._refuse_banned(sender)
        kind = body.get("kind")
        try:
            message = parse(str(kind), unpack(payload, MAX_MESSAGE_BYTES))
        except ValueError as error:
            reason = f"message {kind!r}: {' '.join(str(error).split())[:200]}"
            self._strike(sender, reason)
            raise Refused("bad-request", reason) from None
        self._loop.call_soon(self.tell, lambda now: self.peer.on_message(now, sender, message))
        return {}

    async def _on_contribution(self, sender: PeerId, body: Mapping[str, Any], payload: bytes) -> dict[str, Any]:
        self._refuse_banned(sender)
        match body:
            case {"round": int() as round_, "roster": str(), "unit": str() as unit} if unit in self.peer.context.sizes:
                pass
            case _:
                raise Refused("bad-request", "round, roster and a unit of this run are needed")
        blob, was_here = await self._loop.run_in_executor(self._threads, self._keep, payload)
        refusal = self.peer.on_contribution(self.now, sender, round_, unit, blob)
        self.drain()
        if refusal is not None:
            if not was_here:
                self.store.blobs.remove(blob)
            raise Refused("not-wanted", refusal)
        return {}

    def _keep(self, payload: bytes) -> tuple[str, bool]:
        """Store a payload; tells its hash, and whether it was here before."""
        before = blake3(payload).hexdigest()
        was_here = self.store.blobs.has(before)
        return self.store.blobs.put(payload), was_here

    def _strike(self, peer: PeerId, reason: str) -> None:
        self.strikes[peer] += 1
        log.warning("peer broke the protocol", peer=peer, reason=reason, strikes=self.strikes[peer])
        if self.strikes[peer] % STRIKES == 0:
            self._banned_until[peer] = self.now + BAN_SECONDS
            log.warning("peer banned", peer=peer, seconds=BAN_SECONDS)

    def is_banned(self, peer: PeerId) -> bool:
        """Whether `peer` broke the protocol so often that we have nothing to do with it for now."""
        return self._banned_until.get(peer, 0.0) > self.now

    def _refuse_banned(self, peer: PeerId) -> None:
        left = self._banned_until.get(peer, 0.0) - self.now
        if left > 0:
            raise Refused("banned", f"banned for another {left:.0f} s after {self.strikes[peer]} strikes")


def fresh_seed() -> int:
    """Seed of the protocol's own randomness: whom to gossip with."""
    return random.SystemRandom().randrange(1 << 63)
