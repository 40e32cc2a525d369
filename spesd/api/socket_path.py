"""Where the socket of the local API lies, and who may speak to it.

A unix socket's path is limited to about 100 bytes. A state dir with a longer path holds a pointer file instead, which
names a socket in a private folder under the system's temp folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import sys
import tempfile
from pathlib import Path

FOLDER = "api"
SOCKET = "spesd.sock"
POINTER = "socket-path"
PREFIX = "spesd-api-"

MAX_PATH_BYTES = 100
"""Linux allows 107, macOS 103."""


def create_socket_path(state_dir: Path) -> Path:
    """Return the path to bind, in a folder of mode 0700; whatever a killed daemon left there is removed.

    The caller must hold the lock of the state dir.
    """
    remove_socket(state_dir)
    folder = state_dir / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / SOCKET
    if len(os.fsencode(path.absolute())) <= MAX_PATH_BYTES:
        return path
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_short_temp())) / SOCKET
    (folder / POINTER).write_bytes(os.fsencode(path))
    return path


def find_socket_path(state_dir: Path) -> Path | None:
    """Return the path to connect to, or None when no daemon has made one."""
    folder = state_dir / FOLDER
    direct = folder / SOCKET
    if len(os.fsencode(direct.absolute())) <= MAX_PATH_BYTES:
        return direct if direct.exists() else None
    try:
        return Path(os.fsdecode((folder / POINTER).read_bytes()))
    except OSError:
        return None


def remove_socket(state_dir: Path) -> None:
    """Remove socket and pointer file, if there are any."""
    path = find_socket_path(state_dir)
    if path is not None and path.parent.name.startswith(PREFIX):
        shutil.rmtree(path.parent, ignore_errors=True)
    for name in (SOCKET, POINTER):
        (state_dir / FOLDER / name).unlink(missing_ok=True)


def peer_uid(connection: socket.socket) -> int | None:
    """User id of the process at the other end; None where the platform does not tell."""
    if sys.platform == "linux":
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(uid)
    if sys.platform == "darwin":
        # getsockopt(SOL_LOCAL, LOCAL_PEERCRED) gives a struct xucred: version, uid, …
        _, uid = struct.unpack_from("II", connection.getsockopt(0, 1, 76))
        return int(uid)
    return None


def _short_temp() -> str:
    """The temp folder, or /tmp when TMPDIR itself is too long."""
    temp = tempfile.gettempdir()
    return temp if len(os.fsencode(temp)) + len(PREFIX) + 20 <= MAX_PATH_BYTES else "/tmp"
