"""The bench's hold on the emulator: nodes to run programs in, their counters, links that change."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bench.report import BenchError
from bench.wan.emulator import DEVICE, READY, SPLIT
from bench.wan.links import Link

READY_SECONDS, END_SECONDS = 30.0, 30.0


class Counters(NamedTuple):
    """Bytes through something since it began, IP headers included where it is a device."""

    up: int
    down: int

    def since(self, before: Counters) -> Counters:
        return Counters(self.up - before.up, self.down - before.down)


class CannotEmulate(BenchError):
    """This machine, or this user, cannot make network namespaces."""


class Rig:
    """Namespaces joined by the emulator, while the context lasts. Programs in them must end before."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = dict(links)
        self._prefix = f"spesd-wan-{os.getpid()}-"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Raises CannotEmulate, saying what is missing."""
        check_machine()
        remove_left_over()
        links = json.dumps({node: link.model_dump() for node, link in self._links.items()})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.wan.emulator", self._prefix, links],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        try:
            process.communicate(timeout=END_SECONDS)  # closes its input: it removes the namespaces and ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            remove_left_over(self._prefix)

    def argv(self, node: int, command: Sequence[str]) -> list[str]:
        """`command` inside a node's namespace. It replaces the process that enters it, so the pid stays."""
        return ["ip", "netns", "exec", f"{self._prefix}{node}", *command]

    def set(self, node: int, link: Link) -> None:
        """Change a link at once."""
        self._links[node] = link
        self._tell(f"{node} {link.model_dump_json()}")

    def partition(self, *groups: Collection[int]) -> None:
        """Let nothing pass between these groups of nodes any more, nor to and from those in no group."""
        self._tell(f"{SPLIT} {json.dumps([sorted(group) for group in groups])}")

    def blackhole(self, *nodes: int) -> None:
        """Lose whatever these nodes send and whatever is sent to them, without a word to anybody."""
        self.partition(self._links.keys() - set(nodes), *({node} for node in nodes))

    def heal(self) -> None:
        """Let everybody reach everybody again."""
        self.partition()

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None, "the rig is not up"
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def counters(self, node: int) -> Counters:
        """What has gone through a node's device. Raises BenchError."""
        command = self.argv(node, ["cat", "/proc/net/dev"])
        result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        for line in result.stdout.splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == DEVICE:
                columns = figures.split()
                return Counters(up=int(columns[8]), down=int(columns[0]))
        raise BenchError(f"the counters of node {node} cannot be read: {result.stderr.strip() or 'no such device'}")

    def _wait_ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            said = (
                process.stdout.readline().strip()
                if selector.select(READY_SECONDS)
                else f"silent for {READY_SECONDS:.0f} s"
            )
        if said != READY:
            _, reason = process.communicate(timeout=END_SECONDS)  # it ends with its input
            raise CannotEmulate(f"the network emulator does not start: {reason.strip() or said}")


def check_machine() -> None:
    """Raise CannotEmulate unless this is Linux, we are root, and iproute2 and TUN are there."""
    missing = []
    if sys.platform != "linux":
        missing.append(f"Linux (this is {sys.platform})")
    elif os.geteuid() != 0:
        missing.append("root (try sudo)")
    missing += [f"the program {name!r}" for name in ("ip", "sysctl") if shutil.which(name) is None]
    if sys.platform == "linux" and not Path("/dev/net/tun").exists():
        missing.append("/dev/net/tun")
    if missing:
        raise CannotEmulate(f"the WAN bench makes network namespaces, and needs {', '.join(missing)}")


def remove_left_over(prefix: str = "spesd-wan-") -> None:
    """Remove namespaces of benches that were killed together with their emulator."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{prefix}*") if folder.exists() else ():
        owner = path.name.removeprefix("spesd-wan-").split("-")[0]
        if owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists()):
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)
