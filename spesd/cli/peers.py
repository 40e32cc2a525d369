"""`spesd peers`: who is here."""

from __future__ import annotations

from spesd.cli.console import console, duration, print_json
from spesd.cli.options import ConfigFile, Json, StateDir, Timeout, client_for
from spesd.cli.status import line


def peers(state_dir: StateDir = None, config: ConfigFile = None, json: Json = False, timeout: Timeout = 5.0) -> None:
    """List the live peers of the run."""
    answer = client_for(state_dir, config, timeout).peers()
    if json:
        print_json(answer)
        return
    from rich.table import Table

    table = Table("peer", "state", "round", "experts", "version", "seen", "line", "address", box=None)
    for peer in sorted(answer.peers, key=lambda peer: (not peer.me, peer.peer)):
        table.add_row(
            f"{peer.peer} (this one)" if peer.me else peer.peer,
            peer.state.value,
            str(peer.round),
            ", ".join(unit.removeprefix("expert-") for unit in peer.owned) or "–",
            peer.version,
            f"{duration(peer.age_s)} ago",
            "–" if peer.me else line(peer).partition(" ")[2],
            peer.addresses[0].partition("/p2p/")[0] if peer.addresses else "–",
        )
    console().print(table)
