"""A peer in its swarm: once the run is known, keep it in the directory, synced, and training what it should.

Loops, each on its own: publish and read records; look for lost peers again; review which experts to own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from spesd import __version__
from spesd.api.schema import State
from spesd.config.manifest import Manifest
from spesd.config.peer import PeerConfig
from spesd.daemon.budget import experts_to_train
from spesd.daemon.conductor import Conductor, fresh_seed
from spesd.daemon.reunion import Reunion
from spesd.daemon.state_dir import StateDir
from spesd.daemon.store import ChainFile, Store, StoredBlobs
from spesd.daemon.trainer import Trainer
from spesd.daemon.views import owners_of
from spesd.model.units import UnitLayout
from spesd.swarm.blobs import BlobExchange
from spesd.swarm.directory import Directory
from spesd.swarm.errors import SwarmError
from spesd.swarm.identity import Identity, verify
from spesd.swarm.records import PeerRecord
from spesd.swarm.transport import Transport
from spesd.swarm.wire import WireError, pack, unpack
from spesd.sync.ledger import Chain, Head, PeerId, UnitId
from spesd.sync.merge import Merging
from spesd.sync.ownership import Ownership
from spesd.sync.peer import SyncPeer
from spesd.sync.workshop import Workshop

log = structlog.get_logger(__name__)

READ_SECONDS = 3.0
"""Time between two looks at who is here."""

REVIEW_SECONDS = 5.0
"""Time between two looks at who owns what."""

CHANGE_SECONDS = 30.0
"""How long a change of experts waits for a moment between two rounds, before it is thought over again."""

IDLE_POLL_SECONDS = 0.1
CLAIM_JITTER_SECONDS = 2.0
MAX_SIGNATURE_BYTES = 4096


class IdentitySigner:
    """Signs rosters with the libp2p identity; a signature carries the public key, which must hash to the peer id."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        return pack([self._identity.public_key, self._identity.sign(data)])

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        try:
            match unpack(signature, MAX_SIGNATURE_BYTES):
                case [bytes() as public_key, bytes() as signed]:
                    return verify(peer, public_key, data, signed)
        except WireError:
            pass
        return False


class Volunteer:
    """One peer of one run. Make it, `begin`, and `finish` it in the end."""

    def __init__(
        self,
        config: PeerConfig,
        manifest: Manifest,
        state_dir: StateDir,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        store: Store,
        exchange: BlobExchange,
    ) -> None:
        self.config, self.manifest, self.store = config, manifest, store
        self.records: dict[PeerId, PeerRecord] = {}
        self.state = State.SYNCING
        self._transport, self._directory = transport, directory
        self._layout = UnitLayout(manifest.model, manifest.sync.shared_shards)
        sizes = {unit.id: unit.size for unit in self._layout.units}
        run, me = manifest.run_id, identity.peer_id
        signer, windows = IdentitySigner(identity), transport.traffic.windows
        self.peer = SyncPeer(me, run, sizes, manifest.sync, signer, fresh_seed(), lambda: bool(windows.on_the_way))
        experts = [unit.id for unit in self._layout.units if unit.kind == "expert"]
        merging = Merging(manifest.merge, experts, manifest.model.layers, manifest.sync.stagger)
        self.workshop = Workshop(run, sizes, manifest.sync, StoredBlobs(store.blobs), merging, manifest.outer)
        self.trainer = Trainer(config, manifest, state_dir, store, self.peer, self.workshop, self._tell)
        self._keep = [run, *(shard.hash for shard in (*manifest.data.train, *manifest.data.held_out))]
        self.conductor = Conductor(self.peer, self.workshop, store, transport, exchange, self.trainer, self._keep)
        rules = manifest.ownership
        budget = experts_to_train(config, self._layout)
        self._ownership = Ownership(me, run, budget, rules.redundancy, rules.grace_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self._reunion = Reunion(self.conductor.now)
        self._records_changed = asyncio.Event()

    def _tell(self, event: Callable[[float], None]) -> None:
        self.conductor.tell(event)

    # Begin -----------------------------------------------------------------------------------------------------------

    def found(self) -> None:
        """Take the genesis states, which the founder has in its store, as agreed."""
        chains = {unit: Chain([Head(0, hash, 0)]) for unit, hash in self.manifest.genesis.items()}
        for unit, chain in chains.items():
            self.store.save_chain(unit, ChainFile.of(chain))

    async def begin(self) -> None:
        """Restore the ledger from disk, answer others, and run until `finish`."""
        chains = await asyncio.to_thread(self.store.restore, self.peer.context.sizes, self.workshop)
        await asyncio.to_thread(self.store.sweep, chains, self._keep)
        self.peer.restore(chains)
        await self.conductor.serve()
        for loop in (self._read_forever(), self._publish_forever(), self._redial_forever(), self._train_forever()):
            self._tasks.append(asyncio.create_task(loop))

    async def check(self, seconds: float) -> None:
        """Wait so long. Raises the error of a loop that has failed."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    def shortages(self) -> list[str]:
        """Experts that fewer peers train than the manifest wants, in words."""
        wanted, owners = self.manifest.ownership.redundancy, owners_of(self.records, self.peer)
        experts = {unit: peers for unit, peers in owners.items() if unit.startswith("expert")}
        return [
            f"{unit.replace('-', ' ')} has {len(experts[unit])} of {wanted} wanted owners"
            for unit in self._ownership.short(experts)
        ]

    # The loops -------------------------------------------------------------------------------------------------------

    async def _read_forever(self) -> None:
        while True:
            try:
                await self._read()
            except SwarmError as error:
                log.info("directory not read", reason=str(error))
            await asyncio.sleep(READ_SECONDS * random.uniform(0.8, 1.2))

    async def _read(self) -> None:
        self.records = await self._directory.peers()
        self._reunion.saw(self.conductor.now, self.records)
        live = [peer for peer in self.records if not self.conductor.is_banned(peer)]
        self._tell(lambda now: self.peer.on_live(now, live))

    async def _publish_forever(self) -> None:
        life = self.manifest.ownership.record_seconds
        while True:
            self._records_changed.clear()
            try:
                if not await self._directory.publish(self._record(life)):
                    log.info("record stored nowhere but here")
            except SwarmError as error:
                log.info("record not published", reason=str(error))
            try:
                await asyncio.wait_for(self._records_changed.wait(), life / 3)
            except TimeoutError:
                await self._transport.refresh()

    def _record(self, life: float) -> PeerRecord:
        issued = time.time()
        return PeerRecord(
            peer=self.peer.context.me,
            addresses=tuple(self._transport.addresses()[:16]),
            state=self.state.value,
            round=self.peer.context.newest_round,
            owned=tuple(sorted(self.peer.context.owned)) if self.state is State.TRAINING else (),
            version=__version__,
            issued=issued,
            expires=issued + life,
        )

    async def _redial_forever(self) -> None:
        """Peers that were known and are not here are dialled for ever: halves of a split swarm find each other."""
        while True:
            await asyncio.sleep(READ_SECONDS * random.uniform(0.8, 1.2))  # a loss may shorten the pause at any time
            here = {self.peer.context.me, *self.records}
            given = [address for address in self.config.join if address.rpartition("/")[2] not in here]
            addresses = list(dict.fromkeys([*given, *self._directory.known.addresses(without=here)]))
            if not addresses or self._reunion.seconds_left(self.conductor.now) > 0:
                continue
            try:
                await self._directory.join(addresses)
                self._records_changed.set()  # whoever was found learns of us at once
                await self._read()
            except SwarmError as error:
                level = log.info if self.peer.context.live else log.warning  # alone, it matters
                level("absent peers do not answer", reason=str(error))
            self._reunion.dialled(self.conductor.now)

    async def _train_forever(self) -> None:
        """Sync, claim experts, train; then review the claims now and then."""
        mine = frozenset(unit for unit in self.trainer.owned_before if unit in self.peer.context.sizes)
        self.peer.on_owned(await self._review(mine))  # not yet claimed, but fetched first
        await self._synced()
        # peers that start together look at the claims one after the other
        await asyncio.sleep(random.uniform(0, CLAIM_JITTER_SECONDS))
        self.peer.on_owned(await self._review(mine))
        await self._synced()
        newest = self.peer.context.newest_round
        unaccepted = await asyncio.to_thread(self.store.take_unaccepted, newest, self.manifest.sync.stale_rounds)
        await self.trainer.begin(unaccepted)
        self.state = State.TRAINING
        self._records_changed.set()
        while True:
            await asyncio.sleep(REVIEW_SECONDS * random.uniform(0.8, 1.2))
            owned = await self._review(self.peer.context.owned)
            if owned == self.peer.context.owned or self.peer.leaving:
                continue
            try:
                async with asyncio.timeout(CHANGE_SECONDS):
                    while not self.peer.idle:
                        await asyncio.sleep(IDLE_POLL_SECONDS)
            except TimeoutError:
                continue  # the decision is old by now
            log.info("experts change", before=sorted(self.peer.context.owned), now=sorted(owned))
            self.trainer.own(owned)
            self._records_changed.set()

    async def _synced(self) -> None:
        """Wait until all that we train is the newest known. The daemon says meanwhile what is missing."""
        while not self.peer.catchup.current(self.peer.trained):
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def _review(self, mine: frozenset[UnitId]) -> frozenset[UnitId]:
        """Decide what to own, from the claims under every expert's key. Without an answer nothing changes."""
        names = [unit.id for unit in self._layout.units if unit.kind == "expert"]
        try:
            claims = await asyncio.gather(*(self._directory.owners(name) for name in names))
        except SwarmError as error:
            log.info("claims not read", reason=str(error))
            if mine:
                return mine
            claims = [{} for _ in names]
        live = self.peer.context.live
        others = {name: {peer for peer in found if peer in live} for name, found in zip(names, claims, strict=True)}
        return self._ownership.review(self.conductor.now, mine, others)

    # The end ---------------------------------------------------------------------------------------------------------

    async def finish(self, round_seconds: float, trainer_seconds: float, withdraw_seconds: float) -> None:
        """Leave in good order: end the open round, keep the work, withdraw the records. Each within its time."""
        self.state = State.DRAINING
        self.peer.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(round_seconds):
                while not self.peer.idle:
                    await asyncio.sleep(IDLE_POLL_SECONDS)
        except TimeoutError:
            log.warning("the open round is left unfinished", waited_seconds=round_seconds)
        # a contribution on its way may still be accepted, so the work on that unit must not be kept as unaccepted
        await self.trainer.finish(trainer_seconds, keep=self.peer.at_rest)
        try:
            async with asyncio.timeout(withdraw_seconds):
                await self._directory.withdraw()
        except (SwarmError, TimeoutError) as error:
            log.info("records not withdrawn, they expire by themselves", reason=str(error))
        await self.conductor.close()

    def kill(self) -> None:
        """End what would outlive us."""
        self.trainer.kill()
