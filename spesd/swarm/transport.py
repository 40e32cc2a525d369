"""Requests and answers between peers, over binary streams of hivemind's p2pd, which is watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import structlog
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from spesd.swarm.errors import NetworkNotStarted, PeerMisbehaved, PeerRefused, PeerTimeout, PeerUnreachable
from spesd.swarm.identity import Identity
from spesd.swarm.kept_streams import Stream
from spesd.swarm.lines import Lines
from spesd.swarm.outbound import Outbound, Request
from spesd.swarm.p2pd import TransportConfig, launch, retire, with_fixed_ports
from spesd.swarm.socket_files import remove_stale_sockets
from spesd.swarm.streams import Admission, Handler, PayloadLimit, Reply, Service, StreamLimits
from spesd.swarm.traffic import Traffic
from spesd.swarm.wire import Buffer, WireError, encode_header, harden_hivemind

log = structlog.get_logger(__name__)

HELLO_PROTOCOL = "/spesd/1/hello"
"""The one protocol without a run id, for joiners who know only an address."""

MAX_REPLY_BYTES = 64 << 20
_OUTBOUND_PER_PROTOCOL = 8
"""Open requests to one peer and protocol; the others wait, so that bulk never holds up a round's messages."""
_MAX_RESTART_PAUSE = 30.0
_CONTROL_SECONDS = 5.0
"""Bound on p2pd's answer to what concerns only itself."""

_REDIAL_SECONDS = 0.25
_BROKEN = (P2PDaemonError, P2PHandlerError, OSError, EOFError)
"""What hivemind raises when a dial fails or a connection breaks (EOFError covers IncompleteReadError)."""

RestartCallback = Callable[[], Awaitable[None]]


def protocol_name(run_id: str, name: str) -> str:
    """Protocol of one run: peers of other runs do not even speak it."""
    return f"/spesd/1/{run_id[:32]}/{name}"


class Transport:
    """One peer's end of the network. Make it with :meth:`start`; use it from one event loop."""

    def __init__(self, config: TransportConfig, identity: Identity, limits: StreamLimits) -> None:
        self.identity = identity
        self.traffic = Traffic()
        self.lines = Lines()
        self.restarts = 0
        self._config = config
        self._admission = Admission(limits)
        self._host_maddrs = list(config.host_maddrs)
        self._p2p: P2P | None = None
        self._ready = asyncio.Event()
        self._restarted = asyncio.Condition()
        self._visible: list[str] = []
        self._services: dict[str, Service] = {}
        self._registered: set[str] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._outbound = Outbound(self.traffic, self.lines, limits.idle_seconds)
        self._permits: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()
        self._on_restart: list[RestartCallback] = []
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: TransportConfig, limits: StreamLimits | None = None) -> Transport:
        """Start p2pd and listen, with the key of the identity file, which is made if there is none.

        Raises IdentityError; NetworkNotStarted or OSError when p2pd does not come up.
        """
        harden_hivemind()
        identity = Identity.load_or_create(config.identity_path)
        remove_stale_sockets(config.identity_path)
        transport = cls(config, identity, limits or StreamLimits())
        try:
            await transport._launch()
        except (P2PDaemonError, TimeoutError) as error:
            listen = " ".join(config.host_maddrs)
            raise NetworkNotStarted(f"cannot listen on {listen}: {_brief(error)}; see --listen") from None
        transport._watcher = asyncio.create_task(transport._watch())
        return transport

    async def stop(self) -> None:
        """Close every stream and end p2pd. Nothing of this transport is left afterwards."""
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._outbound.close()
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._ready.clear()
        if self._p2p:
            await retire(self._p2p)
            self._config.sockets_path.unlink(missing_ok=True)

    @property
    def p2p(self) -> P2P:
        """hivemind's P2P, for the DHT node. A new object after each restart."""
        assert self._p2p is not None, "Transport.start() has not finished"
        return self._p2p

    @property
    def peer_id(self) -> str:
        """Base58 id of this peer."""
        return self.identity.peer_id

    @property
    def p2pd_pid(self) -> int:
        """Process id of p2pd."""
        pid: int = self.p2p._child.pid
        return pid

    @property
    def is_up(self) -> bool:
        """False while p2pd is being restarted."""
        return self._ready.is_set()

    def kill(self) -> None:
        """End p2pd at once, without closing anything."""
        if self._p2p is not None:
            with contextlib.suppress(ProcessLookupError):
                self._p2p._child.kill()

    def addresses(self) -> list[str]:
        """Full multiaddrs under which others reach us, QUIC first, as of the last start or :meth:`refresh`."""
        outside = [address for address in self._visible if not address.startswith(("/ip4/127.", "/ip6/::1/"))]
        return sorted(outside or self._visible, key=lambda address: "/quic" not in address)

    async def refresh(self) -> None:
        """Ask p2pd for our addresses and connections anew: NAT traversal may have found more. While down they stay."""
        with contextlib.suppress(TimeoutError, *_BROKEN):
            async with asyncio.timeout(_CONTROL_SECONDS):
                await self._read_addresses()
                peers = await self.p2p.list_peers()
                self.lines.connected((str(peer.peer_id), str(end)) for peer in peers for end in peer.addrs)

    async def _read_addresses(self) -> None:
        with contextlib.suppress(ValueError):  # hivemind's way to say that there is none
            self._visible = [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]

    def on_restart(self, callback: RestartCallback) -> None:
        """Call `callback` after each restart of p2pd, when our protocols are served again."""
        self._on_restart.append(callback)

    async def wait_restarted(self, restarts: int, timeout: float) -> None:
        """Wait until p2pd has been restarted `restarts` times. Raises TimeoutError naming p2pd."""
        try:
            async with asyncio.timeout(timeout), self._restarted:
                await self._restarted.wait_for(lambda: self.restarts >= restarts)
        except TimeoutError:
            raise TimeoutError(f"p2pd of {self.peer_id} was not restarted within {timeout:.1f} s") from None

    async def connect(self, address: str, timeout: float) -> str:
        """Dial a full multiaddr (it ends in /p2p/<peer id>); returns the peer id.

        Raises ValueError for a malformed address, PeerUnreachable and PeerTimeout.
        """
        head, _, peer = address.rpartition("/p2p/")
        try:
            target, maddrs = _peer_id(peer), [Multiaddr(head)] if head else []
        except Exception as error:  # hivemind's multiaddr code raises many kinds
            raise ValueError(f"{address!r} is not a full multiaddr such as /ip4/…/tcp/…/p2p/…: {error}") from None
        try:
            async with asyncio.timeout(timeout):
                await self._ready.wait()
                await self._dial(target, maddrs)
        except TimeoutError:
            raise PeerTimeout(address, f"{address} did not answer the dial within {timeout:.1f} s") from None
        except _BROKEN as error:
            raise PeerUnreachable(address, f"cannot reach {address}: {_brief(error)}") from None
        return peer

    async def _dial(self, target: PeerID, maddrs: list[Multiaddr]) -> None:
        while True:
            try:
                await self.p2p._client.connect(target, maddrs)
                return
            except P2PDaemonError as error:
                if "dial backoff" not in str(error):  # p2pd refuses to redial for seconds after a failure
                    raise
            await asyncio.sleep(_REDIAL_SECONDS)

    async def disconnect(self, peer_id: str) -> None:
        """Close the connections to a peer, if there are any, so that the next request or dial opens a new one."""
        with contextlib.suppress(TimeoutError, ValueError, *_BROKEN):
            async with asyncio.timeout(_CONTROL_SECONDS):
                await self.p2p._client.disconnect(_peer_id(peer_id))

    async def serve(self, protocol: str, handler: Handler, *, max_payload: PayloadLimit = 0) -> None:
        """Answer requests of `protocol` with `handler`, also after p2pd was restarted. Again replaces the handler."""
        if (service := self._services.get(protocol)) is not None:
            service.handler, service.max_payload = handler, max_payload  # open streams follow
            return
        self._services[protocol] = Service(protocol, handler, max_payload, self._admission, self.traffic)
        if self._ready.is_set():  # else the launch under way registers it
            await self._register_all()

    async def request(
        self,
        peer_id: str,
        protocol: str,
        body: dict[str, Any],
        payload: Buffer = b"",
        *,
        timeout: float,
        max_reply: int = MAX_REPLY_BYTES,
        urgent: bool = True,
    ) -> Reply:
        """Send one request and return its answer, whose payload is at most `max_reply` bytes.

        Under a cap, what is `urgent` goes first; the wait for it is part of `timeout`. Where a connection breaks, the
        request may reach the peer twice.

        Raises PeerUnreachable, PeerTimeout, PeerRefused and PeerMisbehaved, each naming the peer; ValueError or
        TypeError when the body cannot be sent.
        """
        try:
            target = _peer_id(peer_id)
        except ValueError as error:
            raise PeerUnreachable(peer_id, str(error)) from None
        permits = self._permits.setdefault((peer_id, protocol), asyncio.Semaphore(_OUTBOUND_PER_PROTOCOL))
        size = memoryview(payload).nbytes
        header = encode_header({"body": body, "payload": size, "timeout": float(timeout)})
        request = Request(peer_id, protocol, header, payload, max_reply, urgent)
        try:
            async with asyncio.timeout(timeout), permits:
                await self._ready.wait()
                return await self._outbound.ask(request, partial(self._new_stream, target, protocol))
        except TimeoutError as error:
            reason = str(error) or f"no answer within {timeout:.1f} s"
            raise PeerTimeout(peer_id, f"peer {peer_id} is too slow for {protocol}: {reason}") from None
        except WireError as error:
            raise PeerMisbehaved(peer_id, f"peer {peer_id} answered {protocol} with garbage: {error}") from None
        except _BROKEN as error:
            if "protocols not supported" in str(error):
                raise PeerRefused(peer_id, "no-protocol", f"it does not serve {protocol}") from None
            raise PeerUnreachable(peer_id, f"peer {peer_id} unreachable for {protocol}: {_brief(error)}") from None

    async def _new_stream(self, target: PeerID, protocol: str) -> Stream:
        _, reader, writer = await self.p2p.call_binary_stream_handler(target, protocol)
        return Stream(reader, writer)

    async def _launch(self) -> None:
        self._p2p = p2p = await launch(self._config, self._host_maddrs)
        self._registered.clear()
        try:
            async with asyncio.timeout(self._config.start_seconds):
                await self._read_addresses()
                self._host_maddrs = with_fixed_ports(self._host_maddrs, self._visible)
                await self._register_all()
        except BaseException:
            await retire(p2p)
            raise
        self._ready.set()

    async def _register_all(self) -> None:
        while missing := self._services.keys() - self._registered:
            protocol = missing.pop()
            self._registered.add(protocol)
            await self.p2p.add_binary_stream_handler(protocol, partial(self._on_stream, protocol))

    async def _on_stream(
        self, protocol: str, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await self._services[protocol].serve(str(info.peer_id), reader, writer)
        except asyncio.CancelledError:
            writer.close()  # by `stop`; a cancelled handler would be reported by asyncio as an error
        finally:
            self._streams.discard(task)

    async def _watch(self) -> None:
        while True:
            code = await self.p2p._child.wait()
            log.warning("p2pd ended, restarting it", exit_code=code, peer=self.peer_id)
            self._ready.clear()
            await self._outbound.close()
            await retire(self.p2p)
            await self._relaunch()
            self.restarts += 1
            for callback in self._on_restart:
                try:
                    await callback()
                except Exception:
                    log.exception("restart callback failed")
            async with self._restarted:
                self._restarted.notify_all()

    async def _relaunch(self) -> None:
        pause = 0.1
        while True:
            try:
                return await self._launch()
            except (*_BROKEN, TimeoutError) as error:
                log.error("p2pd does not start", reason=_brief(error), retry_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RESTART_PAUSE)


def _peer_id(text: str) -> PeerID:
    """Raises ValueError unless `text` is a base58 multihash: SHA-256, or the key itself (Ed25519)."""
    with contextlib.suppress(ValueError):
        peer_id = PeerID.from_base58(text)
        if (peer_id.to_bytes()[:2], len(peer_id.to_bytes())) in ((b"\x12\x20", 34), (b"\x00\x24", 38)):
            return peer_id
    raise ValueError(f"{text!r} is not a peer id")


def _brief(error: BaseException) -> str:
    """One line, also for errors with an empty or a very long text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
