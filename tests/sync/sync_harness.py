"""Builders for the tests of the protocol: heads, entries, chains, peers and workshops, all small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from spesd.config.manifest import SyncConfig
from spesd.sync.codec import Values
from spesd.sync.ledger import Chain, Contributor, Entry, Head
from spesd.sync.peer import SyncPeer
from spesd.sync.simulation import RUN
from spesd.sync.toys import MemoryBlobs, ToySigner
from spesd.sync.workshop import Workshop, state_hash

SIZES = {"shared-0": 6, "expert-0": 4, "expert-1": 4}

T = TypeVar("T")


def settings(**changes: Any) -> SyncConfig:
    """Short waits, exact codec, and a gate wide enough for whole numbers."""
    fields = {"local_steps": 2, "codec": "fp32", "gather_seconds": 2, "contribute_seconds": 4, "packet_seconds": 4}
    return SyncConfig(**(fields | {"coordinator_seconds": 3, "max_delta_rms": 1e6, "anchor_rounds": 4} | changes))


def digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def head(version: int, weight: int, salt: str = "") -> Head:
    return Head(version, digest(f"{version}{salt}"), weight)


def entry(before: Head, *peers: str, unit: str = "expert-0", weight: int = 10, step: int = 1, salt: str = "") -> Entry:
    """One link after `before`; `salt` tells forks apart."""
    names = tuple(Contributor(p, weight, digest(f"blob {p} {before.version + step} {salt}")) for p in peers or ("a",))
    after = Head(before.version + step, digest(f"{before.hash}{salt}{names}"), before.weight + weight * len(names))
    return Entry(unit, before, after, digest(f"packet {before.hash} {salt}"), 100, names)


def links(start: Head, count: int, salt: str = "", unit: str = "expert-0") -> list[Entry]:
    entries: list[Entry] = []
    for _ in range(count):
        entries.append(entry(entries[-1].after if entries else start, salt=salt, unit=unit))
    return entries


def chain_of(start: Head, entries: Iterable[Entry], anchor_every: int = 0) -> Chain:
    chain = Chain([start])
    for item in entries:
        chain.append(item)
        if anchor_every and chain.since_anchor >= anchor_every:
            chain.add_anchor()
    return chain


def genesis(unit: str) -> Head:
    return Head(0, state_hash(np.zeros(SIZES[unit], np.float32)), 0)


def make_peer(
    name: str = "me",
    live: Iterable[str] = (),
    experts: Iterable[str] = ("expert-0",),
    sending: Callable[[], bool] = lambda: False,
    **kw: Any,
) -> SyncPeer:
    """A peer with the genesis states, training; `live` are the others."""
    peer = SyncPeer(name, RUN, SIZES, settings(**kw), ToySigner(name), 1, sending)
    peer.restore({unit: Chain([genesis(unit)]) for unit in SIZES})
    peer.on_live(0.0, live)
    peer.on_owned(experts)
    peer.on_training(0.0, True)
    peer.take_effects()
    return peer


def make_workshop(blobs: MemoryBlobs | None = None, **kw: Any) -> Workshop:
    """A workshop in which every unit is zero."""
    shop = Workshop(RUN, SIZES, settings(**kw), blobs or MemoryBlobs())
    for unit, size in SIZES.items():
        shop.restore(unit, genesis(unit), np.zeros(size, np.float32))
    return shop


def of_kind(effects: Sequence[object], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def vector(*values: float) -> Values:
    return np.array(values, np.float32)
