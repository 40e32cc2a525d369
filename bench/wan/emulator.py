"""The emulator: a process that forwards packets between network namespaces as if between home internet links.

`python -m bench.wan.emulator PREFIX LINKS`, where LINKS is a JSON object from node number to link. It makes one
namespace for each node, PREFIX and the number, with the address 11.77.0.NUMBER on a TUN device, says `ready`, and takes
lines `NUMBER LINK` that change a link, and `split GROUPS`, a JSON array of groups of nodes between which nothing
passes any more. At the end of its standard input it removes the namespaces, with
whatever still runs in them, and ends. It needs Linux, root and iproute2, but neither bridge nor netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench.wan.links import Firewalls, Internet, Link

DEVICE = "wan0"
NETWORK = (11, 77, 0)
"""Public addresses, for libp2p relays through no others; they lead nowhere but to the nodes."""

MTU = 1500
CONGESTION_CONTROL = "cubic"
"""TCP of an ordinary home computer, whatever this machine uses."""

READY, SPLIT = "ready", "split"

PRIORITY = -15
"""The emulator's niceness: a busy machine must not make the links slower than they say."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
_READS_AT_ONCE = 64
_OWN_NAMESPACE = Path("/proc/self/ns/net")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def main(argv: Sequence[str]) -> int:
    """Forward until standard input ends. Prints what went wrong to standard error, and returns 1 then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the bench decides when its processes are gone and we may end
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    prefix, links = argv[0], {int(node): Link(**fields) for node, fields in json.loads(argv[1]).items()}
    try:
        with ExitStack() as stack:
            stack.enter_context(_allowed(CONGESTION_CONTROL))
            devices = {node: stack.enter_context(_namespace(f"{prefix}{node}", node)) for node in links}
            print(READY, flush=True)
            Router(devices, Internet(links)).run()
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace').strip()}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


class Router:
    """Takes packets from one device and puts them into another when their time has come."""

    def __init__(self, devices: Mapping[int, int], internet: Internet) -> None:
        self._devices = dict(devices)
        self._nodes = {device: node for node, device in devices.items()}
        self._internet = internet
        self._firewalls = Firewalls()
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._order = 0
        self._typed = b""

    def run(self) -> None:
        """Forward until standard input ends."""
        poll, stdin = select.epoll(), sys.stdin.fileno()
        for file in (stdin, *self._nodes):
            poll.register(file, select.EPOLLIN)
        while True:
            self._deliver()
            for file, _ in poll.poll(self._patience()):
                if file != stdin:
                    self._take(file)
                elif not self._obey(os.read(stdin, 65536)):
                    return

    def _patience(self) -> float | None:
        """Seconds until the next packet is due."""
        return max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None

    def _deliver(self) -> None:
        now, waiting = time.monotonic(), self._on_the_way
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            with suppress(OSError):  # its queue is full: lost, as anywhere else
                os.write(device, packet)

    def _take(self, device: int) -> None:
        now, source = time.monotonic(), self._nodes[device]
        for _ in range(_READS_AT_ONCE):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            target = packet[19] if packet[0] >> 4 == 4 and tuple(packet[16:19]) == NETWORK else None
            if target is None or target == source or target not in self._devices:
                continue
            links = self._internet.links
            if not self._firewalls.passes(links[source], links[target], packet):
                continue
            arrival = self._internet.arrival(now, source, target, len(packet))
            if arrival is not None:
                self._order += 1
                heapq.heappush(self._on_the_way, (arrival, self._order, self._devices[target], packet))

    def _obey(self, typed: bytes) -> bool:
        """Change links, or who reaches whom, as told; False at the end of the input."""
        *lines, self._typed = (self._typed + typed).split(b"\n")
        for line in lines:
            what, value = line.split(maxsplit=1)
            if what == SPLIT.encode():
                self._internet.split(json.loads(value))
            else:
                self._internet.links[int(what)] = Link(**json.loads(value))
        return bool(typed)


@contextmanager
def _namespace(name: str, node: int) -> Iterator[int]:
    """A namespace with a TUN device; yields the descriptor of the device."""
    _ip("netns", "add", name)
    try:
        device = _open_tun(name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", DEVICE)
        _ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "1000", "up")
        _ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
        try:
            yield device
        finally:
            os.close(device)
    finally:
        for pid in _ip("netns", "pids", name).split():  # none, unless the bench was killed
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


@contextmanager
def _allowed(congestion_control: str) -> Iterator[None]:
    """Let namespaces choose this TCP: a namespace may only use what the machine allows everybody."""
    before = _ALLOWED.read_text().split()
    if congestion_control in before:
        yield
        return
    _ALLOWED.write_text(" ".join([*before, congestion_control]))
    try:
        yield
    finally:
        _ALLOWED.write_text(" ".join(name for name in _ALLOWED.read_text().split() if name != congestion_control))


def address(node: int) -> str:
    """IPv4 address of a node."""
    return ".".join(map(str, (*NETWORK, node)))


def _open_tun(namespace: str) -> int:
    """A non-blocking TUN device inside a namespace, usable from here. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _OWN_NAMESPACE.open("rb") as here, Path("/run/netns", namespace).open("rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
        finally:
            libc.setns(here.fileno(), _CLONE_NEWNET)
    return device


def _ip(*arguments: str) -> bytes:
    """What iproute2 answers. Raises CalledProcessError."""
    return subprocess.run(("ip", *arguments), check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
