"""The daemon: from a configuration to a peer that trains, and back to nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import date

import structlog

from spesd import __version__
from spesd.api.headline import ready_line
from spesd.api.schema import (
    Experts,
    HeldOut,
    LimitChange,
    Limits,
    Losses,
    Peers,
    Reason,
    Rounds,
    State,
    Status,
    Stop,
)
from spesd.api.server import ApiServer
from spesd.api.socket_path import remove_socket
from spesd.config.errors import ConfigError
from spesd.config.files import load_draft
from spesd.config.manifest import Draft, Manifest
from spesd.config.peer import PeerConfig
from spesd.daemon import joining, views
from spesd.daemon.founding import found
from spesd.daemon.situation import Situation, situation
from spesd.daemon.state_dir import StateDir
from spesd.daemon.store import Store
from spesd.daemon.traffic_book import TrafficBook
from spesd.daemon.volunteer import Volunteer
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.blobs import BlobExchange
from spesd.swarm.directory import Directory
from spesd.swarm.errors import SwarmError
from spesd.swarm.identity import Identity
from spesd.swarm.join import Hello, serve_hello
from spesd.swarm.known_peers import KnownPeers
from spesd.swarm.p2pd import TransportConfig
from spesd.swarm.rate import BYTES_PER_MBIT
from spesd.swarm.socket_files import remove_stale_sockets
from spesd.swarm.transport import Transport
from spesd.sync.codecs import self_test

log = structlog.get_logger(__name__)

ROUND_SECONDS, TRAINER_SECONDS, WITHDRAW_SECONDS, CLOSE_SECONDS = 8.0, 5.0, 2.0, 4.0
"""What a drain may take: the open round, the trainer's last work, withdrawing records, closing the network."""

RESUME_SECONDS = 15.0
"""How long a restarted peer looks for its swarm before it goes on by itself, and looks further beside that."""


class Daemon:
    """One daemon, and the provider of its local API."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._dir = StateDir(config.state_dir)
        self._state, self._reason, self._detail = State.STARTING, Reason.NONE, ""
        self._started = time.monotonic()
        self._identity: Identity | None = None
        self._transport: Transport | None = None
        self._limits = Limits(up_mbit=config.up_mbit, down_mbit=config.down_mbit)
        self._book: TrafficBook | None = None
        self._manifest: Manifest | None = None
        self._volunteer: Volunteer | None = None
        self._stopping = asyncio.Event()
        self._ready = False

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until `request_stop`. Raises ExpectedError or OSError for what a person has to mend."""
        self._dir.acquire()
        async with AsyncExitStack() as stack:
            stack.callback(self._dir.release)
            server = ApiServer(self, self._config.state_dir)
            stack.push_async_callback(server.close)
            await server.start()
            live = asyncio.create_task(self._live(stack))
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait({live, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                self._explain(Reason.ASKED_TO_STOP if self._stopping.is_set() else self._reason, "")
                self._state = State.DRAINING
                live.cancel()
                await asyncio.gather(live, return_exceptions=True)
                await self._drain()
            if not live.cancelled():
                live.result()
        self._state = State.STOPPED

    def request_stop(self) -> None:
        """Drain, then end."""
        self._stopping.set()

    def kill(self) -> None:
        """End the processes that we started, at once, and remove the socket files."""
        if self._volunteer is not None:
            self._volunteer.kill()
        if self._transport is not None:
            self._transport.kill()
            remove_stale_sockets(self._dir.identity)
        remove_socket(self._config.state_dir)

    async def _drain(self) -> None:
        if self._volunteer is not None:
            await self._volunteer.finish(ROUND_SECONDS, TRAINER_SECONDS, WITHDRAW_SECONDS)

    async def _live(self, stack: AsyncExitStack) -> None:
        """Find the run, take part, and wait for the end."""
        draft = load_draft(self._config.manifest) if self._config.manifest is not None else None
        manifest = joining.load_manifest(self._dir)
        if manifest is not None and draft is not None:
            joining.check_same_run(manifest, draft)
        self._identity = await asyncio.to_thread(Identity.load_or_create, self._dir.identity)
        self._transport = await self._start_transport(stack)
        known = KnownPeers(self._dir.known_peers)
        founding = manifest is None and draft is not None
        blobs = BlobStore(self._dir.blobs)
        answers: tuple[Hello, ...] = ()
        if manifest is not None:
            answers = await self._greet_again(manifest, blobs, known)
        elif draft is not None:
            manifest = await self._found(draft, blobs)
        else:
            manifest, answers = await self._join(blobs)
        self._manifest = manifest
        joining.keep_manifest(manifest, self._dir, blobs)
        store = Store(self._dir, manifest.run_id)
        exchange = BlobExchange(self._transport, store.blobs, manifest.run_id)
        await self._take_part(stack, manifest, store, exchange, known, answers, founding)
        await self._watch()

    async def _start_transport(self, stack: AsyncExitStack) -> Transport:
        config = TransportConfig(
            identity_path=self._dir.identity,
            host_maddrs=self._config.listen,
            announce_maddrs=self._config.announce,
            nat_port_map=self._config.nat_port_map,
            reachability=self._config.reachability,
            relays=self._config.relays,
            serve_relay=self._config.serve_relay,
        )
        transport = await Transport.start(config)
        _apply(self._limits, transport)

        async def stop() -> None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await transport.stop()
            except TimeoutError:
                log.warning("the network did not close in time", seconds=CLOSE_SECONDS)
                transport.kill()

        stack.push_async_callback(stop)
        self._book = TrafficBook(self._dir.traffic, transport.traffic)
        keeping = asyncio.create_task(self._book.keep())

        async def close_book() -> None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

        stack.push_async_callback(close_book)
        return transport

    # Into the run ----------------------------------------------------------------------------------------------------

    async def _found(self, draft: Draft, blobs: BlobStore) -> Manifest:
        if self._config.join:
            raise ConfigError("--manifest founds a new run, --join joins a running one; leave one of them out")
        self._explain(Reason.PREPARING_DATA, draft.data.source)
        return await asyncio.to_thread(found, draft, blobs)

    async def _join(self, blobs: BlobStore) -> tuple[Manifest, tuple[Hello, ...]]:
        if not self._config.join:
            raise ConfigError(
                f"{self._config.state_dir} belongs to no run yet; give --join ADDRESS to join one, "
                "or --manifest FILE to found one (peer_configs/demo.toml is an example)"
            )
        assert self._transport is not None
        self._state = State.JOINING
        answers = await joining.find_run(self._transport, self._config.join, self._explain)
        self._warn_of_clock(answers)
        self._explain(Reason.FETCHING_MANIFEST, "")
        return await joining.fetch_manifest(self._transport, blobs, answers), answers

    async def _greet_again(self, manifest: Manifest, blobs: BlobStore, known: KnownPeers) -> tuple[Hello, ...]:
        """A restarted peer looks for its swarm, and refuses one of another run; alone it goes on by itself."""
        assert self._transport is not None
        addresses = list(dict.fromkeys([*self._config.join, *known.addresses()]))
        if not addresses:
            return ()
        self._state = State.JOINING
        self._explain(Reason.WAITING_FOR_BOOTSTRAP, f"{len(addresses)} known addresses")
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                answers, reasons = await joining.ask_all(self._transport, addresses)
        except TimeoutError:
            answers, reasons = (), dict.fromkeys(addresses, f"no answer in {RESUME_SECONDS:.0f} s")
        if not answers:
            log.warning("no known peer answers, going on alone and looking further", tried=len(reasons))
        given = [answer for answer in answers if any(a.endswith(answer.peer) for a in self._config.join)]
        await joining.check_run(self._transport, manifest, given, blobs)
        self._warn_of_clock(answers)
        return tuple(answer for answer in answers if answer.info.run_id == manifest.run_id)

    def _warn_of_clock(self, answers: Sequence[Hello]) -> None:
        for answer in answers:
            if not answer.clock_agrees:
                log.warning("clocks differ, the DHT will refuse us", peer=answer.peer, seconds=answer.clock_skew)
                self._explain(Reason.CLOCK_WRONG, f"peer {answer.peer} is {answer.clock_skew:+.1f} s ahead; set by NTP")

    async def _take_part(
        self,
        stack: AsyncExitStack,
        manifest: Manifest,
        store: Store,
        exchange: BlobExchange,
        known: KnownPeers,
        answers: Sequence[Hello],
        founding: bool,
    ) -> None:
        """Enter the directory, get the data, answer others."""
        self_test()
        transport, identity = self._transport, self._identity
        assert transport is not None and identity is not None
        directory = await Directory.start(transport, manifest.run_id, known)
        stack.push_async_callback(directory.stop)
        addresses = [*self._config.join, *known.addresses()]
        if answers:
            try:
                await directory.join([a for a in addresses if any(a.endswith(answer.peer) for answer in answers)])
            except SwarmError as error:
                log.warning("not in the directory yet, trying again later", reason=str(error))
        self._state = State.SYNCING

        async def sources() -> list[str]:
            """Who may have the data now: whoever is in the directory, which is entered again if need be."""
            me, others = {identity.peer_id}, set()
            try:
                others = set(await directory.peers()) - me
                if addresses and not others:
                    await directory.join(addresses)
                    others = set(await directory.peers()) - me
            except SwarmError as error:
                log.info("nobody new found", reason=str(error))
            found = sorted(others | {answer.peer for answer in answers} - me)
            return random.sample(found, len(found))  # spread donors

        await joining.fetch_data(exchange, manifest, sources, self._explain)
        await exchange.serve()
        await serve_hello(transport, lambda: joining.hello_info(manifest))
        volunteer = Volunteer(self._config, manifest, self._dir, identity, transport, directory, store, exchange)
        if founding:
            volunteer.found()
        self._volunteer = volunteer
        self._explain(Reason.NONE, "")
        await volunteer.begin()

    async def _watch(self) -> None:
        """Say once that we are ready; end when a part of us has failed."""
        volunteer = self._volunteer
        assert volunteer is not None
        while True:
            if not self._ready and volunteer.state is State.TRAINING:
                self._ready = True
                print(ready_line(self.status()), flush=True)
            await volunteer.check(0.2)

    # The local API (spesd.api.server.Provider) -----------------------------------------------------------------------

    def status(self) -> Status:
        volunteer, transport, manifest = self._volunteer, self._transport, self._manifest
        state, reason, detail = self._situation()
        addresses = tuple(transport.addresses()) if transport is not None else ()
        known = Status(
            state=state,
            reason=reason,
            detail=detail,
            peer=self._identity.peer_id if self._identity else "",
            run=manifest.run_id if manifest else "",
            run_name=manifest.name if manifest else "",
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            addresses=addresses,
            join=f"spesd start --join {addresses[0]}" if addresses and manifest else "",
        )
        if self._book is not None:
            known = known.model_copy(update={"traffic": self._book.status(self._limits, date.today())})
        if volunteer is None or transport is None:
            return known
        more = {
            "round": views.round_status(volunteer.peer, volunteer.conductor.rounds, volunteer.conductor.now),
            "trainer": views.trainer_status(volunteer.trainer),
            "owned": tuple(sorted(volunteer.peer.context.owned)),
            "units": views.unit_statuses(volunteer.records, volunteer.peer),
            "peers_live": len(volunteer.peer.context.live) + 1,
            "neighbours": tuple(views.neighbour(peer, transport) for peer in sorted(volunteer.peer.context.live)),
            "warnings": (*volunteer.trainer.warnings, *volunteer.shortages()),
        }
        return known.model_copy(update=more)

    def peers(self) -> Peers:
        volunteer, transport = self._volunteer, self._transport
        if volunteer is None or transport is None:
            return Peers()
        me = volunteer.peer.context.me
        return Peers(peers=tuple(views.peer(record, me, transport) for _, record in sorted(volunteer.records.items())))

    def experts(self) -> Experts:
        volunteer = self._volunteer
        return Experts(experts=views.experts(volunteer.records, volunteer.peer) if volunteer else ())

    def rounds(self) -> Rounds:
        ended = self._volunteer.conductor.rounds if self._volunteer else ()
        return Rounds(rounds=tuple(views.round_record(report) for report in ended))

    def loss(self) -> Losses:
        points = self._volunteer.trainer.losses if self._volunteer else ()
        return Losses(points=tuple(HeldOut(round=point.round, loss=point.loss) for point in points))

    def limit(self, change: LimitChange) -> Limits:
        self._limits = self._limits.model_copy(update=change.model_dump(exclude_unset=True))
        if self._transport is not None:
            _apply(self._limits, self._transport)
        return self._limits

    def stop(self) -> Stop:
        self.request_stop()
        return Stop(pid=os.getpid())

    def _explain(self, reason: Reason, detail: str) -> None:
        self._reason, self._detail = reason, detail

    def _situation(self) -> Situation:
        if self._volunteer is None or self._transport is None or self._state is State.DRAINING:
            return self._state, self._reason, self._detail
        state, reason, detail = situation(self._volunteer, self._transport)
        pressing = reason not in (Reason.NONE, Reason.ALONE) or self._reason is Reason.NONE
        return (state, reason, detail) if pressing else (state, self._reason, self._detail)


def _apply(limits: Limits, transport: Transport) -> None:
    for limiter, mbit in (
        (transport.traffic.up_limit, limits.up_mbit),
        (transport.traffic.down_limit, limits.down_mbit),
    ):
        limiter.limit(None if mbit is None else mbit * BYTES_PER_MBIT)
