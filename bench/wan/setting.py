"""What the WAN bench measures: sizes, links, how often."""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.drafts import demo_draft
from bench.wan.arithmetic import Sizes, Volume, swarm_volume
from bench.wan.links import Link
from spesd.config.manifest import Draft
from spesd.model.units import UnitLayout
from spesd.sync.codecs import codecs_of

PEERS = 4
SERVER_FACTOR = 5.0
"""How many times as fast as a peer's the central server's link is."""

MODEL = {"layers": 4, "width": 320, "heads": 4, "expert_width": 416, "experts": 8, "top_k": 2}
"""14.6 million values, shared ones and experts about 1 : 7, as in the 7B of SPES."""

HOME = Link(up=20.0, down=50.0, rtt=50.0, loss=0.001)

SEQUENCE_LENGTH, STEPS_PER_SECOND = 16, 1.0
"""Tokens of one step, and the pace of a trainer: its steps stand for long ones, and the processors here are few."""

TRANSPORTS = {
    "tcp": ("tcp/4001",),
    "quic": ("udp/4001/quic-v1",),
    "both": ("udp/4001/quic-v1", "tcp/4001"),
}
"""How peers can be reached, as ends of multiaddrs; of several libp2p takes QUIC where it can."""

NEVER = 1 << 30

PATIENCE_SECONDS = 120.0
"""Deadlines of the protocol: no round of this bench should meet one."""


class Setting(NamedTuple):
    """One run of the bench. Between two rounds there are `local_seconds` of local steps, whatever the method."""

    model: dict[str, int] = MODEL
    link: Link = HOME
    rounds: int = 2
    local_seconds: float = 20.0
    refresh_every: int = 1
    transport: str = "both"
    up_mbit: float | None = None
    """Cap of each peer on what it sends."""

    @property
    def server_link(self) -> Link:
        return self.link.faster(SERVER_FACTOR)

    def listen(self, address: str) -> tuple[str, ...]:
        """Where a daemon with this IPv4 address listens."""
        return tuple(f"/ip4/{address}/{end}" for end in TRANSPORTS[self.transport])

    @property
    def layout(self) -> UnitLayout:
        draft = self.draft("fp32", "")
        return UnitLayout(draft.model, draft.sync.shared_shards)

    @property
    def sizes(self) -> Sizes:
        layout = self.layout
        return Sizes(PEERS, layout.shared_size, layout.total_size - layout.shared_size)

    def swarm_volume(self, codec: str) -> Volume:
        """What a peer moves in a round with this codec. A refresh may be written with a denser one."""
        codecs, size = codecs_of(self.draft(codec, "").sync), self.layout.expert_size
        refresh = codecs.usual if self.refresh_every == 1 else codecs.dense
        shared_bytes, expert_bytes = codecs.usual.payload_size(size) / size, refresh.payload_size(size) / size
        return swarm_volume(self.sizes, shared_bytes, expert_bytes, self.refresh_every)

    def draft(self, codec: str, source: str) -> Draft:
        """A run of this model: every expert has its own matrices, and nothing is merged, as in the baseline."""
        sync: dict[str, Any] = {
            "codec": codec,
            "dense_codec": "int4",  # of topk's refreshes
            "shared_shards": 2 * PEERS,
            "local_steps": round(self.local_seconds * STEPS_PER_SECOND),
            "min_round_seconds": 0.0,  # rounds are told apart by local steps, as in the baseline
            "contribute_seconds": PATIENCE_SECONDS,
            "packet_seconds": PATIENCE_SECONDS,
            "evaluate_rounds": NEVER,
            "refresh_every": self.refresh_every,
        }
        data = {"source": source, "sequence_length": SEQUENCE_LENGTH, "held_out_share": 0.5, "held_out_sequences": 1}
        model = self.model | {"common_expert": False}
        return demo_draft(model=model, optimizer={"sequences": 1}, data=data, sync=sync, merge={"interval": 0})
