"""A peer that knows the protocols of a run and breaks every rule of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from spesd.swarm.directory import Directory
from spesd.swarm.errors import PeerRefused, TransportError
from spesd.swarm.known_peers import KnownPeers
from spesd.swarm.p2pd import TransportConfig
from spesd.swarm.records import PEERS, dht_key
from spesd.swarm.transport import HELLO_PROTOCOL, Transport, protocol_name
from spesd.swarm.wire import encode_header

NESTING = 300
"""Tuples within tuples, so deep that hivemind's own deserialiser ends the process that reads them."""

ANSWER_SECONDS = 1.0
OPEN_STREAMS = 80

GARBAGE = (
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff" + bytes(64),
    b"\x00\x00\x01\x00half a header",
    b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1",
    b"\x00\x00\x00\x14" + b"\x91" * 20,
    encode_header({"body": {}, "payload": 1 << 62, "timeout": 1.0}),
    encode_header({"body": {}, "payload": -1, "timeout": 1.0}),
    encode_header({"body": [], "payload": 0, "timeout": float("nan")}),
    encode_header({"body": {"round": 1 << 62, "roster": "", "unit": "expert-0"}, "payload": 4, "timeout": 5.0})
    + b"abcd",
    encode_header({"body": {"kind": "Call", "message": {"round": -1}}, "payload": 0, "timeout": 5.0}),
    os.urandom(1 << 16),
)


class Hostile:
    """Attacks one run. Make it with `hostile_peer`."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self._transport, self._directory = transport, directory
        self._run = directory.run_id

    async def write_garbage(self, peer: str) -> None:
        """Bytes that mean nothing, on every protocol; and more idle streams than one peer may have."""
        run_protocols = [protocol_name(self._run, name) for name in ("message", "contribution", "blob")]
        for protocol in (HELLO_PROTOCOL, *run_protocols):
            for data in GARBAGE:
                reader, writer = await self._open(peer, protocol)
                with suppress(OSError, TimeoutError):
                    writer.write(data)
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await reader.read()
                writer.close()
        with suppress(OSError, EOFError):
            streams = [await self._open(peer, HELLO_PROTOCOL) for _ in range(OPEN_STREAMS)]
            for _, writer in streams:
                writer.close()

    async def store_nested_tuples(self, peer: str) -> None:
        """Hand the nested value to a peer, and keep it for those who ask us."""
        node = self._directory._node
        assert node is not None
        nested = msgpack.packb([])
        for _ in range(NESTING):
            nested = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + nested))
        for name in (PEERS, "owners/expert-0"):
            key, expires = DHTID.generate(dht_key(self._run, name)), time.time() + 60
            await node.protocol.call_store(
                PeerID.from_base58(peer), [key], [nested], [expires], subkeys=[self._transport.peer_id]
            )
            node.protocol.storage.store(key, nested, expires)

    async def send_malformed_messages(self, peer: str, times: int) -> list[str]:
        """Messages of an unknown kind; the code of each refusal."""
        codes = []
        for _ in range(times):
            try:
                body = {"kind": "Nonsense", "message": {}}
                await self._transport.request(peer, protocol_name(self._run, "message"), body, timeout=5, max_reply=0)
            except PeerRefused as refusal:
                codes.append(refusal.code)
            except TransportError as error:
                codes.append(type(error).__name__)
        return codes

    async def _open(self, peer: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await self._transport.p2p.call_binary_stream_handler(PeerID.from_base58(peer), protocol)
        return reader, writer


@asynccontextmanager
async def hostile_peer(folder: Path, run: str, addresses: Sequence[str]) -> AsyncIterator[Hostile]:
    """A peer that is in the DHT of the run, and not in the run. Nothing of it is left afterwards."""
    transport = await Transport.start(TransportConfig(folder / "hostile.key", nat_port_map=False))
    try:
        directory = await Directory.start(transport, run, KnownPeers(folder / "hostile.json"))
        try:
            await directory.join(addresses)
            yield Hostile(transport, directory)
        finally:
            await directory.stop()
    finally:
        await transport.stop()
