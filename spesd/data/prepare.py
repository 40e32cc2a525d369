"""From text files to token shards, with held-out documents set aside."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spesd.config.manifest import Shard
from spesd.data.shards import DataError, write_shard
from spesd.data.tokenizer import SEPARATOR, ByteTokenizer

INDEX = "prepared.json"
"""File beside the shards that says which of them are held out."""

TOKENS_PER_SHARD = 1 << 24
MAX_INDEX_BYTES = 16 << 20
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


class PreparedData(BaseModel):
    """Summary of prepared text: its shards, and what went into them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: tuple[Shard, ...] = Field(min_length=1)
    held_out: tuple[Shard, ...] = Field(min_length=1)
    documents: int
    held_out_documents: int
    skipped: int = Field(description="files that are unreadable, empty, or not UTF-8 text without NUL")
    bytes: int = Field(description="bytes of text")
    tokens: int = Field(description="tokens in all shards, separators included")

    @classmethod
    def load(cls, folder: Path) -> PreparedData:
        """Read the index of a folder that `prepare` made. Raises DataError."""
        path = folder / INDEX
        try:
            if path.stat().st_size > MAX_INDEX_BYTES:
                raise DataError(f"{path}: more than {MAX_INDEX_BYTES} bytes, this is no index of shards")
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            hint = "make it with `spesd data prepare`"
            raise DataError(f"{path}: cannot be read ({error.strerror}); {hint}") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: {field or 'content'}: {first['msg']}") from None


def prepare(
    sources: Iterable[Path],
    out_dir: Path,
    held_out_share: float,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> PreparedData:
    """Turn text files, and all files under folders, into byte-level token shards and an index in `out_dir`.

    A file is one document. Whether it is held out follows from the hash of its text alone, so equal texts fall on the
    same side and held-out text is never trained on. Files that are unreadable, empty, or not UTF-8 without NUL are
    skipped and counted. Raises DataError when fewer than two different documents remain.
    """
    if not 0 < held_out_share < 1:
        raise DataError(f"held_out_share {held_out_share} must lie between 0 and 1")
    if tokens_per_shard < 1:
        raise DataError(f"tokens_per_shard {tokens_per_shard} must be at least 1")
    found, skipped = _survey(_files(sources))
    held_out = _choose_held_out({digest for _, digest in found}, held_out_share)
    out_dir.mkdir(parents=True, exist_ok=True)
    train, text_bytes = _write([path for path, digest in found if digest not in held_out], out_dir, tokens_per_shard)
    kept = [path for path, digest in found if digest in held_out]
    kept_shards, kept_bytes = _write(kept, out_dir, tokens_per_shard)
    prepared = PreparedData(
        train=train,
        held_out=kept_shards,
        documents=len(found),
        held_out_documents=len(kept),
        skipped=skipped,
        bytes=text_bytes + kept_bytes,
        tokens=sum(shard.tokens for shard in (*train, *kept_shards)),
    )
    (out_dir / INDEX).write_text(prepared.model_dump_json(indent=1))
    return prepared


def stdlib_documents() -> list[Path]:
    """Source files of the running interpreter's standard library, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)]


def _files(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        if source.is_dir():
            yield from sorted(path for path in source.rglob("*") if path.is_file())
        elif source.is_file():
            yield source
        else:
            raise DataError(f"source {source}: no such file or folder")


def _read(path: Path) -> str | None:
    """The text of a document, or None when it is unusable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if not text or chr(SEPARATOR) in text else text


def _survey(paths: Iterable[Path]) -> tuple[list[tuple[Path, bytes]], int]:
    """Usable documents with the hash of their text, and the number of files skipped."""
    found, skipped = [], 0
    for path in paths:
        text = _read(path)
        if text is None:
            skipped += 1
        else:
            found.append((path, blake3(text.encode()).digest()))
    return found, skipped


def _choose_held_out(digests: set[bytes], share: float) -> set[bytes]:
    """Digests that fall below `share` of the hash's range; at least one on each side."""
    if len(digests) < 2:
        raise DataError(f"{len(digests)} usable document(s): at least two different ones are needed, one to hold out")
    ranked = sorted(digests)
    below = sum(int.from_bytes(digest[:8]) < share * 2**64 for digest in ranked)
    return set(ranked[: min(max(below, 1), len(ranked) - 1)])


def _write(paths: list[Path], folder: Path, tokens_per_shard: int) -> tuple[tuple[Shard, ...], int]:
    """Write documents as shards of at most `tokens_per_shard` tokens; return them and the bytes of text."""
    tokenizer = ByteTokenizer()
    shards: list[Shard] = []
    waiting: list[np.ndarray] = []
    text_bytes = 0
    for path in paths:
        text = _read(path)
        if text is None:
            raise DataError(f"document {path}: changed while it was read; run again when it is at rest")
        tokens = tokenizer.encode(text)
        text_bytes += tokens.size
        waiting.append(np.append(tokens, np.uint8(SEPARATOR)))
        if sum(map(len, waiting)) >= tokens_per_shard:
            *full, rest = _cut(np.concatenate(waiting), tokens_per_shard)
            shards += [write_shard(folder, part, tokenizer.vocabulary) for part in full]
            waiting = [rest]
    last = np.concatenate(waiting)
    if last.size:
        shards.append(write_shard(folder, last, tokenizer.vocabulary))
    return tuple(shards), text_bytes


def _cut(tokens: np.ndarray, size: int) -> list[np.ndarray]:
    """Pieces of `size` tokens and a rest that is shorter, perhaps empty."""
    return [tokens[at : at + size] for at in range(0, tokens.size + 1, size)]
