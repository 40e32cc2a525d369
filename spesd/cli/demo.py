"""`spesd demo`: a bootstrap peer and three volunteers train one model on this machine."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from spesd.cli.console import console, talk
from spesd.cli.demo_report import (
    Track,
    incomparable,
    live_table,
    plain_line,
    problems,
    summarise,
    summary_lines,
)
from spesd.cli.fleet import Fleet, Interrupted, Interruptible
from spesd.cli.launch import command
from spesd.config.errors import ExitCode, ExpectedError
from spesd.config.files import load_draft
from spesd.config.peer import PeerConfig

LISTEN = ("/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0")
READY_SECONDS = 120.0
SETTLE_SECONDS = 20.0
"""At the end, how long peers get to show a version of each unit that another one has too."""

PLAIN_SECONDS = 10.0
"""Between two lines, where there is no terminal for a live table."""


class DemoFailed(ExpectedError):
    """The demo ran, but did not show what it must."""


def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long the peers train together.")] = 180.0,
    manifest: Annotated[Path, typer.Option(help="Draft of the run, TOML.")] = Path("peer_configs/demo.toml"),
    peers: Annotated[int, typer.Option(min=2, max=64, help="Number of peers, the bootstrap peer included.")] = 4,
    train_experts: Annotated[int, typer.Option(min=1, help="Experts that each peer trains.")] = 3,
) -> None:
    """Start several peers here, train, show it, stop. The last line is one JSON object."""
    load_draft(manifest)
    try:
        tracks = run_demo(manifest, peers, train_experts, seconds)
    except Interrupted as interrupted:
        talk(f"{interrupted}; all daemons are stopped")
        raise typer.Exit(interrupted.exit_code) from None
    raise typer.Exit(report(tracks))


def run_demo(
    manifest: Path,
    peers: int,
    train_experts: int,
    seconds: float,
    argv: Callable[[PeerConfig], Sequence[str]] = command,
) -> list[Track]:
    """Run the demo and return what was seen of each peer; no process or file of it is left, however it ends.

    Raises Interrupted at a signal, and ExpectedError when a daemon ends, is not ready in time, or had to be killed.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(Interruptible())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spesd-demo-")))
        fleet = Fleet(folder, signals, argv)
        with fleet:
            tracks = _train(fleet, manifest, peers, train_experts, seconds)
            talk("stopping all daemons")
        if fleet.faults:
            raise DemoFailed(f"the daemons did not stop cleanly: {'; '.join(fleet.faults)}")
    return tracks


def report(tracks: Sequence[Track]) -> int:
    """Print summary and verdict, the JSON object last; return the exit code.

    Raises DemoFailed when a peer never answered.
    """
    try:
        summary = summarise(tracks)
    except ValueError as error:
        raise DemoFailed(str(error)) from None
    for line in summary_lines(summary):
        typer.echo(line)
    failures = list(problems(summary, tracks))
    for failure in failures:
        talk(f"failed: {failure}")
    typer.echo(summary.model_dump_json())
    return ExitCode.RUNTIME if failures else ExitCode.OK


def _train(fleet: Fleet, manifest: Path, peers: int, train_experts: int, seconds: float) -> list[Track]:
    local = {"listen": LISTEN, "train_experts": train_experts, "threads": 1}
    talk(f"starting the bootstrap peer; logs are in {fleet.folder}/peer-*/daemon.log until the end")
    founder = fleet.spawn(manifest=manifest, **local)
    addresses = founder.wait_ready(READY_SECONDS, fleet.signals.pause).addresses
    if not addresses:
        raise DemoFailed("the bootstrap peer is ready, but tells no address")
    talk(f"{peers - 1} volunteers join {addresses[0]}")
    volunteers = [fleet.spawn(join=addresses[:1], **local) for _ in range(peers - 1)]
    for volunteer in volunteers:
        volunteer.wait_ready(READY_SECONDS, fleet.signals.pause)
    tracks = [Track() for _ in fleet.daemons]
    _watch(fleet, tracks, seconds)
    _settle(fleet, tracks)
    return tracks


def _watch(fleet: Fleet, tracks: Sequence[Track], seconds: float) -> None:
    """Look once a second and show it."""
    from rich.live import Live

    start = time.monotonic()
    screen = console()
    next_line = 0.0
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=screen, auto_refresh=False)) if sys.stdout.isatty() else None
        while (passed := time.monotonic() - start) < seconds:
            _look(fleet, tracks)
            if live is not None:
                live.update(live_table(tracks, f"{passed:.0f} of {seconds:.0f} s"), refresh=True)
            elif passed >= next_line:
                screen.print(f"{passed:4.0f} s: {plain_line(tracks)}", soft_wrap=True)
                next_line += PLAIN_SECONDS
            fleet.signals.pause(min(1.0, seconds - passed))


def _settle(fleet: Fleet, tracks: Sequence[Track]) -> None:
    """Look until all peers can be compared: one may be a round behind in a foreign expert."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        _look(fleet, tracks)
        answered = all(track.status is not None for track in tracks)
        if (answered and not any(incomparable(tracks))) or time.monotonic() > deadline:
            return
        fleet.signals.pause(0.5)


def _look(fleet: Fleet, tracks: Sequence[Track]) -> None:
    for track, status in zip(tracks, fleet.statuses(), strict=True):
        if status is not None:
            track.observe(status, time.monotonic())
