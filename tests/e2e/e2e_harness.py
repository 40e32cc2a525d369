"""Real daemons on loopback: start them, look at them, wait for what they show, and see what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from spesd.api.headline import headline
from spesd.api.schema import Phase, State, Status
from spesd.api.socket_path import FOLDER, SOCKET, remove_socket
from spesd.cli.demo import LISTEN
from spesd.cli.demo_report import Track, disagreements
from spesd.cli.launch import Daemon, command, session_members
from spesd.config.peer import PeerConfig

EXPERTS, TRAIN_EXPERTS = 8, 3
GONE_SECONDS = 5.0
"""What a killed daemon leaves running may outlive it so long."""

DRAIN_SECONDS = 20.0
"""A daemon that was asked to stop is gone after this."""

POLL_SECONDS = 0.1
REPORTED_LINES = 12

DRAFT = """
format = 1
name = "{name}"

[model]
layers = 2
width = 32
heads = 2
expert_width = 32
experts = {experts}
top_k = 2
vocabulary = 256
seed = {seed}

[optimizer]
learning_rate = 5e-3
total_rounds = 1000
sequences = 2

[data]
source = "{source}"
sequence_length = 32
held_out_sequences = 16

[sync]
shared_shards = 2
local_steps = 4
min_round_seconds = 0.7
gather_seconds = 1.5
contribute_seconds = 3.0
packet_seconds = 6.0
coordinator_seconds = 2.0
anchor_rounds = 2
codec = "topk"
top_share = 0.2

[merge]
interval = 2
alpha = 0.1
decay_rounds = 1000

[ownership]
grace_seconds = 4.0
record_seconds = 40.0
"""


def write_draft(path: Path, source: Path, name: str = "e2e", seed: int = 0) -> Path:
    """A run of 8 tiny experts whose rounds last about a second; in every other one experts merge."""
    path.write_text(DRAFT.format(name=name, seed=seed, experts=EXPERTS, source=source))
    return path


def spesd(*argv: str | Path, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a `spesd` command to its end."""
    command = [sys.executable, "-m", "spesd.cli.main", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Peer:
    """One state dir and the daemon that runs on it, over its restarts. `up` says whether a daemon is meant to run."""

    name: str
    config: PeerConfig
    temp: Path
    daemon: Daemon = field(init=False)
    track: Track = field(default_factory=Track)
    up: bool = False
    sockets: set[str] = field(default_factory=set)

    def start(self, **changes: Any) -> Peer:
        """Start a daemon on the state dir. `changes` replace fields of its config."""
        config = self.config.model_copy(update=changes)
        self.daemon = Daemon.spawn(config, self.argv(config), environ={"TMPDIR": str(self.temp)})
        self.up, self.track = True, Track()
        return self

    def argv(self, config: PeerConfig) -> list[str]:
        """The command that starts the daemon."""
        return command(config)

    @property
    def pid(self) -> int:
        return self.daemon.process.pid

    @property
    def status(self) -> Status:
        """What it said last."""
        assert self.track.status is not None, f"{self.name} has not answered yet"
        return self.track.status

    def look(self) -> Status | None:
        """Ask for its status; what it shows of the ledgers is kept in `track`."""
        status = self.daemon.status()
        if status is not None:
            self.track.observe(status, time.monotonic())
            if status.state is State.SYNCING:
                self.track.versions.clear()  # its disk may hold the losing side of a fork, made as it was killed
            self.sockets |= p2pd_sockets(self.config.state_dir)
        return status

    @property
    def versions(self) -> dict[str, int]:
        """The newest version of each unit that it has shown."""
        return {unit.unit: unit.version for unit in self.status.units} if self.track.status is not None else {}

    @property
    def reached(self) -> int:
        """The newest round of which it has committed a unit."""
        return max(self.versions.values(), default=0)

    @property
    def is_training(self) -> bool:
        status = self.track.status
        return status is not None and status.trainer.state == "training" and len(status.owned) == TRAIN_EXPERTS

    def log(self, lines: int | None = None) -> str:
        """What its daemon wrote since it was last started, or the end of that."""
        with self.daemon.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.daemon.log_start)
            return "".join(deque(file, lines))

    def send(self, number: signal.Signals) -> None:
        """Signal the daemon, which is meant to end by it."""
        self.up = False
        os.kill(self.pid, number)

    def left_behind(self) -> list[str]:
        """Live processes of its session, and socket files and temporary files that it made."""
        processes = [f"{member.name()} (pid {member.pid})" for member in session_members(self.pid)]
        sockets = [*map(Path, sorted(self.sockets)), self.config.state_dir / FOLDER / SOCKET]
        return processes + [str(path) for path in sockets if path.exists()]

    def report(self) -> str:
        """One line on its state, and the end of its log."""
        code = self.daemon.process.poll()
        life = f"pid {self.pid}" if code is None else f"ended with {code}"
        line = headline(self.track.status) if self.track.status is not None else "has not answered yet"
        return f"{self.name} ({life}): {line}; versions {self.versions}\n{self.log(REPORTED_LINES)}"


def p2pd_sockets(state_dir: Path) -> set[str]:
    """Files of the sockets between the daemon of a state dir and its p2pd."""
    try:
        return set((state_dir / "identity.sockets").read_text().splitlines())
    except FileNotFoundError:
        return set()


class Swarm:
    """Peers in state dirs under `folder`, by name. `close` ends whatever still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = folder / "tmp"
        self.temp.mkdir()
        self.peers: dict[str, Peer] = {}

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def add(self, name: str, **settings: Any) -> Peer:
        """A peer with its own state dir, not started yet. `settings` are fields of PeerConfig."""
        local = {
            "listen": LISTEN,
            "train_experts": TRAIN_EXPERTS,
            "threads": 1,
            "max_tokens_per_second": 640,
            "log_format": "json",
        }
        config = PeerConfig(state_dir=self.folder / name, **(local | settings))
        self.peers[name] = Peer(name, config, self.temp)
        return self.peers[name]

    @property
    def running(self) -> list[Peer]:
        """Peers whose daemon is meant to run."""
        return [peer for peer in self.peers.values() if peer.up]

    def until(self, what: str, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Look at all running peers until `condition` holds; fail at the deadline, or when a daemon has ended."""
        deadline = time.monotonic() + seconds
        while True:
            for peer in self.running:
                peer.look()
                assert peer.daemon.process.poll() is None, f"{peer.name} ended\n{self.report()}"
            if condition():
                return
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{self.report()}"
            time.sleep(POLL_SECONDS)

    def until_ended(self, peer: Peer, seconds: float) -> int:
        """Wait until its daemon is gone; returns the exit code."""
        peer.up = False
        self.until(f"{peer.name} ends", lambda: peer.daemon.process.poll() is not None, seconds)
        code: int = peer.daemon.process.returncode
        return code

    def until_training(self, *peers: Peer, seconds: float = 90.0) -> None:
        """Wait until these peers, or all that run, train as many experts as they may."""
        wanted = peers or self.running
        self.until("all train", lambda: all(peer.is_training for peer in wanted), seconds)

    def until_agreed(self, rounds: int, *peers: Peer, seconds: float = 90.0) -> None:
        """Wait until these peers, or all that run, have so many more rounds in common, with the same hashes.

        Units that somebody trains must have moved on; the others must be the same everywhere.
        """
        compared = list(peers or self.running)
        goal = max(peer.reached for peer in compared) + rounds

        def common() -> bool:
            trained = {unit for peer in compared for unit in peer.status.owned}
            heads = [peer.versions for peer in compared]
            moved = all(
                version >= goal
                for versions in heads
                for unit, version in versions.items()
                if is_shared(unit) or unit in trained
            )
            still = [{unit: v for unit, v in versions.items() if v < goal} for versions in heads]
            # What was given up in a fork does not count, so one that has just arisen is waited for.
            return moved and all(rest == still[0] for rest in still) and not self.disagreements(compared)

        self.until(f"{[peer.name for peer in compared]} agree on round {goal}", common, seconds)

    def disagreements(self, peers: Iterable[Peer]) -> list[str]:
        """Versions that two peers have shown with different hashes, and not given up since."""
        return list(disagreements([peer.track for peer in peers]))

    def shown_by_all(self) -> dict[str, int]:
        """How many versions of each unit all running peers have shown."""
        tracks = [peer.track for peer in self.running]
        units = {unit for track in tracks for unit in track.versions}
        shown = {unit: set.intersection(*(set(track.versions[unit]) for track in tracks)) for unit in units}
        return {unit: len(versions) for unit, versions in shown.items()}

    def until_inside_round(self, peer: Peer) -> int:
        """Wait until a round is open at this peer, and return at once with its number."""
        inside = {Phase.CONTRIBUTING, Phase.REDUCING, Phase.COMMITTING}
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            status = peer.look()
            if status is not None and status.round.phase in inside:
                return status.round.number
        raise AssertionError(f"no round is open at {peer.name} within 30 s\n{self.report()}")

    def until_gone(self, peer: Peer) -> None:
        """Wait until no process of a dead daemon is left."""
        gone = lambda: not session_members(peer.pid)  # noqa: E731
        self.until(f"no process of {peer.name} remains", gone, GONE_SECONDS)

    def owner_counts(self) -> Counter[str]:
        """How many running peers train each expert, as they say themselves."""
        counts = Counter({f"expert-{number}": 0 for number in range(EXPERTS)})
        counts.update(unit for peer in self.running for unit in peer.status.owned)
        return counts

    def temp_leftovers(self) -> list[str]:
        """What the daemons left in their temp folder; torch keeps a cache there."""
        return [path.name for path in self.temp.iterdir() if not path.name.startswith("torchinductor")]

    def report(self) -> str:
        """All peers, for the message of a failure."""
        reports = [peer.report() for peer in self.peers.values() if hasattr(peer, "daemon")]
        return "\n".join([*self.disagreements(self.running), *reports])

    def stop(self) -> dict[str, int]:
        """Let all drain at once; exit codes by name."""
        running = self.running
        for peer in running:
            peer.send(signal.SIGTERM)
        return {peer.name: self.until_ended(peer, DRAIN_SECONDS) for peer in running}

    def close(self) -> None:
        """End what is still there."""
        for peer in self.peers.values():
            if hasattr(peer, "daemon"):
                peer.daemon.kill()
                remove_socket(peer.config.state_dir)
                for path in peer.sockets | p2pd_sockets(peer.config.state_dir):
                    Path(path).unlink(missing_ok=True)


def is_shared(unit: str) -> bool:
    """Whether a unit is a shard of the shared parameters, which all peers train."""
    return unit.startswith("shared")


def p2pd_of(peer: Peer) -> psutil.Process | None:
    """The p2pd of its daemon, if it has one."""
    for process in session_members(peer.pid):
        try:
            if "p2pd" in process.name():
                return process
        except psutil.NoSuchProcess:
            continue
    return None
