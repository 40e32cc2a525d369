"""The manifest: everything that all peers of a run must agree on.

A person writes a :class:`Draft` (a TOML file such as ``peer_configs/demo.toml``). Founding a run *seals* it: the data
shards and the genesis state of every unit are added by hash, and the result is a :class:`Manifest`, immutable and
content-addressed. The blake3 hash of its canonical bytes is the run id.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MANIFEST_BYTES = 4 << 20
"""Upper bound on canonical bytes, checked before a manifest from the network is parsed."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex of a 32-byte blake3 hash."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Shape of the decoder (OLMoE's, arXiv 2409.02060, as used by SPES, arXiv 2602.11543, section 4)."""

    layers: int = Field(ge=1, le=256)
    width: int = Field(ge=8, le=65536, multiple_of=4, description="hidden size H")
    heads: int = Field(ge=1, le=512)
    expert_width: int = Field(ge=4, le=262144, multiple_of=4, description="hidden size F of one expert")
    experts: int = Field(ge=1, le=4096, description="experts E per layer")
    top_k: int = Field(ge=1, le=64, description="experts that see one token")
    vocabulary: int = Field(ge=2, le=1 << 24)
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    common_expert: bool = Field(
        default=False, description="experts have matrices in common, trained by all peers and added to each one's own"
    )
    renormalise_top_k: bool = Field(default=False, description="divide the top-k router weights by their sum")
    load_balance_loss: float = Field(default=0.01, ge=0)
    router_z_loss: float = Field(default=0.001, ge=0)
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="seed of the genesis state")

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        return self


class OptimizerConfig(Section):
    """AdamW with warm-up and cosine keyed to the swarm's round, so that a late joiner has the same learning rate."""

    learning_rate: float = Field(gt=0, le=10)
    final_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate over the highest")
    warmup_rounds: int = Field(default=0, ge=0)
    total_rounds: int = Field(ge=1, description="rounds after which the cosine has reached its end")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    expert_rate: float = Field(default=1.0, gt=0, le=100, description="learning rate of experts over that of the rest")
    owner_warmup_steps: int = Field(
        default=0, ge=0, description="steps in which a fresh owner's expert warms up; not on top of warmup_rounds"
    )
    balance_start: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="weight of trained experts in the load-balancing loss at round 0, 1 after a fifth of total_rounds; "
        "0.7 in the authors' code",
    )
    clip_norm: float = Field(default=1.0, gt=0)
    sequences: int = Field(ge=1, le=65536, description="sequences in one micro-batch")
    accumulate: int = Field(default=1, ge=1, le=4096, description="micro-batches in one step")


class Shard(Section):
    """One blob of tokens, named by the hash of its file (header included)."""

    hash: Hash
    bytes: int = Field(ge=1, description="size of the file")
    tokens: int = Field(ge=1)


class DataConfig(Section):
    """Where tokens come from. `source` is read once, by the founder; shards are what everybody trains on."""

    source: str = Field(default="stdlib", description="'stdlib' or a folder of shards made by `spesd data prepare`")
    tokenizer: Literal["bytes"] = "bytes"
    sequence_length: int = Field(ge=8, le=1 << 20)
    held_out_share: float = Field(default=0.02, gt=0, lt=1, description="share of the text kept for evaluation")
    held_out_sequences: int = Field(default=16, ge=1, description="sequences in one evaluation")


class SealedData(DataConfig):
    """Data of a founded run: the shards by hash."""

    train: tuple[Shard, ...] = Field(min_length=1)
    held_out: tuple[Shard, ...] = Field(min_length=1)


class SyncConfig(Section):
    """Rounds: how often, how long each wait lasts, and what a contribution may weigh."""

    shared_shards: int = Field(default=4, ge=1, le=4096, description="units that the shared parameters are cut into")
    codec: Literal["fp32", "fp16", "int8", "int4", "topk"] = Field(
        default="topk", description="of contributions and packets; what each costs in learning: docs/learning.md"
    )
    block: int = Field(default=128, ge=16, le=4096, description="values under one scale of int8 and int4; a power of 2")
    top_share: float = Field(default=0.05, gt=0, le=0.5, description="share of the values that topk keeps")
    dense_codec: Literal["fp32", "fp16", "int8", "int4"] = Field(
        default="int8", description="with topk: of packets that hold a merging move or a refresh"
    )
    local_steps: int = Field(ge=1, description="least steps after which a peer is ready for the next round")
    max_local_steps: int = Field(default=0, ge=0, description="most of them where rounds take long; 0: as local_steps")
    comm_share: float = Field(default=0.5, gt=0, le=1, description="share of the time that a round may take, for that")
    stagger: int = Field(
        default=1,
        ge=1,
        le=64,
        description="rounds in which each unit has one turn: more of them, each with fewer units, local_steps apart",
    )
    min_round_seconds: float = Field(default=0.0, ge=0, description="least time between two calls")
    gather_seconds: float = Field(default=3.0, gt=0, description="a call waits at most so long for peers to join")
    contribute_seconds: float = Field(
        default=10.0, gt=0, description="a reducer waits at most so long for contributions"
    )
    packet_seconds: float = Field(default=10.0, gt=0, description="a member waits at most so long for a packet")
    coordinator_seconds: float = Field(default=5.0, gt=0, description="a ready peer waits so long for the call")
    weight_cap: float = Field(default=2.0, ge=1, description="most that a peer may weigh, in medians of the roster")
    max_delta_rms: float = Field(default=0.1, gt=0, description="a contribution with a larger RMS value is refused")
    stale_rounds: int = Field(default=20, ge=1, description="work older than this many rounds is dropped")
    anchor_rounds: int = Field(default=8, ge=1, description="rounds between full unit states on disk")
    refresh_every: int = Field(
        default=1, ge=1, le=64, description="turns of an expert of which those who do not train it fetch one"
    )
    lag_rounds: int = Field(default=4, ge=0, description="rounds that a foreign expert may lack when training begins")
    evaluate_rounds: int = Field(default=1, ge=1, description="rounds between held-out evaluations")

    def turn(self, round_: int) -> int:
        """Number of the turn that units have in or before this round. `merge.interval`, `refresh_every` count these."""
        return round_ // self.stagger

    @model_validator(mode="after")
    def _whole_blocks(self) -> SyncConfig:
        if self.block & (self.block - 1):
            raise ValueError(f"block {self.block} is not a power of 2 such as 128")
        return self


class MergeConfig(Section):
    """Expert-merging warm-up (SPES, section 3.3): early on, experts move toward those most like them."""

    interval: int = Field(default=0, ge=0, description="turns of an expert of which one merges; 0: never")
    alpha: float = Field(default=0.05, ge=0, lt=1, description="strength at round 0, of 0.05 in the authors' code")
    decay_rounds: int = Field(default=100, ge=1, description="rounds in which the strength falls to 0")
    top_k: int = Field(default=4, ge=1, description="most similar experts toward whose mean an expert moves")
    projection: int = Field(default=0, ge=0, description="estimate likeness from so many values; 0: exactly")


class OuterConfig(Section):
    """What the swarm makes of the mean of a round's contributions."""

    method: Literal["average", "nesterov"] = Field(default="average", description="nesterov: with momentum, as DiLoCo")
    learning_rate: float = Field(default=0.7, gt=0, le=10, description="of nesterov; 0.7 in DiLoCo")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of nesterov; 0.9 in DiLoCo")


class OwnershipConfig(Section):
    """Who trains what. A peer trains as many experts as it has room for, first those with the fewest owners."""

    redundancy: int = Field(
        default=1,
        ge=1,
        description="owners wanted for each expert, which needs budgets that allow it; status names lacks",
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="after so long, an expert with two owners fewer than another gets one of them",
    )
    record_seconds: float = Field(default=30.0, gt=0, description="life of a record in the DHT")


class Draft(Section):
    """What a person writes. See `peer_configs/demo.toml`."""

    format: Literal[1] = Field(default=1, description="version of this schema; a peer refuses any other")
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    sync: SyncConfig
    merge: MergeConfig = MergeConfig()
    outer: OuterConfig = OuterConfig()
    ownership: OwnershipConfig = OwnershipConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Draft:
        if self.data.tokenizer == "bytes" and self.model.vocabulary < 256:
            raise ValueError(f"model.vocabulary {self.model.vocabulary} is less than the 256 of data.tokenizer 'bytes'")
        if self.sync.shared_shards > self.model.vocabulary * self.model.width:
            raise ValueError(f"sync.shared_shards {self.sync.shared_shards} is more than there are shared values")
        if self.sync.stagger > self.sync.shared_shards + self.model.experts:
            raise ValueError(f"sync.stagger {self.sync.stagger} is more than there are units to take turns")
        if self.outer.method == "nesterov" and self.merge.interval:
            raise ValueError("outer.method 'nesterov' would give merging moves momentum too: set merge.interval to 0")
        return self

    def seal(self, train: tuple[Shard, ...], held_out: tuple[Shard, ...], genesis: dict[str, str]) -> Manifest:
        """Return the manifest of a founded run.

        `genesis` maps every unit id to the hash of its first state.
        """
        fields = self.model_dump()
        fields["data"] |= {"train": [s.model_dump() for s in train], "held_out": [s.model_dump() for s in held_out]}
        return Manifest.model_validate(fields | {"genesis": genesis})


class Manifest(Draft):
    """A sealed draft. Immutable; its canonical bytes name the run."""

    data: SealedData
    genesis: dict[str, Hash] = Field(min_length=1)

    def canonical_bytes(self) -> bytes:
        """JSON with sorted keys, no white space, UTF-8: the same bytes on every platform."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def run_id(self) -> str:
        """Hex blake3 hash of the canonical bytes."""
        return blake3(self.canonical_bytes()).hexdigest()

    @classmethod
    def from_canonical(cls, data: bytes) -> Manifest:
        """Parse canonical bytes from the network.

        Raises ValueError when they are too long, invalid, or not the canonical form of what they say.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(f"manifest of {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are accepted")
        manifest = cls.model_validate_json(data)
        if manifest.canonical_bytes() != data:
            raise ValueError("manifest bytes are not in canonical form")
        return manifest
