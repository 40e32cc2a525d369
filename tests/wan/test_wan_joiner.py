"""A joiner on a home link fills its downlink, loses a donor, is killed half-way; and a donor keeps to its cap.

The tests run in this order.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from wan_harness import HOME, WanPeer, WanSwarm, some_text, wan_draft

from spesd.config.manifest import Manifest, Shard
from spesd.swarm.chunks import CHUNK_BYTES
from spesd.swarm.rate import BYTES_PER_MBIT

pytestmark = pytest.mark.timeout(150)

KILOBYTES = 24_000
"""Of text, two bytes a token: what a joiner has to fetch."""

SMALL = 4 * CHUNK_BYTES + 2_000_000
"""Bytes that are not data: chunks asked for again because their source was late, states of the tiny model, messages."""

CAP_MBIT, CAP_SECONDS = 4.0, float(os.environ.get("SPESD_TEST_CAP_SECONDS", "15"))


@pytest.fixture(scope="module")
def donors(swarm: WanSwarm) -> list[WanPeer]:
    """Three peers that have all of the data, on home links."""
    text = some_text(swarm.folder, KILOBYTES)
    draft = wan_draft(swarm.folder / "draft.toml", text, sync={"min_round_seconds": 5.0, "codec": "int8"})
    peers = swarm.together(draft, ("a", "b", "c"), "quic", train_experts=2, max_tokens_per_second=16.0)
    swarm.links(HOME)
    return peers


def shards_of(donor: WanPeer) -> list[Shard]:
    """All shards of the run, the largest first."""
    data = Manifest.from_canonical((donor.config.state_dir / "manifest.json").read_bytes()).data
    return sorted((*data.train, *data.held_out), key=lambda shard: -shard.bytes)


def fetched(peer: WanPeer, shard: Shard) -> int:
    """Bytes of a shard that are on the disk of a peer; partial files are sparse."""
    found = (peer.config.state_dir / "blobs").rglob(f"*{shard.hash}*")
    return max((min(shard.bytes, path.stat().st_blocks * 512) for path in found), default=0)


def joiner_of(swarm: WanSwarm, name: str, donor: WanPeer, **settings: Any) -> WanPeer:
    """A new peer on a home link that joins through `donor`."""
    local = {"train_experts": 1, "max_tokens_per_second": 16.0} | settings
    peer = swarm.add(name, "quic", join=donor.status.addresses[:1], **local)
    swarm.links(HOME, peer)
    peer.start()
    return peer


def until_fetched(swarm: WanSwarm, peer: WanPeer, shard: Shard, share: float) -> int:
    """Wait until it has this share of a shard; returns the bytes that it has."""
    swarm.until(f"{peer.name} has {share:.0%} of the data", lambda: fetched(peer, shard) >= share * shard.bytes, 60)
    return fetched(peer, shard)


def until_complete(swarm: WanSwarm, peer: WanPeer) -> int:
    """Wait until it has all data and goes on to the states; returns what it has received by then in this life."""

    def complete() -> bool:
        return peer.track.status is not None and bool(peer.status.units)

    swarm.until(f"{peer.name} has all data", complete, 60)
    return peer.status.traffic.down_bytes


def test_a_joiner_fills_its_downlink_from_several_donors(swarm: WanSwarm, donors: list[WanPeer]) -> None:
    largest, *others = shards_of(donors[0])
    before = [swarm.rig.counters(donor.node) for donor in donors]
    joiner = joiner_of(swarm, "joiner", donors[0], up_mbit=CAP_MBIT)  # on what it sends, which is little here
    had, since, device = until_fetched(swarm, joiner, largest, 0.1), time.monotonic(), swarm.rig.counters(joiner.node)
    has = until_fetched(swarm, joiner, largest, 0.9)
    seconds, down = time.monotonic() - since, swarm.rig.counters(joiner.node).since(device).down
    given = [swarm.rig.counters(donor.node).since(old).up for donor, old in zip(donors, before, strict=True)]
    received = until_complete(swarm, joiner)
    print(
        f"\n{(has - had) / 1e6:.1f} MB in {seconds:.1f} s: {(has - had) / seconds / BYTES_PER_MBIT:.1f} Mbit/s, "
        f"{down / seconds / BYTES_PER_MBIT:.1f} on the device, of {HOME.down:.0f}; "
        f"the donors sent {[round(up / 1e6, 1) for up in given]} MB"
    )
    assert min(given) > 0.05 * largest.bytes
    assert received < largest.bytes + sum(shard.bytes for shard in others) + SMALL, "chunks came twice"


def test_a_joiner_survives_the_loss_of_a_donor_and_its_own_death(swarm: WanSwarm, donors: list[WanPeer]) -> None:
    largest, *others = shards_of(donors[0])
    second = joiner_of(swarm, "second", donors[0])
    at_loss = until_fetched(swarm, second, largest, 0.2)
    swarm.rig.blackhole(donors[1].node)
    try:
        until_fetched(swarm, second, largest, 0.5)
        second.send(signal.SIGKILL)
        swarm.until_gone(second)
        had = fetched(second, largest)
        second.start()
        again = until_complete(swarm, second)
    finally:
        swarm.rig.heal()
    print(
        f"\n{at_loss / 1e6:.1f} MB when one vanished, {had / 1e6:.1f} when killed, {again / 1e6:.1f} more in its "
        f"second life, of {largest.bytes / 1e6:.1f} and {sum(shard.bytes for shard in others) / 1e6:.1f}"
    )
    assert again < largest.bytes - had + sum(shard.bytes for shard in others) + SMALL


def test_a_cap_on_what_is_sent_holds_on_the_device(swarm: WanSwarm, donors: list[WanPeer]) -> None:
    capped = swarm["joiner"]
    assert isinstance(capped, WanPeer)
    assert capped.config.up_mbit == CAP_MBIT
    third = joiner_of(swarm, "third", capped)
    others = {peer.node for peer in swarm.peers.values() if isinstance(peer, WanPeer)} - {capped.node, third.node}
    swarm.rig.partition({capped.node, third.node}, others)  # it has no other donor
    try:
        until_fetched(swarm, third, shards_of(capped)[0], 0.05)
        before, since = swarm.rig.counters(capped.node), time.monotonic()
        swarm.until("the time is over", lambda: time.monotonic() - since >= CAP_SECONDS, CAP_SECONDS + 5)
        up, seconds = swarm.rig.counters(capped.node).since(before).up, time.monotonic() - since
    finally:
        swarm.rig.heal()
    print(f"\n{up / seconds / BYTES_PER_MBIT:.2f} Mbit/s sent in {seconds:.1f} s, {CAP_MBIT:g} are allowed")
    assert 0.7 * CAP_MBIT < up / seconds / BYTES_PER_MBIT < 1.1 * CAP_MBIT
