"""What a daemon keeps of a run on disk: blobs, the chain of every unit, unaccepted work and progress.

A full state is written only now and then (an anchor); a restart takes the newest anchor that is intact and replays the
packets after it, so that a process killed at any point finds a state that the swarm has agreed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from spesd.daemon.state_dir import StateDir, write_atomically
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.errors import BlobMissing
from spesd.sync.codec import Values
from spesd.sync.effects import Commit
from spesd.sync.ledger import Chain, UnitId
from spesd.sync.messages import EntryInfo, HeadInfo
from spesd.sync.workshop import Rejected, Workshop

log = structlog.get_logger(__name__)


class StoredBlobs:
    """The blob store as the workshop wants it."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def get(self, hash: str) -> bytes:
        """Raises KeyError if the blob is not here, or was damaged."""
        try:
            return self._store.get(hash)
        except BlobMissing as error:
            raise KeyError(str(error)) from None

    def put(self, data: bytes, *, durable: bool = False) -> str:
        return self._store.put(data, durable=durable)


class ChainFile(BaseModel):
    """A `Chain` as it lies on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchors: list[HeadInfo]
    entries: list[EntryInfo]

    @classmethod
    def of(cls, chain: Chain) -> ChainFile:
        return cls(
            anchors=[HeadInfo.of(head) for head in chain.anchors],
            entries=[EntryInfo.of(entry) for entry in chain.entries],
        )

    def chain(self) -> Chain:
        """Raises ValueError if an entry is no valid link."""
        return Chain([info.head() for info in self.anchors], [info.entry() for info in self.entries])


class Progress(BaseModel):
    """Where this peer was when it last said so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    owned: tuple[UnitId, ...] = ()
    position: int = Field(default=0, ge=0, description="blocks of the sampler that were trained on")
    tokens: int = Field(default=0, ge=0)


class Store:
    """One run on disk. Without `owner` it is only read, beside the daemon that owns it."""

    def __init__(self, state_dir: StateDir, run: str, *, owner: bool = True) -> None:
        self._dir = state_dir
        self._run = run
        self.blobs = BlobStore(state_dir.blobs, owner=owner)
        if owner:
            state_dir.ledger.mkdir(exist_ok=True)

    # Chains ----------------------------------------------------------------------------------------------------------

    def save_chain(self, unit: UnitId, chain: ChainFile) -> None:
        """Raises OSError."""
        write_atomically(self._chain_path(unit), chain.model_dump_json().encode())

    def restore(self, units: Iterable[UnitId], workshop: Workshop) -> dict[UnitId, Chain]:
        """Load what is intact of every unit's chain, and rebuild its agreed state. A damaged unit is left out."""
        chains = {}
        for unit in units:
            chain = self._load_chain(unit)
            if chain is not None and self._rebuild(unit, chain, workshop):
                chains[unit] = chain
        return chains

    def _load_chain(self, unit: UnitId) -> Chain | None:
        try:
            return ChainFile.model_validate_json(self._chain_path(unit).read_bytes()).chain()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("ledger of a unit is damaged, it will be fetched anew", unit=unit, reason=str(error)[:200])
            return None

    def _rebuild(self, unit: UnitId, chain: Chain, workshop: Workshop) -> bool:
        """Newest intact anchor, then its packets; what lies behind a damaged packet is cut off."""
        while chain.anchors:
            anchor = chain.anchors[-1]
            try:
                values = np.frombuffer(self.blobs.get(anchor.hash), "<f4").astype(np.float32)
                workshop.restore(unit, anchor, values)
                break
            except (BlobMissing, ValueError) as error:
                log.warning("anchor of a unit is damaged, trying the one before", unit=unit, reason=str(error)[:200])
                chain.anchors.pop()
        else:
            return False
        replay = chain.after(chain.anchors[-1]) or []
        for at, entry in enumerate(replay):
            try:
                workshop.commit(Commit(entry, (), anchor=False))
            except Rejected as error:
                log.warning("packet of a unit is damaged, fetching from there on", unit=unit, reason=str(error)[:200])
                chain.entries = chain.entries[: len(chain.entries) - len(replay) + at]
                break
        return True

    def _chain_path(self, unit: UnitId) -> Path:
        return self._dir.ledger / f"{unit}.json"

    # Blobs -----------------------------------------------------------------------------------------------------------

    def sweep(self, chains: Mapping[UnitId, Chain], keep: Iterable[str]) -> int:
        """Remove blobs that neither a chain nor `keep` names; returns how many."""
        needed = set(keep)
        for chain in chains.values():
            needed |= {head.hash for head in chain.anchors} | {entry.packet for entry in chain.entries}
        swept = [blob for blob in self.blobs if blob not in needed]
        for blob in swept:
            self.blobs.remove(blob)
        self.blobs.remove_partial(lambda blob: blob not in needed)
        return len(swept)

    # Own work --------------------------------------------------------------------------------------------------------

    def save_progress(self, progress: Progress) -> None:
        """Raises OSError."""
        write_atomically(self._dir.progress, progress.model_dump_json().encode())

    def load_progress(self) -> Progress:
        """An empty one if there is none, or none of this run."""
        try:
            progress = Progress.model_validate_json(self._dir.progress.read_bytes())
        except (OSError, ValidationError):
            return Progress(run=self._run)
        return progress if progress.run == self._run else Progress(run=self._run)

    def save_unaccepted(self, round_: int, work: Mapping[UnitId, Values]) -> None:
        """Keep `theta - agreed` of trained units. Raises OSError."""
        metadata = {"run": self._run, "round": str(round_)}
        write_atomically(self._dir.unaccepted, save(dict(work), metadata=metadata))

    def take_unaccepted(self, newest_round: int, stale_rounds: int) -> dict[UnitId, Values]:
        """Unaccepted work of the last stop, once: a crash later must not add it twice. Too old work is dropped."""
        path = self._dir.unaccepted
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                work = {unit: file.get_tensor(unit) for unit in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError) as error:
            log.warning("unaccepted work cannot be read and is dropped", reason=str(error)[:200])
            work, metadata = {}, {}
        path.unlink(missing_ok=True)
        age = newest_round - int(metadata.get("round", newest_round))
        if metadata.get("run") != self._run or age > stale_rounds:
            return {}
        return {unit: values for unit, values in work.items() if np.isfinite(values).all()}
