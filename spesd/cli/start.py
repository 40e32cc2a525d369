"""`spesd start`: become a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spesd.cli.options import ConfigFile, StateDir
from spesd.config.errors import ExitCode
from spesd.config.peer import PeerConfig, load_peer_config

READY_SECONDS = 300.0
"""Default of --ready-timeout: preparing the data and importing torch take a while on a slow machine."""


def start(
    context: typer.Context,
    manifest: Annotated[Path | None, typer.Option(help="Found a new run from this draft, TOML.")] = None,
    join: Annotated[list[str] | None, typer.Option(help="Address of a peer of a running swarm; repeatable.")] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
    train_experts: Annotated[int | None, typer.Option(help="Number of experts to train.")] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory for weights and optimizer; gives the number of experts.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the trainer; default: physical cores.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on; repeatable.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddr told to others; repeatable.")] = None,
    nat_port_map: Annotated[
        bool | None, typer.Option("--nat-port-map/--no-nat-port-map", help="Ask the router to forward the port.")
    ] = None,
    reachability: Annotated[
        str | None, typer.Option(help="Whether others can dial this machine: auto, public or private.")
    ] = None,
    relays: Annotated[
        list[str] | None, typer.Option(help="Address of a peer that relays for this one; repeatable.")
    ] = None,
    serve_relay: Annotated[
        bool | None, typer.Option("--serve-relay/--no-serve-relay", help="Relay for others, where this one is public.")
    ] = None,
    max_tokens_per_second: Annotated[float | None, typer.Option(help="Train no faster than this.")] = None,
    up_mbit: Annotated[float | None, typer.Option(help="Send no faster than this, Mbit/s.")] = None,
    down_mbit: Annotated[float | None, typer.Option(help="Receive no faster than this, Mbit/s.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, human or json.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background once ready.")] = False,
    ready_timeout: Annotated[
        float, typer.Option(min=1.0, help="With --detach: seconds to wait until ready.")
    ] = READY_SECONDS,
) -> None:
    """Become a peer: found a run (--manifest) or join one (--join). A restart needs neither."""
    flags = {field: context.params[field] for field in PeerConfig.model_fields}
    settings = load_peer_config(flags, config=config)
    if settings.manifest is not None:
        from spesd.config.files import load_draft

        load_draft(settings.manifest)  # Mistakes in it are told before the slow imports.
    raise typer.Exit(_detached(settings, ready_timeout) if detach else _foreground(settings))


def _foreground(settings: PeerConfig) -> int:
    from spesd.daemon.run import run

    code: int = run(settings)
    return code


def _detached(settings: PeerConfig, ready_timeout: float) -> int:
    """Start the same daemon in a session of its own, and wait until it is ready or gone."""
    from spesd.api.headline import ready_line
    from spesd.cli.launch import Daemon

    daemon = Daemon.spawn(settings)
    typer.echo(ready_line(daemon.wait_ready(ready_timeout)))
    return ExitCode.OK
