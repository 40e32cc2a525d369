"""Rounds of the central parameter server over the rig: training is blocked while a round runs."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from bench.report import BenchError
from bench.wan.arithmetic import Sizes, server_limit, server_volume
from bench.wan.emulator import address
from bench.wan.report import Measurement, PeerFigures
from bench.wan.rig import Counters, Rig
from bench.wan.setting import Setting
from spesd.cli.fleet import Interruptible

START_SECONDS, ROUND_SECONDS, END_SECONDS = 30.0, 300.0, 10.0
POLL_SECONDS = 0.05

ROUNDS = 1
"""They are long, and alike."""


class Child:
    """A process of `bench.wan.server`, which ends with its standard input."""

    def __init__(self, argv: Sequence[str], who: str) -> None:
        self.who = who
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._process.communicate(timeout=END_SECONDS if kind is None else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self) -> None:
        """Begin a round."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()

    def line(self, seconds: float, signals: Interruptible) -> str:
        """The next line that it prints. Raises BenchError when it ends or says nothing, and Interrupted."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(0):
                if time.monotonic() > deadline:
                    raise BenchError(f"{self.who} of the baseline has said nothing for {seconds:.0f} s")
                signals.pause(POLL_SECONDS)
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self.who} of the baseline ended with exit code {self._process.wait(END_SECONDS)}")
        return line.strip()


def run(rig: Rig, signals: Interruptible, setting: Setting) -> Measurement:
    """Measure rounds. Peers are nodes 1 to P, the server is node P + 1. Raises Interrupted and BenchError."""
    sizes, nodes = setting.sizes, range(1, setting.sizes.peers + 1)
    with ExitStack() as stack:
        server = _start(stack, rig, sizes, sizes.peers + 1, "server")
        server.line(START_SECONDS, signals)
        clients = [_start(stack, rig, sizes, node, "client", node - 1) for node in nodes]
        for client in clients:
            client.line(START_SECONDS, signals)
        before = {node: rig.counters(node) for node in nodes}
        began = time.monotonic()
        rounds = [_round(clients, signals, setting.local_seconds) for _ in range(ROUNDS)]
        window = time.monotonic() - began
        devices = [rig.counters(node).since(before[node]) for node in nodes]
    return Measurement(
        volume=server_volume(sizes),
        limit=server_limit(sizes, setting.link, setting.server_link),
        window=window,
        seconds=[max(r["ended"] for r in reports) - min(r["began"] for r in reports) for reports in rounds],
        peers=[_peer(devices[i], [reports[i] for reports in rounds], window) for i in range(sizes.peers)],
    )


def _start(stack: ExitStack, rig: Rig, sizes: Sizes, node: int, role: str, number: int = 0) -> Child:
    command = [sys.executable, "-m", "bench.wan.server", role, *map(str, sizes)]
    if role == "client":
        command += ["--number", str(number), "--host", address(sizes.peers + 1)]
    return stack.enter_context(Child(rig.argv(node, command), f"{role} on node {node}"))


def _round(clients: Sequence[Child], signals: Interruptible, local_seconds: float) -> list[dict[str, Any]]:
    """Local steps, which cost the network nothing, and then a round; each client's report."""
    signals.pause(local_seconds)
    for client in clients:
        client.ask()
    return [json.loads(client.line(ROUND_SECONDS, signals)) for client in clients]


def _peer(device: Counters, reports: Sequence[dict[str, Any]], window: float) -> PeerFigures:
    stalled = sum(report["ended"] - report["began"] for report in reports)
    counted = Counters(sum(report["up"] for report in reports), sum(report["down"] for report in reports))
    return PeerFigures(device, counted, stalled, pace=1 - stalled / window)
