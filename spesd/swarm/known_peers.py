"""Addresses of peers met before, kept on disk so that a restart needs no bootstrap peer."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from spesd.swarm.records import Address, PeerId

MAX_PEERS = 256
_MAX_FILE_BYTES = 2 << 20
_FILE = TypeAdapter(dict[PeerId, list[Address]])


class KnownPeers:
    """The peers seen last, newest last in `known_peers.json`. A damaged file counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        try:
            if path.stat().st_size <= _MAX_FILE_BYTES:
                peers = _FILE.validate_json(path.read_bytes())
                self._peers.update({peer: tuple(addresses) for peer, addresses in peers.items()})
        except (OSError, ValidationError):
            pass

    def addresses(self, most: int = 16, without: Collection[str] = ()) -> list[str]:
        """One list of addresses to dial, the peers seen last first, at most `most` peers and none of `without`."""
        wanted = [peer for peer in reversed(self._peers) if peer not in without]
        return [address for peer in wanted[:most] for address in self._peers[peer][:4]]

    def update(self, peers: Mapping[str, Sequence[str]]) -> None:
        """Remember these peers; written atomically, and only when something is new."""
        before = dict(self._peers)
        for peer, addresses in peers.items():
            if addresses:
                self._peers[peer] = tuple(addresses)
                self._peers.move_to_end(peer)
        while len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        if dict(self._peers) != before:
            self._save()

    def _save(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self._peers, indent=1))
        temporary.replace(self._path)
