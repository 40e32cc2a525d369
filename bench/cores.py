"""One core for the process that is measured, the others for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def one_core_apart() -> Iterator[int | None]:
    """Keep this process, and all that it starts meanwhile, off one core, and yield that core.

    Yields None where processes cannot be bound to cores, or where there is only one.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(allowed) < 2:
        yield None
        return
    apart = min(allowed)
    os.sched_setaffinity(0, allowed - {apart})
    try:
        yield apart
    finally:
        os.sched_setaffinity(0, allowed)


def bind(pid: int, core: int) -> None:
    """Bind every thread of a running process to `core`: the system call knows threads only. Raises psutil.Error."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


def wanting_seconds(pid: int) -> float | None:
    """How long a process's main thread has run, or was ready to and waited for its core; None where nobody counts it.

    The rest of its life it waited for something else: a pipe, a disk, a lock, a clock. Raises OSError.
    """
    if sys.platform != "linux":
        return None
    running, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return (int(running) + int(queued)) / 1e9
