"""Four real daemons train one model; then they are killed, joined and stopped. The tests run in this order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import DRAIN_SECONDS, EXPERTS, TRAIN_EXPERTS, Peer, Swarm, p2pd_of, p2pd_sockets, spesd, write_draft

from spesd.api.schema import Reason
from spesd.cli.launch import session_members
from spesd.daemon.store import Progress

pytestmark = pytest.mark.timeout(240)

NAMES = ("founder", "second", "third", "fourth")


@pytest.fixture(scope="module")
def four(swarm: Swarm, shards: Path) -> Iterator[Swarm]:
    """A founder and three who joined it, all training."""
    founder = swarm.add("founder", manifest=write_draft(swarm.folder / "draft.toml", shards)).start()
    swarm.until("the founder tells its address", lambda: bool(founder.track.status and founder.status.join))
    for name in NAMES[1:]:
        swarm.add(name, join=founder.status.addresses[:1]).start()
    swarm.until_training()
    yield swarm


def progress_of(peer: Peer) -> Progress:
    return Progress.model_validate_json((peer.config.state_dir / "progress.json").read_bytes())


def loss_of(peer: Peer) -> float:
    held_out = peer.status.trainer.held_out
    assert held_out is not None
    return held_out.loss


def test_four_daemons_agree_on_every_round_and_learn(four: Swarm) -> None:
    four.until(
        "four experts have one owner, and four have two",
        lambda: sorted(four.owner_counts().values()) == [1] * 4 + [2] * 4,
    )
    four.until_agreed(8)
    assert len(four.shown_by_all()) == EXPERTS + 2
    four.until("eight versions of each unit are compared", lambda: min(four.shown_by_all().values()) >= 8)
    first = four["founder"].status.trainer.first_held_out
    assert first is not None
    four.until("the held-out loss falls on all", lambda: all(loss_of(peer) < first.loss - 0.5 for peer in four.running))
    assert {peer.status.peers_live for peer in four.running} == {4}


def test_a_running_daemon_shows_its_loss_and_its_text(four: Swarm) -> None:
    folder = str(four["second"].config.state_dir)
    curve = spesd("loss", "--state-dir", folder)
    assert curve.returncode == 0 and "held-out loss" in curve.stdout
    text = spesd("sample", "The first", "--tokens", "20", "--state-dir", folder)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("The first") and len(text.stdout) > len("The first") + 10
    four.until_agreed(2)


@pytest.mark.parametrize("how", ["daemon alone", "whole session"])
def test_a_peer_killed_inside_a_round_costs_nobody_else_anything(four: Swarm, how: str) -> None:
    four.until_training()
    victim, survivors = four["third"], [four[name] for name in NAMES if name != "third"]
    four.until("progress is on disk", (victim.config.state_dir / "progress.json").exists)
    before = victim.status
    round_ = four.until_inside_round(victim)
    victims = [victim.pid] if how == "daemon alone" else [member.pid for member in session_members(victim.pid)]
    victim.up = False
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    four.until_gone(victim)

    shared = ("shared-0", "shared-1")
    four.until(
        f"the others commit round {round_ + 1}",
        lambda: all(peer.versions[unit] > round_ for peer in survivors for unit in shared),
    )
    for peer in survivors:
        at = {
            unit: {version for version in peer.track.versions[unit] if version in (round_, round_ + 1)}
            for unit in shared
        }
        assert all(at.values()), f"{peer.name} committed neither round {round_} nor the next\n{four.report()}"
    four.until_agreed(2, *survivors)

    kept, left = progress_of(victim), p2pd_sockets(victim.config.state_dir)
    victim.start()
    four.until_training(victim)
    assert victim.status.peer == before.peer
    assert set(victim.status.owned) == set(before.owned), four.report()
    four.until_agreed(2)
    assert victim.status.trainer.tokens > kept.tokens
    four.until("its position goes on", lambda: progress_of(victim).position > kept.position)
    assert not [path for path in left if Path(path).exists()]


def test_a_dead_trainer_is_named_and_restarted(four: Swarm) -> None:
    four.until_training()
    peer = four["second"]
    before = peer.status.trainer
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    four.until("status names it", lambda: peer.status.reason is Reason.TRAINER_RESTARTING, 10)
    assert "-9" in peer.status.detail
    four.until_training(peer)
    four.until("a new one trains", lambda: peer.status.trainer.pid not in (None, before.pid))
    assert peer.status.trainer.restarts == before.restarts + 1
    four.until_agreed(2)
    four.until("it trains on", lambda: peer.status.trainer.tokens > before.tokens)


def test_a_dead_p2pd_is_restarted_with_the_same_identity(four: Swarm) -> None:
    four.until_training()
    peer, other = four["fourth"], four["founder"]
    before, old = peer.status, p2pd_of(peer)
    assert old is not None
    old.kill()
    four.until("a new p2pd runs", lambda: (new := p2pd_of(peer)) is not None and new.pid != old.pid, 20)
    four.until("it tells its address again", lambda: peer.status.addresses == before.addresses, 20)
    assert peer.status.peer == before.peer
    restarted = other.reached

    def takes_part() -> bool:
        records = other.daemon.client.rounds().rounds
        return any(record.number > restarted and before.peer in record.members for record in records)

    four.until("it takes part in a round of the others", takes_part)
    four.until_agreed(2)


def test_a_late_joiner_reaches_the_round_and_takes_the_experts_with_the_fewest_owners(four: Swarm) -> None:
    four.until_training()
    counts = four.owner_counts()
    fifth = four.add("fifth", join=four["second"].status.addresses[:1]).start()
    four.until_training(fifth)
    taken = set(fifth.status.owned)
    assert len(taken) == TRAIN_EXPERTS
    assert max(counts[unit] for unit in taken) <= min(counts[unit] for unit in counts if unit not in taken), counts
    four.until_agreed(2)
    four.until("it is seen", lambda: all(peer.status.peers_live == 5 for peer in four.running), 20)


def test_sigterm_drains_and_the_same_state_dir_goes_on(four: Swarm) -> None:
    four.until_training()
    peer, others = four["fourth"], [four[name] for name in ("founder", "second", "third")]
    before, live = peer.status, {other.name: other.status.peers_live for other in others}
    peer.send(signal.SIGTERM)
    assert four.until_ended(peer, DRAIN_SECONDS) == 0, four.report()
    assert not peer.left_behind()
    four.until("the others see that it left", lambda: all(o.status.peers_live == live[o.name] - 1 for o in others), 8)
    assert (peer.config.state_dir / "unaccepted.safetensors").exists()
    kept = progress_of(peer)
    assert kept.tokens >= before.trainer.tokens

    peer.start(join=())
    four.until_training(peer)
    assert not (peer.config.state_dir / "unaccepted.safetensors").exists()
    old = {unit.unit: unit.version for unit in before.units}
    assert all(peer.versions[unit] >= version for unit, version in old.items())
    assert peer.status.peer == before.peer
    four.until_agreed(2)
    assert peer.status.trainer.tokens > kept.tokens


def test_a_second_signal_ends_a_drain_that_hangs(four: Swarm) -> None:
    four.until_training()
    peer = four["third"]
    assert peer.status.trainer.pid is not None
    os.kill(peer.status.trainer.pid, signal.SIGSTOP)  # a drain waits for it
    peer.send(signal.SIGTERM)
    four.until("it drains", lambda: "a second signal ends at once" in peer.log())
    peer.send(signal.SIGTERM)
    assert four.until_ended(peer, 2.0) == 1
    assert "ended at once" in peer.log()
    four.until_gone(peer)


def test_all_stop_and_nothing_is_left(four: Swarm) -> None:
    four.until_agreed(1, *(four[name] for name in ("founder", "second", "fourth", "fifth")))
    assert not any(four.stop().values()), four.report()
    assert {peer.name: peer.left_behind() for peer in four.peers.values() if peer.left_behind()} == {}
    assert not four.temp_leftovers()
    for peer in four.peers.values():
        assert "Traceback" not in peer.log(), four.report()
