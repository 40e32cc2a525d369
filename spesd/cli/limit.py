"""`spesd limit`: leave some of the line to others, at once."""

from __future__ import annotations

from typing import Annotated

import typer

from spesd.api.schema import LimitChange, Limits
from spesd.cli.console import print_json
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for
from spesd.config.peer import LEAST_MBIT

OFF = "off"
CAP_HELP = "Mbit/s, or off."


def limit(
    up: Annotated[str | None, typer.Option(help=f"Send no faster than this, {CAP_HELP}")] = None,
    down: Annotated[str | None, typer.Option(help=f"Receive no faster than this, {CAP_HELP}")] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    json: Json = False,
    timeout: Timeout = 5.0,
) -> None:
    """Cap the daemon's traffic until it ends; without --up and --down say what the caps are."""
    given = {"up_mbit": _cap(up, "--up"), "down_mbit": _cap(down, "--down")}
    change = LimitChange(**{name: cap for (name, cap), text in zip(given.items(), (up, down), strict=True) if text})
    limits = client_for(state_dir, config, timeout).limit(change)
    if json:
        print_json(limits)
    else:
        typer.echo(caps(limits))


def caps(limits: Limits) -> str:
    """`at most 4 Mbit/s up, any speed down`."""
    pairs = ((limits.up_mbit, "up"), (limits.down_mbit, "down"))
    return ", ".join(f"{'any speed' if cap is None else f'at most {cap:g} Mbit/s'} {way}" for cap, way in pairs)


def _cap(text: str | None, flag: str) -> float | None:
    if text is None or text == OFF:
        return None
    try:
        cap = float(text)
    except ValueError:
        cap = 0.0
    if not LEAST_MBIT <= cap < float("inf"):
        raise typer.BadParameter(
            f"{text!r} is not a number of Mbit/s of at least {LEAST_MBIT:g}, nor {OFF}", param_hint=flag
        )
    return cap
