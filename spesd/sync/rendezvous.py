"""Rendezvous hashing: all peers rank the same candidates in the same order, without talking."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3


def rank(purpose: str, candidates: Iterable[str]) -> list[str]:
    """Order `candidates` by the hash of (`purpose`, candidate).

    A candidate that comes or goes leaves the order of the others as it was (Thaler and Ravishankar 1998).
    """
    return sorted(set(candidates), key=lambda name: (blake3(f"{purpose}|{name}".encode()).digest(), name))
