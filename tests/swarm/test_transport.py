"""Requests between real p2pd processes: payloads, refusals, garbage, limits, deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs
from swarm_harness import RUN, StartTransport, eventually, existing, raw_stream

from spesd.swarm.errors import NetworkNotStarted, PeerMisbehaved, PeerRefused, PeerTimeout, PeerUnreachable, Refused
from spesd.swarm.p2pd import TransportConfig, with_fixed_ports
from spesd.swarm.socket_files import remove_stale_sockets
from spesd.swarm.streams import Reply, StreamLimits
from spesd.swarm.transport import Transport, protocol_name
from spesd.swarm.wire import MAX_HEADER_BYTES, encode_header, pack

ECHO = protocol_name(RUN, "echo")


async def echo(peer: str, body: dict[str, Any], payload: bytes) -> Reply:
    return Reply({"from": peer, "body": body}, payload)


async def test_an_address_that_is_not_ours_is_named(tmp_path) -> None:
    config = TransportConfig(tmp_path / "key", host_maddrs=("/ip4/203.0.113.9/tcp/4001",), nat_port_map=False)
    with pytest.raises(NetworkNotStarted, match=r"cannot listen on /ip4/203.0.113.9/tcp/4001: .*cannot assign"):
        await Transport.start(config)


async def test_large_payload_comes_back_bit_exact_and_is_counted(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=8 << 20)
    payload = os.urandom(8 << 20)
    reply = await client.request(server.peer_id, ECHO, {"n": 1}, memoryview(payload), timeout=30)
    assert reply.body == {"from": client.peer_id, "body": {"n": 1}}
    assert reply.payload == payload
    for counted in (client.traffic.total, client.traffic.peers[server.peer_id]):
        assert 8 << 20 < counted.up < (8 << 20) + 1000
        assert 8 << 20 < counted.down < (8 << 20) + 1000
    assert server.traffic.total.down == client.traffic.total.up


async def test_the_line_to_a_peer_is_known_once_it_has_answered(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=1 << 20)
    await client.request(server.peer_id, ECHO, {}, bytes(1 << 20), timeout=30)
    assert client.lines.rtt(server.peer_id) is None, "a large request tells nothing of the delay"
    await client.request(server.peer_id, ECHO, {}, timeout=30)
    rtt = client.lines.rtt(server.peer_id)
    assert rtt is not None and 0 < rtt < 30
    await client.refresh()
    assert client.lines.relayed == {server.peer_id: False}


async def test_a_relay_is_one_only_where_it_is_asked_for(tmp_path: Path) -> None:
    for serve_relay in (False, True):
        config = TransportConfig(tmp_path / "key", nat_port_map=False, reachability="public", serve_relay=serve_relay)
        transport = await Transport.start(config)
        arguments = psutil.Process(transport.p2pd_pid).cmdline()
        await transport.stop()
        assert ("-relayService=0" in arguments) != serve_relay
        assert "-relay=1" in arguments and "-forceReachabilityPublic=1" in arguments


async def test_addresses_can_be_pasted(start_transport: StartTransport) -> None:
    server = await start_transport()
    [address] = server.addresses()
    assert address.startswith("/ip4/127.0.0.1/tcp/") and address.endswith(f"/p2p/{server.peer_id}")


async def test_the_first_address_is_that_of_the_best_transport(tmp_path: Path) -> None:
    listen = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
    transport = await Transport.start(TransportConfig(tmp_path / "key", host_maddrs=listen, nat_port_map=False))
    addresses = transport.addresses()
    await transport.stop()
    assert ["/quic-v1/" in address for address in addresses] == [True, False]


async def test_a_refusal_reaches_the_caller_with_its_fields(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()

    async def refuse(peer: str, body: dict[str, Any], payload: bytes) -> Reply:
        raise Refused("stale", "round 3 is over", {"round": 4})

    await server.serve(ECHO, refuse)
    with pytest.raises(PeerRefused, match="round 3 is over") as caught:
        await client.request(server.peer_id, ECHO, {}, timeout=10)
    assert (caught.value.code, caught.value.fields, caught.value.peer) == ("stale", {"round": 4}, server.peer_id)


async def test_a_failing_handler_is_an_internal_error_there_and_nothing_worse(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()

    async def fail_once(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        if body["fail"]:
            raise RuntimeError("secret detail")
        return {}

    await server.serve(ECHO, fail_once)
    with capture_logs() as logs, pytest.raises(PeerRefused) as caught:
        await client.request(server.peer_id, ECHO, {"fail": True}, timeout=10)
    assert caught.value.code == "internal" and "secret" not in str(caught.value)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["handler failed"]
    assert (await client.request(server.peer_id, ECHO, {"fail": False}, timeout=10)).body == {}


async def test_an_oversize_payload_is_refused_before_it_is_sent(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=lambda body: body["most"])
    with pytest.raises(PeerRefused) as caught:
        await client.request(server.peer_id, ECHO, {"most": 1000}, bytes(32 << 20), timeout=30)
    assert caught.value.code == "too-large"
    assert caught.value.fields == {"size": 32 << 20, "limit": 1000}
    assert server.traffic.total.down < 1000


async def test_what_cannot_be_sent_is_the_senders_error(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()

    async def unpackable(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        return {"a set": {1}}

    await server.serve(ECHO, unpackable)
    with pytest.raises(ValueError, match="use the payload"):
        await client.request(server.peer_id, ECHO, {"long": bytes(MAX_HEADER_BYTES)}, timeout=10)
    with pytest.raises(PeerRefused, match="internal"):
        await client.request(server.peer_id, ECHO, {}, timeout=10)


async def test_an_answer_that_stops_half_way_is_a_timeout(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport(StreamLimits(idle_seconds=0.3))

    async def stall(info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_header({"ok": True, "body": {}, "payload": 100}) + b"half")
        await reader.read()
        writer.close()

    await server.p2p.add_binary_stream_handler(ECHO, stall)
    with pytest.raises(PeerTimeout, match=r"no byte for 0\.3 s, 96 still to come") as caught:
        await client.request(server.peer_id, ECHO, {}, timeout=30)
    assert caught.value.peer == server.peer_id


async def test_an_oversize_answer_is_refused_before_allocation(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=4096)
    with pytest.raises(PeerMisbehaved, match="4096 bytes, at most 100"):
        await client.request(server.peer_id, ECHO, {}, bytes(4096), timeout=10, max_reply=100)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_HEADER_BYTES + 1).to_bytes(4, "big"),
        (0).to_bytes(4, "big"),
        (5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1",
        (2).to_bytes(4, "big") + b"\x91\xc0",
        (len(pack({"body": 1})).to_bytes(4, "big") + pack({"body": 1})),
        len(p := pack({"body": {}, "payload": -1, "timeout": 1.0})).to_bytes(4, "big") + p,
        len(p := pack({"body": {}, "payload": 1, "timeout": float("nan")})).to_bytes(4, "big") + p,
    ],
)
async def test_garbage_closes_that_stream_and_is_one_log_line(start_transport: StartTransport, garbage: bytes) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo)
    with capture_logs() as logs:
        reader, writer = await raw_stream(client, server, ECHO)
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    assert [line["event"] for line in logs] == ["garbage from peer"]
    assert logs[0]["peer"] == client.peer_id
    assert (await client.request(server.peer_id, ECHO, {}, timeout=10)).body["from"] == client.peer_id


async def test_a_silent_stream_is_closed_at_the_deadline(start_transport: StartTransport) -> None:
    limits = StreamLimits(header_seconds=0.3, idle_seconds=0.3)
    server, client = await start_transport(limits), await start_transport()
    await server.serve(ECHO, echo, max_payload=100)
    header = pack({"body": {}, "payload": 100, "timeout": 60.0})
    for sent in (b"\x00", len(header).to_bytes(4, "big") + header + b"only a part"):
        reader, writer = await raw_stream(client, server, ECHO)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_one_peer_cannot_take_all_streams(start_transport: StartTransport) -> None:
    server, client = await start_transport(StreamLimits(streams_per_peer=2)), await start_transport()
    await server.serve(ECHO, echo)
    held = [await raw_stream(client, server, ECHO) for _ in range(2)]
    for _, writer in held:
        writer.write(b"\x00")

    async def busy() -> bool:
        try:
            await client.request(server.peer_id, ECHO, {}, timeout=10)
        except PeerRefused as refusal:
            return refusal.code == "busy"
        return False

    await eventually(busy)  # the two streams may reach the server a little later
    for _, writer in held:
        writer.close()

    async def free() -> bool:
        return not await busy()

    await eventually(free)


async def test_a_slow_answer_times_out_naming_the_peer(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()

    async def never(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    await server.serve(ECHO, never)
    with pytest.raises((PeerTimeout, PeerRefused)) as caught:
        await client.request(server.peer_id, ECHO, {}, timeout=0.5)
    assert server.peer_id in str(caught.value)


async def test_a_peer_killed_while_answering_is_named(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    asked = asyncio.Event()

    async def never(peer: str, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    await server.serve(ECHO, never)
    request = asyncio.create_task(client.request(server.peer_id, ECHO, {}, timeout=20))
    await asyncio.wait_for(asked.wait(), 10)
    os.kill(server.p2pd_pid, signal.SIGKILL)
    with pytest.raises(PeerUnreachable, match=server.peer_id):
        await request
    await server.wait_restarted(1, timeout=20)


async def test_a_killed_p2pd_comes_back_with_the_same_id_and_port(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=100)
    before, pid, called = server.addresses(), server.p2pd_pid, asyncio.Event()

    async def on_restart() -> None:
        called.set()

    server.on_restart(on_restart)
    os.kill(pid, signal.SIGKILL)
    await server.wait_restarted(1, timeout=20)
    assert server.addresses() == before and server.p2pd_pid != pid and called.is_set()
    await client.connect(before[0], timeout=10)
    assert (await client.request(server.peer_id, ECHO, {}, b"again", timeout=10)).payload == b"again"


async def test_unknown_protocol_and_unknown_peer(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    with pytest.raises(PeerRefused) as caught:
        await client.request(server.peer_id, protocol_name("1" * 64, "echo"), {}, timeout=10)
    assert caught.value.code == "no-protocol"
    with pytest.raises(PeerUnreachable, match="QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"):
        await client.request("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", ECHO, {}, timeout=10)


async def test_dialling_a_dead_or_malformed_address(start_transport: StartTransport) -> None:
    client = await start_transport()
    dead = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    with pytest.raises(PeerUnreachable, match="/tcp/1/"):
        await client.connect(dead, timeout=10)
    for malformed in ("nonsense", "/ip4/127.0.0.1/tcp/1", "/ip4/1/p2p/Qm", ""):
        with pytest.raises(ValueError, match="is not a full multiaddr"):
            await client.connect(malformed, timeout=10)


async def test_peers_find_each_other_through_a_third(start_transport: StartTransport) -> None:
    _, b, c = [await start_transport() for _ in range(3)]
    await b.serve(ECHO, echo)
    async with asyncio.timeout(30):
        while True:  # p2pd learns in the background who is where
            try:
                answer = await c.request(b.peer_id, ECHO, {"n": 1}, timeout=20)
                break
            except PeerUnreachable:
                await asyncio.sleep(0.1)
    assert answer.body["body"] == {"n": 1}


async def test_a_body_that_the_payload_limit_cannot_read_is_refused(start_transport: StartTransport) -> None:
    server, client = await start_transport(), await start_transport()
    await server.serve(ECHO, echo, max_payload=lambda body: body["most"])
    with capture_logs() as logs, pytest.raises(PeerRefused, match="bad-request"):
        await client.request(server.peer_id, ECHO, {}, b"x", timeout=10)
    assert logs == []


def test_fixed_ports_are_those_that_p2pd_got() -> None:
    hosts = ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::/tcp/0", "/ip4/0.0.0.0/tcp/7"]
    visible = [
        "/ip4/10.0.0.2/udp/41/quic-v1/p2p/Qm",
        "/ip4/10.0.0.2/tcp/40/p2p/Qm",
        "/ip6/fd00::1/tcp/42/p2p/Qm",
    ]
    assert with_fixed_ports(hosts, visible) == [
        "/ip4/0.0.0.0/tcp/40",
        "/ip4/0.0.0.0/udp/41/quic-v1",
        "/ip6/::/tcp/42",
        "/ip4/0.0.0.0/tcp/7",
    ]


DAEMON = """
import asyncio, sys
from pathlib import Path
from spesd.swarm.p2pd import TransportConfig
from spesd.swarm.transport import Transport

async def main():
    transport = await Transport.start(TransportConfig(Path(sys.argv[1]), nat_port_map=False))
    await transport.serve("/spesd/1/hello", None)
    print(transport.peer_id, transport.p2pd_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def start_daemon(identity_path: Path) -> tuple[asyncio.subprocess.Process, str, int]:
    """Another process with a transport; returns it with its peer id and the pid of its p2pd."""
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", DAEMON, str(identity_path), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    peer_id, pid = (await asyncio.wait_for(daemon.stdout.readline(), 60)).decode().split()
    return daemon, peer_id, int(pid)


async def test_p2pd_ends_when_its_daemon_is_killed(tmp_path: Path) -> None:
    daemon, _, pid = await start_daemon(tmp_path / "key")
    daemon.kill()
    await daemon.communicate()

    async def gone() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    await eventually(gone)
    remove_stale_sockets(tmp_path / "key")


async def test_sockets_of_a_killed_daemon_are_removed_by_its_next_start(tmp_path: Path) -> None:
    config = TransportConfig(tmp_path / "key", nat_port_map=False)
    daemon, peer_id, pid = await start_daemon(config.identity_path)
    daemon.kill()
    os.kill(pid, signal.SIGKILL)
    await daemon.communicate()
    left = config.sockets_path.read_text().splitlines()
    assert len(left) == 2 and existing(left) == left
    transport = await Transport.start(config)
    assert transport.peer_id == peer_id and existing(left) == []
    await transport.stop()
