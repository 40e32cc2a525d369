"""`spesd data prepare`: from text files to token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spesd.cli.console import amount, print_json, talk
from spesd.cli.options import Json
from spesd.config.errors import ExpectedError

app = typer.Typer(help="Prepare text for a run.", no_args_is_help=True, rich_markup_mode=None)


class CannotPrepare(ExpectedError):
    """The sources make no data set."""


@app.callback()
def data() -> None:
    """Keeps `prepare` a verb of its own while it is the only one."""


@app.command()
def prepare(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Text files, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards; it is made.")],
    held_out_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the text kept for evaluation, never trained on.")
    ] = 0.02,
    json: Json = False,
) -> None:
    """Turn text into token shards, which `data.source` of a manifest names."""
    from spesd.data.prepare import prepare as make_shards
    from spesd.data.shards import DataError

    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise CannotPrepare(f"no such file or folder: {', '.join(missing)}")
    try:
        prepared = make_shards(sources, out, held_out_share)
    except (DataError, OSError) as error:
        raise CannotPrepare(str(error)) from None
    if json:
        print_json(prepared)
        return
    talk(
        f"{prepared.documents} files ({prepared.skipped} skipped), {amount(prepared.bytes)}, {prepared.tokens} tokens, "
        f"{len(prepared.train)} shards to train on and {len(prepared.held_out)} held out"
    )
    talk(f'in the manifest: [data] source = "{out.absolute()}"')
