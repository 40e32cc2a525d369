"""Real daemons over emulated home links: each on a node of the rig, in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_harness import Peer, Swarm

from bench.drafts import demo_draft, write_draft
from bench.wan.emulator import address
from bench.wan.links import Link
from bench.wan.rig import Rig
from spesd.api.schema import RoundRecord
from spesd.cli.launch import command
from spesd.config.peer import PeerConfig
from spesd.data.prepare import prepare

LAN = Link(up=400.0, down=400.0, rtt=2.0)
"""Links while daemons come together, which is not what is tested."""

HOME = Link(up=20.0, down=50.0, rtt=50.0)
PORT = 4001

LISTEN = {"tcp": f"tcp/{PORT}", "quic": f"udp/{PORT}/quic-v1"}

SYNC = {
    "shared_shards": 4,
    "codec": "fp16",
    "local_steps": 4,
    "min_round_seconds": 1.0,
    "gather_seconds": 3.0,
    "contribute_seconds": 5.0,
    "packet_seconds": 5.0,
    "coordinator_seconds": 3.0,
    "evaluate_rounds": 1 << 30,
}
MODEL = {"layers": 2, "width": 64, "heads": 2, "expert_width": 64, "experts": 8, "top_k": 2, "common_expert": False}


@dataclass
class WanPeer(Peer):
    """A peer on a node of the rig."""

    rig: Rig = field(kw_only=True)
    node: int = field(kw_only=True)

    def argv(self, config: PeerConfig) -> list[str]:
        return self.rig.argv(self.node, command(config))

    def trains_with(self, peers: int) -> bool:
        """Whether it trains, and sees so many peers."""
        status = self.track.status
        return status is not None and status.trainer.state == "training" and status.peers_live == peers

    def rounds(self) -> list[RoundRecord]:
        """The rounds that have ended here, oldest first."""
        return list(self.daemon.client.rounds().rounds)


class WanSwarm(Swarm):
    """Peers on the nodes of a rig: the first added is on node 1, and so on."""

    def __init__(self, folder: Path, rig: Rig) -> None:
        super().__init__(folder)
        self.rig = rig

    def add(self, name: str, transport: str = "tcp", **settings: Any) -> WanPeer:
        """A peer on the next node, not started yet. `settings` are fields of PeerConfig."""
        node = len(self.peers) + 1
        local = {
            "listen": (f"/ip4/{address(node)}/{LISTEN[transport]}",),
            "device": "cpu",
            "threads": 1,
            "log_format": "json",
        }
        config = PeerConfig(state_dir=self.folder / name, **(local | settings))
        peer = self.peers[name] = WanPeer(name, config, self.temp, rig=self.rig, node=node)
        return peer

    def links(self, link: Link, *peers: Peer) -> None:
        """Give these peers, or all, this link from now on."""
        for peer in peers or self.peers.values():
            self.rig.set(self.node_of(peer), link)

    def node_of(self, peer: Peer) -> int:
        assert isinstance(peer, WanPeer)
        return peer.node

    def together(self, draft: Path, names: Iterable[str], transport: str = "tcp", **settings: Any) -> list[WanPeer]:
        """Found a run and let others join it over fast links, until all train."""
        first, *others = names
        founder = self.add(first, transport, manifest=draft, **settings)
        self.links(LAN)
        founder.start()
        self.until("the founder tells its address", lambda: bool(founder.track.status and founder.status.join))
        peers = [founder]
        for name in others:
            peer = self.add(name, transport, join=founder.status.addresses[:1], **settings)
            self.links(LAN, peer)
            peer.start()
            peers.append(peer)
        self.until(
            "all train and see each other",
            lambda: all(peer.trains_with(len(peers)) for peer in peers),
            90.0,
        )
        return peers


def wan_draft(path: Path, source: Path, **sections: Mapping[str, Any]) -> Path:
    """A run of a tiny model, with no merging; each keyword is a section of the draft, with the fields that change."""
    fields: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "optimizer": {"sequences": 1},
        "data": {"source": str(source), "sequence_length": 16, "held_out_share": 0.5, "held_out_sequences": 1},
        "sync": SYNC,
        "merge": {"interval": 0},
        "ownership": {"record_seconds": 12.0, "grace_seconds": 30.0},
    }
    draft = demo_draft(**{name: dict(fields.get(name, {})) | dict(sections.get(name, {})) for name in fields})
    write_draft(draft, path)
    return path


def some_text(folder: Path, kilobytes: int = 8) -> Path:
    """Token shards of text that does not repeat in a simple way, so many kilobytes of it to train on."""
    texts = [folder / "train.txt", folder / "held-out.txt"]
    for text, size in zip(texts, (kilobytes, 8), strict=True):
        lines = (f"{text.stem} line {number:06d} {number * number:012d}\n" for number in range(size * 1000 // 32))
        text.write_text("".join(lines), encoding="utf-8")
    prepare(texts, folder / "data", held_out_share=0.5)
    return folder / "data"
