"""Founding a run: prepare its data, make its genesis states, seal its manifest."""

from __future__ import annotations

import tempfile
from pathlib import Path

import structlog

from spesd.config.manifest import Draft, Manifest, Shard
from spesd.data.prepare import PreparedData, prepare, stdlib_documents
from spesd.model.genesis import initial_state
from spesd.model.units import UnitLayout
from spesd.swarm.blob_store import BlobStore

log = structlog.get_logger(__name__)


def found(draft: Draft, blobs: BlobStore) -> Manifest:
    """Seal `draft`. Shards and genesis states are in `blobs` afterwards. Raises DataError or OSError."""
    with tempfile.TemporaryDirectory(prefix="spesd-data-") as folder:
        if draft.data.source == "stdlib":
            where = Path(folder)
            prepared = prepare(stdlib_documents(), where, draft.data.held_out_share)
        else:
            where = Path(draft.data.source)
            prepared = PreparedData.load(where)
        _take_shards(where, (*prepared.train, *prepared.held_out), blobs)
    log.info("data ready", tokens=prepared.tokens, documents=prepared.documents, held_out=prepared.held_out_documents)
    layout = UnitLayout(draft.model, draft.sync.shared_shards)
    values = initial_state(layout)
    genesis = {}
    for unit in layout.units:
        at = layout.offsets[unit.id]
        genesis[unit.id] = blobs.put(values[at : at + unit.size].astype("<f4").tobytes(), durable=True)
    return draft.seal(prepared.train, prepared.held_out, genesis)


def _take_shards(folder: Path, shards: tuple[Shard, ...], blobs: BlobStore) -> None:
    for shard in shards:
        stored = blobs.put_file(folder / f"{shard.hash}.shard")
        if stored != shard.hash:
            raise OSError(f"{folder / shard.hash}.shard is damaged: its hash is {stored[:12]}; prepare the data again")
