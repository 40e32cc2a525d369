"""`spesd rounds`: what the last rounds brought."""

from __future__ import annotations

from collections import Counter

from spesd.api.headline import short, unit_name
from spesd.api.schema import RoundRecord, UnitResult
from spesd.cli.console import console, print_json
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for


def rounds(state_dir: StateDir = None, config: ConfigFile = None, json: Json = False, timeout: Timeout = 5.0) -> None:
    """List the last rounds, oldest first: seconds until the units that this peer trains had ended, and all others."""
    answer = client_for(state_dir, config, timeout).rounds()
    if json:
        print_json(answer)
        return
    from rich.table import Table

    table = Table(
        "round",
        "members",
        "own, s",
        "all, s",
        *(result.value for result in UnitResult),
        "coordinator",
        "notes",
        box=None,
    )
    for record in answer.rounds:
        counts = Counter(outcome.result for outcome in record.results.values())
        table.add_row(
            str(record.number),
            str(len(record.members)),
            f"{record.own_seconds:.1f}",
            f"{record.seconds:.1f}",
            *(str(counts[result]) for result in UnitResult),
            short(record.coordinator),
            _notes(record),
        )
    console().print(table)


def _notes(record: RoundRecord) -> str:
    """Units that were not fully committed, and why."""
    notes = []
    for unit, outcome in record.results.items():
        if outcome.result is UnitResult.PARTIAL:
            notes.append(f"{unit_name(unit)} without {', '.join(short(peer) for peer in outcome.missing)}")
        elif outcome.detail and outcome.result is UnitResult.UNCHANGED:
            notes.append(f"{unit_name(unit)}: {outcome.detail}")
    return "; ".join(notes)
