"""The command `spesd`: one verb per file. Verbs import what is slow (torch, hivemind, rich) when they run."""

from __future__ import annotations

import sys

import typer

from spesd.cli import data, demo, experts, limit, loss, peers, rounds, sample, start, status, stop, version
from spesd.cli.console import talk
from spesd.config.errors import ExpectedError

app = typer.Typer(
    name="spesd",
    help="Pretrain one mixture-of-experts model together with other volunteers, with no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(start.start)
app.command()(status.status)
app.command()(peers.peers)
app.command()(experts.experts)
app.command()(rounds.rounds)
app.command()(loss.loss)
app.command()(sample.sample)
app.command()(limit.limit)
app.command()(stop.stop)
app.command()(demo.demo)
app.command()(version.version)
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point: an expected error is one message on stderr and its exit code, never a traceback."""
    try:
        app()
    except ExpectedError as error:
        for line in str(error).splitlines():
            talk(line)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
