"""Helpers of the swarm tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
from hivemind.p2p import PeerID

from spesd.swarm.transport import Transport

RUN = "ab" * 32
OTHER_RUN = "cd" * 32

StartTransport = Callable[..., Awaitable[Transport]]


def p2pd_children() -> set[int]:
    """Live child processes of the tests."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


def existing(paths: Sequence[str]) -> list[str]:
    """Those of the paths that exist."""
    return [path for path in paths if Path(path).exists()]


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Wait until `condition` holds; fails with TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def raw_stream(
    caller: Transport, callee: Transport, protocol: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream on which a hostile caller can write any bytes."""
    _, reader, writer = await caller.p2p.call_binary_stream_handler(PeerID.from_base58(callee.peer_id), protocol)
    return reader, writer
