"""The local API over its socket: answers, refusals, and what is left behind."""

import asyncio
import os
import socket
import stat

import pytest
import uvloop

from spesd.api import server as server_module
from spesd.api.client import ApiError, Client, NotRunning
from spesd.api.schema import Experts, LimitChange, Limits, Losses, Peers, Reason, Rounds, State, Status, Stop
from spesd.api.server import ApiServer
from spesd.api.socket_path import create_socket_path, find_socket_path, peer_uid
from spesd.config.errors import ExitCode


class FixedProvider:
    """Answers the same to everybody, and counts the stops."""

    def __init__(self):
        self.stops = 0
        self.error = None

    def status(self):
        if self.error:
            raise self.error
        return Status(state=State.TRAINING, reason=Reason.ALONE, version="0.1", pid=os.getpid(), uptime_s=1.5)

    def peers(self):
        return Peers()

    def experts(self):
        return Experts()

    def loss(self):
        return Losses()

    def rounds(self):
        return Rounds()

    def limit(self, change):
        return Limits(up_mbit=1.0, down_mbit=2.0).model_copy(update=change.model_dump(exclude_unset=True))

    def stop(self):
        self.stops += 1
        return Stop(pid=4711)


@pytest.fixture
def provider():
    return FixedProvider()


@pytest.fixture(params=["short", "long"])
def state_dir(request, tmp_path):
    return tmp_path / ("state" if request.param == "short" else "x" * 120)


@pytest.fixture
async def client(provider, state_dir):
    server = ApiServer(provider, state_dir)
    await server.start()
    yield Client(state_dir, timeout=10)
    await server.close()
    assert find_socket_path(state_dir) is None


def ask(method, *args):
    """Run one of the client's blocking methods beside the loop that serves it."""
    return asyncio.to_thread(method, *args)


async def raw(state_dir, request):
    """Send bytes, return all that comes back."""
    reader, writer = await asyncio.open_unix_connection(find_socket_path(state_dir))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_every_route_answers_its_model(client, provider):
    assert await ask(client.status) == provider.status()
    assert await ask(client.peers) == Peers()
    assert await ask(client.experts) == Experts()
    assert await ask(client.rounds) == Rounds()
    assert await ask(client.loss) == Losses()
    assert (await ask(client.stop)).pid == 4711
    assert provider.stops == 1


async def test_caps_that_are_not_named_stay_and_null_lifts_one(client):
    assert await ask(client.limit, LimitChange()) == Limits(up_mbit=1.0, down_mbit=2.0)
    assert await ask(client.limit, LimitChange(up_mbit=None)) == Limits(up_mbit=None, down_mbit=2.0)
    assert await ask(client.limit, LimitChange(down_mbit=7)) == Limits(up_mbit=1.0, down_mbit=7.0)


@pytest.mark.parametrize("body", [b'{"up_mbit": 0}', b'{"up_mbit": "fast"}', b'{"sideways": 1}', b"{", b""])
async def test_a_cap_that_makes_no_sense_is_refused(client, state_dir, body):
    head = b"POST /v1/limit HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await raw(state_dir, head + body)
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"bad-request"' in answer


async def test_only_the_own_user_reaches_the_socket(client, state_dir):
    path = find_socket_path(state_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((state_dir / "api").stat().st_mode) == 0o700


async def test_another_user_is_refused(client, monkeypatch, provider):
    monkeypatch.setattr(server_module, "peer_uid", lambda connection: os.getuid() + 1)
    with pytest.raises(ApiError, match=r"forbidden: user \d+ is not the daemon's"):
        await ask(client.stop)
    assert provider.stops == 0


def test_the_uid_is_found_on_the_daemons_loop_too(provider, tmp_path):
    async def one_request():
        server = ApiServer(provider, tmp_path)
        await server.start()
        try:
            return await ask(Client(tmp_path).status)
        finally:
            await server.close()

    assert uvloop.run(one_request()).state is State.TRAINING


def test_peer_uid_is_that_of_the_other_end():
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert peer_uid(left) == os.getuid()


async def test_error_of_the_daemon_is_told_and_survived(client, provider):
    provider.error = RuntimeError("out of ideas")
    with pytest.raises(ApiError, match="refused status: internal: RuntimeError: out of ideas"):
        await ask(client.status)
    provider.error = None
    assert (await ask(client.status)).state is State.TRAINING


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (b"GET /v1/nothing HTTP/1.0\r\n\r\n", b" 404 ", b'{"error":"not-found","detail":"/v1/nothing"}'),
        (b"GET /v1/stop HTTP/1.0\r\n\r\n", b" 405 ", b'{"error":"method-not-allowed","detail":"/v1/stop"}'),
        (b"\x00\xff garbage\r\n\r\n", b" 400 ", b""),
    ],
)
async def test_wrong_requests_get_an_error(client, state_dir, request_bytes, status, body):
    answer = await raw(state_dir, request_bytes)
    assert status in answer.splitlines()[0]
    assert answer.endswith(body)
    assert (await ask(client.status)).state is State.TRAINING


async def test_a_killed_daemon_does_not_block_the_next(provider, state_dir):
    left = create_socket_path(state_dir)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with pytest.raises(NotRunning):
        Client(state_dir).status()
    server = ApiServer(provider, state_dir)
    await server.start()
    assert (await ask(Client(state_dir).status)).state is State.TRAINING
    await server.close()
    assert not left.exists()


def test_no_daemon(tmp_path):
    with pytest.raises(NotRunning, match="no daemon is running on") as caught:
        Client(tmp_path).status()
    assert caught.value.exit_code is ExitCode.NOT_RUNNING


async def test_a_silent_daemon_is_named_at_the_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(create_socket_path(tmp_path)))
        silent.listen()
        with pytest.raises(ApiError, match=r"did not answer status within 0\.05 s"):
            Client(tmp_path, timeout=0.05).status()


async def test_an_answer_that_does_not_fit_is_an_error(tmp_path):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"state": "dancing"}')
        writer.close()

    async with await asyncio.start_unix_server(serve, create_socket_path(tmp_path)):
        with pytest.raises(ApiError, match=r"does not fit this version of spesd: state, version, pid, uptime_s"):
            await ask(Client(tmp_path).status)
