"""`spesd experts`: who trains what."""

from __future__ import annotations

from spesd.api.headline import short
from spesd.cli.console import console, print_json
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for


def experts(state_dir: StateDir = None, config: ConfigFile = None, json: Json = False, timeout: Timeout = 5.0) -> None:
    """List the experts, their owners and their agreed state on this peer."""
    answer = client_for(state_dir, config, timeout).experts()
    if json:
        print_json(answer)
        return
    from rich.table import Table

    table = Table("expert", "version", "hash", "trained here", "owners", box=None)
    for expert in answer.experts:
        owners = ", ".join(short(peer) for peer in expert.owners) or "nobody: it keeps its value"
        table.add_row(str(expert.expert), str(expert.version), expert.hash[:12], "yes" if expert.mine else "", owners)
    console().print(table)
