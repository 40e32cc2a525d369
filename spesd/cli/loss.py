"""`spesd loss`: the held-out loss over the rounds."""

from __future__ import annotations

from collections.abc import Sequence

from spesd.api.schema import HeldOut
from spesd.cli.console import console, number, print_json
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for

ROWS = 20
"""Points that a person wants to see; `--json` has all."""

BAR = 40


def loss(state_dir: StateDir = None, config: ConfigFile = None, json: Json = False, timeout: Timeout = 5.0) -> None:
    """Show how the held-out loss has come down since the daemon started."""
    answer = client_for(state_dir, config, timeout).loss()
    if json:
        print_json(answer)
        return
    from rich.table import Table

    table = Table("round", "held-out loss", "", box=None)
    highest = max((point.loss for point in answer.points), default=1.0)
    for point in thinned(answer.points, ROWS):
        table.add_row(str(point.round), number(point.loss), "█" * round(BAR * point.loss / highest))
    console().print(table)


def thinned(points: Sequence[HeldOut], most: int) -> list[HeldOut]:
    """At most so many points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
