"""The daemon's side of the local API: HTTP and JSON over a unix socket that only its own user can open."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog
from aiohttp import web
from pydantic import ValidationError

from spesd.api.schema import Answer, Error, Experts, LimitChange, Limits, Losses, Peers, Rounds, Status, Stop
from spesd.api.socket_path import create_socket_path, peer_uid, remove_socket

MAX_REQUEST_BYTES = 4096
"""No request has a body worth more."""

CLOSE_SECONDS = 2.0
"""How long `close` lets requests in flight finish."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger(__name__)


class Provider(Protocol):
    """What the daemon hands in. All methods run on the event loop and return at once."""

    def status(self) -> Status: ...
    def peers(self) -> Peers: ...
    def experts(self) -> Experts: ...
    def rounds(self) -> Rounds: ...
    def loss(self) -> Losses: ...
    def limit(self, change: LimitChange) -> Limits: ...
    def stop(self) -> Stop: ...


class ApiServer:
    """Serves a provider on the socket of `state_dir`, whose lock the caller holds."""

    def __init__(self, provider: Provider, state_dir: Path) -> None:
        self._provider = provider
        self._state_dir = state_dir
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError when the socket cannot be made."""
        path = create_socket_path(self._state_dir)
        runner = web.AppRunner(build_app(self._provider), access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await runner.setup()
        self._runner = runner
        # The folder is 0700 already, so nobody else can reach the socket before its mode is set.
        await web.UnixSite(runner, path).start()
        path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening and remove the socket. Harmless when not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
            remove_socket(self._state_dir)


def build_app(provider: Provider) -> web.Application:
    """The routes; see `docs/api.md`."""
    app = web.Application(middlewares=[_json_errors, _own_user_only], client_max_size=MAX_REQUEST_BYTES)
    for name in ("status", "peers", "experts", "rounds", "loss"):
        app.router.add_get(f"/v1/{name}", _answering(getattr(provider, name)))
    app.router.add_post("/v1/limit", _limiting(provider))
    app.router.add_post("/v1/stop", _answering(provider.stop))
    return app


def _answering(method: Callable[[], Answer]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return _json(method(), 200)

    return handle


def _limiting(provider: Provider) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            change = LimitChange.model_validate_json(await request.read())
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, entry['loc'])) or 'body'}: {entry['msg']}" for entry in error.errors()
            )
            return _json(Error(error="bad-request", detail=wrong), 400)
        return _json(provider.limit(change), 200)

    return handle


def _json(answer: Answer, status: int) -> web.Response:
    return web.Response(text=answer.model_dump_json(), status=status, content_type="application/json")


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json(Error(error=error.reason.lower().replace(" ", "-"), detail=request.path), error.status)
    except Exception as error:
        log.exception("request to the local API failed", path=request.path)
        return _json(Error(error="internal", detail=f"{type(error).__name__}: {error}"), 500)


@web.middleware
async def _own_user_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse other users: the modes of folder and socket do so already, this holds where a platform ignores them."""
    transport = request.transport
    uid = peer_uid(transport.get_extra_info("socket")) if transport is not None else None
    if uid not in (None, 0, os.getuid()):
        log.warning("request to the local API refused", uid=uid, path=request.path)
        return _json(Error(error="forbidden", detail=f"user {uid} is not the daemon's"), 403)
    return await handler(request)
