"""The decoder: OLMoE's shape (arXiv 2409.02060), the one that SPES trains (arXiv 2602.11543)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spesd.config.manifest import ModelConfig
from spesd.model.flat import FlatWeights
from spesd.model.moe import Balance, ExpertLayer, RouterLosses


class Losses(NamedTuple):
    """`total` is what is trained on, `cross_entropy` its first term in nats per token; fp32 scalars."""

    total: Tensor
    cross_entropy: Tensor


class Transformer(nn.Module):
    """Pre-norm decoder with RoPE, QK-norm over the whole projection, and untied embeddings.

    Its parameters are views into `weights`. `sequence_length` bounds the tokens of one sequence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, weights: FlatWeights, sequence_length: int) -> None:
        super().__init__()
        config = weights.layout.model
        self.config = config
        self.embedding = _unbound()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = _unbound()
        self.head = _unbound()
        for name, table in zip(("cos", "sin"), rotary_tables(config, sequence_length), strict=True):
            self.register_buffer(name, table.to(weights.theta.device), persistent=False)
        self.bind(weights)

    def bind(self, weights: FlatWeights) -> None:
        """Make every parameter a view into `weights`, also after the owned experts have changed."""
        for name, parameter in weights.shared_parameters():
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, parameter)
        slots = weights.expert_slots()
        for index in range(self.config.layers):
            experts = self.get_submodule(f"layers.{index}.experts")
            experts.gate_up, experts.down = weights.expert_parameters(index)
            experts.frozen_gate_up, experts.frozen_down = weights.frozen_experts(index)
            experts.slots = slots

    def balances(self, trained_factor: float = 1.0) -> list[Balance]:
        """For each layer what an optimizer step's load-balancing loss is reckoned over: hand it to every `loss` of it.

        Terms of experts that are trained here weigh `trained_factor`, those of all others 1.
        """
        experts = self.get_submodule("layers.0.experts")
        assert isinstance(experts, ExpertLayer)
        factors = torch.where(experts.slots < len(experts.gate_up), trained_factor, 1.0)
        return [Balance(torch.zeros_like(factors), factors) for _ in self.layers]

    def forward(self, tokens: Tensor, balances: Sequence[Balance] | None = None) -> tuple[Tensor, RouterLosses]:
        """Map int64 [sequences, length] to logits [sequences, length, vocabulary] and the mean losses over layers."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(tokens, self.embedding)
        losses = []
        for index, layer in enumerate(self.layers):
            x, layer_losses = layer(x, cos, sin, balances[index] if balances else None)
            losses.append(layer_losses)
        x = F.rms_norm(x, (self.config.width,), self.final_norm, self.config.norm_eps)
        balance, z = (torch.stack(terms).mean() for terms in zip(*losses, strict=True))
        return F.linear(x, self.head), RouterLosses(balance, z)

    def loss(self, blocks: Tensor, balances: Sequence[Balance] | None = None) -> Losses:
        """Next-token loss of int64 [sequences, length + 1] plus the weighted router losses."""
        logits, router = self(blocks[:, :-1], balances)
        cross_entropy = F.cross_entropy(logits.flatten(0, 1).float(), blocks[:, 1:].flatten())
        extra = self.config.load_balance_loss * router.balance + self.config.router_z_loss * router.z
        return Losses(cross_entropy + extra, cross_entropy)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = _unbound()
        self.attention = Attention(config)
        self.expert_norm = _unbound()
        self.router = _unbound()
        self.common = _unbound() if config.common_expert else None
        self.experts = ExpertLayer(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, balance: Balance | None = None
    ) -> tuple[Tensor, RouterLosses]:
        """Map [sequences, length, width] to the same shape."""
        shape, eps = (self.config.width,), self.config.norm_eps
        x = x + self.attention(F.rms_norm(x, shape, self.attention_norm, eps), cos, sin)
        normed = F.rms_norm(x, shape, self.expert_norm, eps)
        y, losses = self.experts(normed.flatten(0, 1), self.router, self.common, balance)
        return x + y.view_as(x), losses


class Attention(nn.Module):
    """Causal self-attention with QK-norm over the whole projection and RoPE."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q, self.k, self.v, self.o = (_unbound() for _ in range(4))
        self.q_norm, self.k_norm = _unbound(), _unbound()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [sequences, length, width] to the same shape; `cos` and `sin` are fp32 [length, head width]."""
        value = F.linear(x, self.v)
        query = self._normed(F.linear(x, self.q), self.q_norm)
        key = self._normed(F.linear(x, self.k), self.k_norm)
        query, key, value = (self._heads(t) for t in (query, key, value))
        query, key = (rotate(t, cos, sin).to(value.dtype) for t in (query, key))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.o)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.config.width,), weight, self.config.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.config.heads, -1).transpose(1, 2)


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of RoPE's angles (arXiv 2104.09864, eq. 34), fp32 [length, head width], halves repeated."""
    head_width = config.width // config.heads
    frequency = config.rope_theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [..., length, head width], pairing value i with value i + head width / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _unbound() -> nn.Parameter:
    """Placeholder of a parameter that `Transformer.bind` sets."""
    return nn.Parameter(torch.empty(0, device="meta"))
