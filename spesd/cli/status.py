"""`spesd status`: what the daemon does, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from spesd.api.headline import headline, short
from spesd.api.schema import Line, Neighbour, Status, Traffic
from spesd.cli.console import amount, console, duration, number, print_json
from spesd.cli.limit import caps
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for

if TYPE_CHECKING:
    from rich.text import Text


MOST_LINES = 16
"""Peers whose lines are shown; `spesd peers` shows all."""


def status(
    state_dir: StateDir = None,
    config: ConfigFile = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 1.0,
    timeout: Timeout = 5.0,
) -> None:
    """Say what the daemon does, and why."""
    client = client_for(state_dir, config, timeout)
    if watch:
        try:
            _watch(client.status, json, interval)
        except KeyboardInterrupt:
            return
    elif json:
        print_json(client.status())
    else:
        console().print(render(client.status()), soft_wrap=True)


def render(answer: Status) -> Text:
    """The headline, then one line for each matter. Not wrapped: the line to join with is to be copied."""
    from rich.text import Text

    text = Text(headline(answer), style="bold", no_wrap=True, overflow="ignore")
    for name, value in facts(answer).items():
        text.append_text(Text.assemble("\n", (f"{name:<9}", "not bold dim"), (value, "not bold")))
    for warning in answer.warnings:
        text.append(f"\nwarning: {warning}", "not bold yellow")
    return text


def facts(answer: Status) -> dict[str, str]:
    """What `spesd status` shows under its first line, in order."""
    trainer = answer.trainer
    held_out = f"{number(trainer.held_out.loss)} (round {trainer.held_out.round})" if trainer.held_out else "–"
    share = 100 * (trainer.snapshot_share + trainer.load_share)
    return {
        "run": f"{answer.run_name or '–'} {answer.run[:16]}",
        "peer": answer.peer or "–",
        "trainer": f"{trainer.state} on {trainer.device or '–'}, step {trainer.step}, restarts {trainer.restarts}",
        "speed": f"{trainer.tokens_per_second:.0f} tokens/s, {share:.1f} % of the time spent on rounds",
        "loss": f"{number(trainer.loss)} in training, {held_out} held out",
        "trains": ", ".join(answer.owned) or "–",
        "traffic": _traffic(answer.traffic),
        "peers": "\n          ".join([f"{answer.peers_live} live", *map(line, answer.neighbours[:MOST_LINES])]),
        "daemon": f"spesd {answer.version}, pid {answer.pid}, up {duration(answer.uptime_s)}",
        "to join": answer.join or "–",
    }


def line(neighbour: Neighbour) -> str:
    """How a peer is connected: `QmYyQSo1… direct, 52 ms, 1.2 Mbit/s up, 0.4 down`."""
    if neighbour.line is Line.NONE:
        return f"{short(neighbour.peer)} not connected"
    rtt = f"{neighbour.rtt_ms:.0f} ms, " if neighbour.rtt_ms is not None else ""
    flow = f"{number(neighbour.up_mbit, 2)} Mbit/s up, {number(neighbour.down_mbit, 2)} down"
    return f"{short(neighbour.peer)} {neighbour.line.value}, {rtt}{flow}"


def _traffic(traffic: Traffic) -> str:
    parts = {"since the start": traffic, "today": traffic.today, "this month": traffic.month}
    texts = [f"{amount(part.up_bytes)} up, {amount(part.down_bytes)} down {name}" for name, part in parts.items()]
    capped = traffic.limits.up_mbit or traffic.limits.down_mbit
    return " · ".join([*texts, *([caps(traffic.limits)] if capped else [])])


def _watch(ask: Callable[[], Status], json: bool, interval: float) -> None:
    from rich.live import Live

    screen = console()
    if json or not screen.is_terminal:
        while True:
            answer = ask()
            print_json(answer) if json else screen.print(headline(answer), soft_wrap=True)
            time.sleep(interval)
    with Live(render(ask()), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(render(ask()), refresh=True)
