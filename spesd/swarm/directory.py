"""The directory: signed, expiring records in hivemind's DHT. Who is here, who owns what, which round it is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from spesd.swarm.dht_guards import RecordGuard, RequestGuard
from spesd.swarm.errors import CannotJoin, DirectoryTimeout, TransportError
from spesd.swarm.known_peers import KnownPeers
from spesd.swarm.records import (
    PEERS,
    ROUND,
    Claim,
    PeerRecord,
    Record,
    dht_key,
    owners_name,
    seal,
    unseal,
)
from spesd.swarm.transport import Transport
from spesd.swarm.wire import WireError

log = structlog.get_logger(__name__)

MAX_RECORDS = 4096
"""Most records of one key that are looked at."""

_RPC_SECONDS = 3.0
_T = TypeVar("_T")


@dataclass
class Directory:
    """One run's records, seen and written by one peer. Make it with :meth:`start`."""

    transport: Transport
    run_id: str
    known: KnownPeers
    timeout: float
    rejected: Counter[str] = field(default_factory=Counter)
    """Records ignored, by reason."""
    _node: DHTNode | None = None
    _published: PeerRecord | None = None
    _last_expiry: float = 0.0

    @classmethod
    async def start(cls, transport: Transport, run_id: str, known: KnownPeers, timeout: float = 15.0) -> Directory:
        """Start a DHT node on the transport. It is alone until :meth:`join`. `timeout` bounds every later call."""
        directory = cls(transport, run_id, known, timeout)
        await directory._create_node()
        transport.on_restart(directory._after_restart)
        return directory

    async def stop(self) -> None:
        """Leave the DHT. Call it before the transport's stop."""
        node, self._node = self._node, None
        if node is None:
            return
        if node.cache_refresh_task:
            node.cache_refresh_task.cancel()
        try:
            async with asyncio.timeout(_RPC_SECONDS):
                await node.shutdown()
        except TimeoutError:
            log.debug("DHT node did not stop in time")

    async def join(self, addresses: Sequence[str], timeout: float | None = None) -> None:
        """Enter the DHT through any of these peers, now or later again.

        Once one has answered, the others have three seconds more.
        Raises CannotJoin with a reason per address when none of them answers; retry it with backoff.
        """
        seconds = timeout or self.timeout
        reasons = await self._enter_all(addresses, seconds)
        if len(reasons) == len(addresses):
            raise CannotJoin(reasons)
        for address, reason in reasons.items():
            log.info("bootstrap peer did not answer", address=address, reason=reason)
        node = self._require_node()
        await self._bounded(node.find_nearest_nodes([node.node_id]), "looking for neighbours in the DHT")

    async def publish(self, record: PeerRecord) -> bool:
        """Write the peer's record, a claim for each unit it owns, and the round it has reached.

        Units owned in the last record and not in this one are released. Returns False when some key was stored nowhere.
        Raises DirectoryTimeout.
        """
        released = set(self._published.owned) - set(record.owned) if self._published else set()
        expires = max(record.expires, self._last_expiry + 0.001)  # the DHT keeps the later expiry
        record = record.model_copy(update={"expires": expires})
        held = Claim(peer=record.peer, round=record.round, issued=record.issued, expires=expires)
        free = held.model_copy(update={"held": False})
        gone = record.state == "gone"
        records: dict[str, Record] = {PEERS: record, ROUND: free if gone else held}
        records |= {owners_name(unit): free if gone else held for unit in record.owned}
        records |= {owners_name(unit): free for unit in released}
        stored = await self._store(records, expires)
        self._published, self._last_expiry = record, expires
        return stored

    async def withdraw(self) -> None:
        """Overwrite everything published by tombstones, which expire when the records would have."""
        if self._published is None or self._published.state == "gone":
            return
        await self.publish(self._published.model_copy(update={"state": "gone", "issued": time.time()}))
        self._published = None

    async def peers(self) -> dict[str, PeerRecord]:
        """Live peers by id, this one included."""
        found = await self._read(PEERS)
        peers = {p: r for p, r in found.items() if isinstance(r, PeerRecord) and r.state != "gone"}
        self.known.update({p: r.addresses for p, r in peers.items() if p != self.transport.peer_id})
        return peers

    async def owners(self, unit: str) -> dict[str, Claim]:
        """Live claims on a unit, by peer id."""
        found = await self._read(owners_name(unit))
        return {p: r for p, r in found.items() if isinstance(r, Claim) and r.held}

    async def newest_round(self) -> int:
        """Highest round that any live peer says it has reached; 0 when nobody says so. A hint, not a proof."""
        found = await self._read(ROUND)
        return max((r.round for r in found.values() if isinstance(r, Claim) and r.held), default=0)

    async def _create_node(self) -> None:
        """Values are never cached: a cached list of peers would hide those who came later."""
        create = DHTNode.create(
            p2p=self.transport.p2p,
            record_validator=RecordGuard(self.run_id, self.rejected),
            authorizer=RequestGuard(self.rejected),
            wait_timeout=_RPC_SECONDS,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            cache_size=MAX_RECORDS,
        )
        self._node = await self._bounded(create, "starting the DHT node")

    async def _after_restart(self) -> None:
        """p2pd is new, so the DHT node must be too; enter again and say again that we are here."""
        if self._node is None:
            return
        self._node.is_alive = False
        addresses = self.known.addresses()
        try:
            await self._create_node()
            if addresses:
                await self.join(addresses)
            if self._published:
                await self.publish(self._published)
        except (CannotJoin, DirectoryTimeout) as error:
            log.warning("not back in the DHT yet", reason=str(error))

    async def _enter_all(self, addresses: Sequence[str], timeout: float) -> dict[str, str]:
        """Dial and ping all at once; returns why some failed, by address."""
        tasks = {asyncio.create_task(self._enter(address, timeout)): address for address in addresses}
        reasons: dict[str, str] = {}
        waiting = set(tasks)
        try:
            while waiting and len(reasons) + len(waiting) == len(tasks):  # nobody has answered yet
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                reasons |= {tasks[task]: reason for task in done if (reason := task.result())}
            if waiting:
                done, waiting = await asyncio.wait(waiting, timeout=_RPC_SECONDS)
                reasons |= {tasks[task]: reason for task in done if (reason := task.result())}
            return reasons | {tasks[task]: f"no answer within {_RPC_SECONDS:.1f} s of another's" for task in waiting}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, address: str, timeout: float) -> str | None:
        """Dial and ping one peer; returns why it failed, or None."""
        try:
            async with asyncio.timeout(timeout):
                peer = await self.transport.connect(address, timeout)
                reason = await self._greet(PeerID.from_base58(peer))
                if reason is not None:  # a connection that died without a word is kept until TCP gives it up
                    await self.transport.disconnect(peer)
                return reason
        except TimeoutError:
            return f"no answer from the DHT within {timeout:.1f} s"
        except (TransportError, ValueError) as error:
            return str(error)

    async def _greet(self, peer: PeerID) -> str | None:
        """Ping a peer as a node of the DHT; returns why it failed, or None."""
        node = self._require_node()
        asked = time.time()
        try:
            answer = await node.protocol.get_stub(peer).rpc_ping(dht_pb2.PingRequest(), timeout=_RPC_SECONDS)
        except TimeoutError:
            return f"no answer from the DHT within {_RPC_SECONDS:.1f} s"
        except Exception as error:  # hivemind lets through whatever the remote handler raised
            return f"DHT ping failed: {error}"
        skew = answer.dht_time - (asked + time.time()) / 2
        if abs(skew) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            return f"its clock differs from ours by {skew:+.1f} s, at most 3 s are possible; set the clock by NTP"
        if await node.protocol.call_ping(peer) is None:
            return "it does not take part in the DHT"
        # hivemind asks a peer that failed before nothing for up to as long again as it was away
        node.blacklist.register_success(peer)
        return None

    async def _store(self, records: dict[str, Record], expires: float) -> bool:
        names = list(records)
        stored = await self._bounded(
            self._require_node().store_many(
                keys=[dht_key(self.run_id, name) for name in names],
                values=[seal(self.run_id, name, records[name], self.transport.identity) for name in names],
                expiration_time=[expires] * len(names),
                subkeys=[self.transport.peer_id] * len(names),
            ),
            "storing records in the DHT",
        )
        return all(stored.values())

    async def _read(self, name: str) -> dict[str, Record]:
        key = dht_key(self.run_id, name)
        found = await self._bounded(self._require_node().get(key, latest=True), f"reading {name!r} from the DHT")
        if found is None or not isinstance(found.value, dict):
            return {}
        records: dict[str, Record] = {}
        for peer, (value, _) in list(found.value.items())[:MAX_RECORDS]:
            try:
                signed_for, record = unseal(self.run_id, value, peer, time.time())
                if signed_for != name:
                    raise WireError("other key")
            except WireError as error:
                self.rejected[str(error)[:40]] += 1
            else:
                records[peer] = record
        return records

    async def _bounded(self, call: Awaitable[_T], what: str) -> _T:
        try:
            async with asyncio.timeout(self.timeout):
                return await call
        except TimeoutError:
            raise DirectoryTimeout(f"{what} took longer than {self.timeout:.1f} s") from None

    def _require_node(self) -> DHTNode:
        if self._node is None:
            raise RuntimeError("Directory used before start() or after stop()")
        return self._node
