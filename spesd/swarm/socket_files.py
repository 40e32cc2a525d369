"""The unix sockets between hivemind and its p2pd: hivemind puts them into /tmp, and leaves them when it is killed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SOCKET_NAME = re.compile(r"/tmp/hivemind-p2p(d|client)-[A-Za-z0-9_-]{1,32}\.sock")
_MOST = 16


def note_of(identity_path: Path) -> Path:
    """File beside the identity that names its socket files, so that they are found after a kill."""
    return identity_path.with_suffix(".sockets")


def remove_stale_sockets(identity_path: Path) -> None:
    """Remove the socket files of an earlier process that was killed. The caller holds the lock of the state folder."""
    try:
        lines = note_of(identity_path).read_text().splitlines()[:_MOST]
    except (OSError, UnicodeDecodeError):
        return
    remove_files(line for line in lines if _SOCKET_NAME.fullmatch(line))


def remove_files(files: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for file in files:
        Path(file).unlink(missing_ok=True)
