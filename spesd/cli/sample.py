"""`spesd sample`: text from the agreed state, read from the state dir; the daemon is not asked, and trains on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spesd.cli.options import ConfigFile, StateDir
from spesd.config.errors import ConfigError, ExpectedError
from spesd.config.peer import load_peer_config

if TYPE_CHECKING:
    import numpy as np

    from spesd.config.manifest import Manifest

ATTEMPTS = 5
"""A running daemon may remove a packet between our look at the ledger and our reading of it: look again."""


def sample(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    state_dir: StateDir = None,
    config: ConfigFile = None,
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0 takes the most likely token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    """Generate text from the agreed state of this peer, whether its daemon runs or not."""
    folder = load_peer_config({"state_dir": state_dir}, config=config).state_dir
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character")
    for text in _text(folder, prompt, tokens, temperature, seed):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def read_agreed(folder: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Manifest and agreed state of every unit, from a state dir that a daemon may be using. Raises ExpectedError."""
    from spesd.daemon.joining import load_manifest
    from spesd.daemon.logs import configure_logs
    from spesd.daemon.state_dir import StateDir as Folder
    from spesd.daemon.store import Store, StoredBlobs
    from spesd.model.units import UnitLayout
    from spesd.sync.workshop import Workshop

    configure_logs("error", "auto")
    manifest = load_manifest(Folder(folder))
    if manifest is None:
        raise ExpectedError(f"{folder} belongs to no run yet; start a daemon on it first")
    sizes = {unit.id: unit.size for unit in UnitLayout(manifest.model, manifest.sync.shared_shards).units}
    store = Store(Folder(folder), manifest.run_id, owner=False)
    workshop = Workshop(manifest.run_id, sizes, manifest.sync, StoredBlobs(store.blobs))
    for _ in range(ATTEMPTS):
        store.restore(sizes.keys() - workshop.agreed.keys(), workshop)
        if workshop.agreed.keys() == sizes.keys():
            return manifest, workshop.agreed
    missing = sorted(sizes.keys() - workshop.agreed.keys())
    raise ExpectedError(f"{folder} does not have the whole model yet: {', '.join(missing)} missing; see `spesd status`")


def _text(folder: Path, prompt: str, count: int, temperature: float, seed: int) -> Iterator[str]:
    import codecs

    import numpy as np

    from spesd.data.tokenizer import ByteTokenizer
    from spesd.model.sample import generate
    from spesd.model.units import UnitLayout

    manifest, agreed = read_agreed(folder)
    layout = UnitLayout(manifest.model, manifest.sync.shared_shards)
    context = manifest.data.sequence_length
    start = np.asarray(ByteTokenizer().encode(prompt))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield prompt
    for token in generate(layout, agreed, start, context=context, count=count, temperature=temperature, seed=seed):
        yield decoder.decode(bytes([token]) if token < 256 else b"?")
