"""Bad input to real daemons: each gets a clear error and harms nothing. The tests run in this order."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e_harness import DRAIN_SECONDS, Peer, Swarm, free_port, spesd, write_draft
from e2e_hostile import hostile_peer

from spesd.api.schema import Reason, State
from spesd.config.errors import ExitCode
from spesd.swarm.identity import Identity

pytestmark = pytest.mark.timeout(240)

MOST_GROWTH = 128 << 20
"""Bytes that a daemon may grow by under attack."""


@pytest.fixture(scope="module")
def alone(swarm: Swarm, shards: Path) -> Iterator[Peer]:
    """A founder that trains by itself, and listens where it did before when it is started again."""
    draft = write_draft(swarm.folder / "draft.toml", shards)
    founder = swarm.add("founder", manifest=draft, listen=(f"/ip4/127.0.0.1/tcp/{free_port()}",)).start()
    swarm.until_training()
    yield founder


def events(peer: Peer) -> list[dict[str, object]]:
    """The JSON lines of its log."""
    return [json.loads(line) for line in peer.log().splitlines() if line.startswith("{")]


def test_a_wrong_field_of_a_manifest_is_told_with_its_line(tmp_path: Path, shards: Path) -> None:
    draft = write_draft(tmp_path / "wrong.toml", shards)
    lines = draft.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.startswith("local_steps"))
    draft.write_text("\n".join(lines).replace("local_steps", "local_step"))
    ended = spesd("start", "--manifest", draft, "--state-dir", tmp_path / "state")
    assert ended.returncode == ExitCode.CONFIG
    assert f"wrong.toml:{at}: " in ended.stderr
    assert "local_steps" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "state").exists()


def test_a_second_daemon_on_the_same_state_dir_is_refused(swarm: Swarm, alone: Peer) -> None:
    first = alone.pid
    ended = spesd("start", "--state-dir", alone.config.state_dir)
    assert ended.returncode == ExitCode.ALREADY_RUNNING
    assert f"pid {first}" in ended.stderr and "Traceback" not in ended.stderr
    swarm.until_agreed(2)
    assert alone.status.pid == first


def test_stop_ends_the_daemon_and_says_when_there_is_none(swarm: Swarm, alone: Peer) -> None:
    alone.up = False
    ended = spesd("stop", "--state-dir", alone.config.state_dir)
    assert (ended.returncode, ended.stderr) == (ExitCode.OK, f"spesd: stopped (pid {alone.pid})\n")
    assert swarm.until_ended(alone, DRAIN_SECONDS) == 0
    assert not alone.left_behind()
    again = spesd("stop", "--state-dir", alone.config.state_dir)
    assert again.returncode == ExitCode.NOT_RUNNING
    assert str(alone.config.state_dir) in again.stderr


def test_a_state_dir_of_another_run_cannot_join(swarm: Swarm, alone: Peer, shards: Path) -> None:
    other = swarm.add("other", manifest=write_draft(swarm.folder / "other.toml", shards, name="other", seed=1)).start()
    swarm.until_training(other)
    before = other.reached
    alone.start(manifest=None, join=other.status.addresses[:1])
    assert swarm.until_ended(alone, 30.0) == ExitCode.CANNOT_JOIN, swarm.report()
    for text in ("name: 'e2e' here, 'other' there", "model.seed: 0 here, 1 there", "--state-dir"):
        assert text in alone.log()
    assert "Traceback" not in alone.log()
    assert not alone.left_behind()
    swarm.until("the other run goes on", lambda: other.reached > before)
    assert other.status.peers_live == 1


def test_a_joiner_waits_for_a_dead_bootstrap_and_gets_in_when_it_comes(swarm: Swarm, alone: Peer) -> None:
    known = (
        f"{alone.config.listen[0]}/p2p/{Identity.load_or_create(alone.config.state_dir / 'identity.key').peer_id}",
    )
    impatient, patient = (swarm.add(name, join=known).start() for name in ("impatient", "patient"))

    def waits(peer: Peer) -> bool:
        status = peer.track.status
        return status is not None and (status.state, status.reason) == (State.JOINING, Reason.WAITING_FOR_BOOTSTRAP)

    def retries(peer: Peer) -> list[dict[str, object]]:
        return [event for event in events(peer) if event["event"] == "bootstrap peer does not answer"]

    swarm.until("both wait", lambda: waits(impatient) and waits(patient))
    assert known[0] in impatient.status.detail
    swarm.until("both try again", lambda: min(len(retries(impatient)), len(retries(patient))) >= 2)
    assert all(event["address"] == known[0] for event in retries(patient))
    assert len(patient.log().splitlines()) == len(events(patient)) == len(retries(patient))

    impatient.send(signal.SIGTERM)
    assert swarm.until_ended(impatient, 10.0) == 0
    assert not impatient.left_behind()

    alone.start()
    swarm.until_training(alone, patient)
    swarm.until_agreed(2, alone, patient)


async def test_a_hostile_peer_harms_nothing(swarm: Swarm, alone: Peer, tmp_path: Path) -> None:
    patient = swarm["patient"]
    victims, processes = (alone, patient), [psutil.Process(peer.pid) for peer in (alone, patient)]
    memory = [process.memory_info().rss for process in processes]
    addresses = [peer.status.addresses[0] for peer in victims]
    async with hostile_peer(tmp_path, alone.status.run, addresses) as hostile:
        for peer in victims:
            await hostile.write_garbage(peer.status.peer)
            await hostile.store_nested_tuples(peer.status.peer)
            assert (await hostile.send_malformed_messages(peer.status.peer, 4))[-1] == "banned"
        await asyncio.to_thread(swarm.until_agreed, 3, *victims)
    for peer, process, before in zip(victims, processes, memory, strict=True):
        assert process.memory_info().rss < before + MOST_GROWTH
        assert "garbage from peer" in peer.log() and "Traceback" not in peer.log(), swarm.report()
        assert {row.peer for row in peer.daemon.client.peers().peers} == {victim.status.peer for victim in victims}


def test_nothing_is_left(swarm: Swarm, alone: Peer) -> None:
    assert not any(swarm.stop().values()), swarm.report()
    assert {peer.name: peer.left_behind() for peer in swarm.peers.values() if peer.left_behind()} == {}
    assert not swarm.temp_leftovers()
