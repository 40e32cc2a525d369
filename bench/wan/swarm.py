"""Rounds of spesd over the rig: whole daemons with their trainers and p2pd, one in each namespace."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.drafts import write_draft
from bench.report import BenchError
from bench.trainer import Speed
from bench.wan.emulator import address
from bench.wan.links import Link
from bench.wan.report import Measurement, PeerFigures
from bench.wan.rig import Counters, Rig
from bench.wan.setting import PEERS, SEQUENCE_LENGTH, STEPS_PER_SECOND, Setting
from spesd.api.schema import Phase, RoundRecord, State, Status, UnitResult
from spesd.cli.fleet import Fleet, Interruptible
from spesd.cli.launch import command
from spesd.data.prepare import prepare

JOIN_SECONDS, QUIET_SECONDS, ROUND_SECONDS = 120.0, 180.0, 180.0
POLL_SECONDS = 0.2

LAN = Link(up=400.0, down=400.0, rtt=2.0)
"""Links while the swarm comes together, which is not measured."""

DONE = (UnitResult.COMMITTED,)


def run(rig: Rig, signals: Interruptible, setting: Setting, codec: str) -> Measurement:
    """Measure rounds of four peers on nodes 1 to 4. Raises Interrupted, BenchError, and what the daemons say."""
    nodes = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="spesd-bench-") as folder:
        draft = Path(folder, "draft.toml")
        write_draft(setting.draft(codec, str(_text(Path(folder)))), draft)
        fleet = Fleet(Path(folder), signals, lambda config: rig.argv(next(nodes), command(config)))
        with fleet:
            _join(fleet, rig, setting, draft)
            for node in range(1, PEERS + 1):
                rig.set(node, setting.link)
            measured = _measure(fleet, rig, setting, codec)
    if fleet.faults:
        raise BenchError(f"the daemons did not stop cleanly: {'; '.join(fleet.faults)}")
    return measured


def _text(folder: Path) -> Path:
    """A little text: what is learned does not matter here, and everybody fetches it."""
    texts = [folder / f"text-{number}" for number in range(2)]
    for text in texts:
        text.write_text(f"{text.name}: some text to train on, which is always the same. " * 64, encoding="utf-8")
    prepare(texts, folder / "data", held_out_share=0.5)
    return folder / "data"


def _join(fleet: Fleet, rig: Rig, setting: Setting, draft: Path) -> None:
    """Start the daemons over fast links, and wait until all train and each expert has one owner."""
    for node in range(1, PEERS + 1):
        rig.set(node, LAN)
    addresses: tuple[str, ...] = ()
    for node in range(1, PEERS + 1):
        daemon = fleet.spawn(
            manifest=draft if node == 1 else None,
            join=addresses[:1],
            listen=setting.listen(address(node)),
            train_experts=setting.model["experts"] // PEERS,
            threads=1,
            device="cpu",
            up_mbit=setting.up_mbit,
            max_tokens_per_second=STEPS_PER_SECOND * SEQUENCE_LENGTH,
        )
        if node == 1:
            addresses = daemon.wait_ready(JOIN_SECONDS, fleet.signals.pause).addresses
    _wait(fleet, JOIN_SECONDS, "the four peers did not all begin to train, each with experts of its own", _together)


def _together(statuses: Sequence[Status]) -> bool:
    owned = [expert for status in statuses for expert in status.owned]
    training = all(status.state is State.TRAINING and status.peers_live == PEERS for status in statuses)
    return training and len(owned) == len(set(owned)) == sum(
        unit.unit.startswith("expert") for unit in statuses[0].units
    )


def _measure(fleet: Fleet, rig: Rig, setting: Setting, codec: str) -> Measurement:
    """The next rounds: from the quiet after one to the quiet after the last."""
    _wait(fleet, QUIET_SECONDS, "no round of all four peers has ended", lambda statuses: _quiet(fleet, statuses))
    first = max(_common_rounds(fleet))
    speeds = [Speed() for _ in fleet.daemons]
    before, devices = _statuses(fleet), _devices(rig)
    began, last = time.monotonic(), first + setting.rounds

    def observe(statuses: Sequence[Status]) -> bool:
        for speed, status in zip(speeds, statuses, strict=True):
            speed.observe(status.trainer.tokens, time.monotonic())
        return all(speed.is_known for speed in speeds)

    def ended(statuses: Sequence[Status]) -> bool:
        observe(statuses)
        return last in _common_rounds(fleet)

    _wait(fleet, setting.rounds * ROUND_SECONDS, f"round {last} has not ended everywhere", ended)
    window = time.monotonic() - began
    after, devices_after = _statuses(fleet), _devices(rig)
    _wait(fleet, ROUND_SECONDS, "a trainer has reported no progress since the first round", observe)
    rounds = [_shared_seconds(fleet, number) for number in range(first + 1, last + 1)]
    volume = setting.swarm_volume(codec)
    peers = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        counted = Counters(new.traffic.up_bytes, new.traffic.down_bytes)
        pace = speeds[number].tokens_per_second() / (STEPS_PER_SECOND * SEQUENCE_LENGTH)
        copying = new.trainer.stalled_seconds - old.trainer.stalled_seconds
        peers.append(
            PeerFigures(
                device=devices_after[number].since(devices[number]),
                counted=counted.since(Counters(old.traffic.up_bytes, old.traffic.down_bytes)),
                stalled=max(copying, window * (1 - pace)),
                pace=pace,
            )
        )
    return Measurement(volume, volume.seconds(setting.link), window, rounds, peers)


def _quiet(fleet: Fleet, statuses: Sequence[Status]) -> bool:
    """Whether a round of all four peers is the last that has begun, and has ended."""
    newest = max(_common_rounds(fleet), default=0)
    return newest > 0 and all((s.round.number, s.round.phase) == (newest, Phase.IDLE) for s in statuses)


def _common_rounds(fleet: Fleet) -> set[int]:
    """Rounds of all four peers that have ended everywhere."""
    ended = [
        {record.number for record in daemon.client.rounds().rounds if len(record.members) == PEERS}
        for daemon in fleet.daemons
    ]
    return set.intersection(*ended)


def _shared_seconds(fleet: Fleet, number: int) -> float:
    """From the first contribution of a round to its last commit anywhere. Raises BenchError unless all went well."""
    records = [_record(fleet, peer, number) for peer in range(PEERS)]
    for record in records:
        if record is None or len(record.members) < PEERS or any(u.result not in DONE for u in record.results.values()):
            raise BenchError(f"round {number} was not shared and committed by all four peers: {record}")
    return max(record.seconds for record in records if record is not None)


def _record(fleet: Fleet, peer: int, number: int) -> RoundRecord | None:
    return next((r for r in fleet.daemons[peer].client.rounds().rounds if r.number == number), None)


def _devices(rig: Rig) -> list[Counters]:
    return [rig.counters(node) for node in range(1, PEERS + 1)]


def _statuses(fleet: Fleet) -> list[Status]:
    """Everybody's status; one that does not answer now is asked again."""
    return _wait(fleet, JOIN_SECONDS, "a daemon does not answer", lambda _: True)


def _wait(fleet: Fleet, seconds: float, what: str, until: Callable[[Sequence[Status]], bool]) -> list[Status]:
    """Look at all statuses until they please. Raises BenchError at the deadline, with how things stand."""
    deadline = time.monotonic() + seconds
    while True:
        statuses = [status for status in fleet.statuses() if status is not None]
        if len(statuses) == PEERS and until(statuses):
            return statuses
        if time.monotonic() > deadline:
            states = ", ".join(f"{status.state} (round {status.round.number})" for status in statuses)
            raise BenchError(f"{what} in {seconds:.0f} s: {states or 'no daemon answers'}")
        fleet.signals.pause(POLL_SECONDS)
