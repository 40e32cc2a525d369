"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spesd.api.client import Client
from spesd.config.peer import load_peer_config

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder of the daemon: tells several on one machine apart.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Peer config file, TOML.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the daemon's answer.")]


def client_for(state_dir: Path | None, config: Path | None, timeout: float) -> Client:
    """The client of the daemon that these flags mean. Raises ConfigError."""
    return Client(load_peer_config({"state_dir": state_dir}, config=config).state_dir, timeout)
