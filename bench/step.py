"""The expert layer, forward and backward, beside the plain loop over experts under autograd: speed, and memory kept.

On a CPU the grouped product is itself a loop inside torch, so the speed tells what the layer's bookkeeping costs there;
what it is written for is how little it keeps for the backward pass.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bench.report import BenchError, Result
from spesd.cli.console import amount
from spesd.cli.fleet import Interruptible
from spesd.config.manifest import ModelConfig
from spesd.model.flat import FlatWeights
from spesd.model.moe import ExpertLayer, router_losses
from spesd.model.transformer import Layer, Transformer
from spesd.model.units import UnitLayout

if TYPE_CHECKING:
    from rich.table import Table

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"width": 128, "expert_width": 128, "experts": 8, "top_k": 2},
    "many experts": {"width": 256, "expert_width": 256, "experts": 32, "top_k": 4},
}
TOKENS, REPEATS = 1024, 15
"""Tokens in one micro-batch, and how often each layer runs; the fastest run counts."""

OWNED_SHARE = 4
"""One expert in so many is trained."""

TOLERANCE = 1e-3
"""Largest difference of an output or an input gradient that is still rounding."""

Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps input and upstream gradient, fp32 [tokens, width], to output and input gradient."""


class Comparison(BaseModel):
    """One shape."""

    model_config = ConfigDict(frozen=True)

    grouped_tokens_per_cpu_s: float
    loop_tokens_per_cpu_s: float
    ratio: float
    grouped_kept_bytes: int
    loop_kept_bytes: int
    kept_ratio: float


class StepResult(Result):
    """By name of the shape. Seconds are CPU seconds of one thread, so that other processes do not count."""

    shapes: dict[str, Comparison]

    def table(self) -> Table:
        from rich.table import Table

        speeds = ("grouped, tokens/CPU s", "loop, tokens/CPU s", "ratio")
        kept = ("grouped keeps", "loop keeps", "ratio")
        table = Table("shape", *speeds, *kept, title="one expert layer, forward and backward, one CPU thread")
        for name, c in self.shapes.items():
            speeds = (f"{c.grouped_tokens_per_cpu_s:.0f}", f"{c.loop_tokens_per_cpu_s:.0f}", f"{c.ratio:.2f}")
            kept = (amount(c.grouped_kept_bytes), amount(c.loop_kept_bytes), f"{c.kept_ratio:.2f}")
            table.add_row(name, *speeds, *kept)
        table.add_row("wanted", "", "", "", "", "", "< 1")
        return table


def run(
    signals: Interruptible,
    shapes: dict[str, dict[str, Any]] | None = None,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
) -> StepResult:
    """Time both layers on every shape. Raises Interrupted, and BenchError when they do not compute the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
            return summarise({n: _compare(signals, s, tokens, repeats) for n, s in (shapes or SHAPES).items()})
    finally:
        torch.set_num_threads(threads)


def summarise(shapes: dict[str, Comparison]) -> StepResult:
    """The target is that the layer keeps less than the loop; its speed on a CPU is shown, not promised."""
    return StepResult(targets={"kept": all(c.kept_ratio < 1 for c in shapes.values())}, shapes=shapes)


def _compare(signals: Interruptible, shape: dict[str, Any], tokens: int, repeats: int) -> Comparison:
    model = ModelConfig(layers=1, heads=2, vocabulary=16, **shape)
    generator = torch.Generator().manual_seed(0)
    owned = [f"expert-{index}" for index in range(0, model.experts, OWNED_SHARE)]
    weights = FlatWeights(UnitLayout(model, 1), owned)
    for unit in weights.layout.units:
        weights.values(unit.id).normal_(std=0.05, generator=generator)
    (layer,) = Transformer(weights, tokens).layers
    assert isinstance(layer, Layer)
    grouped, loop = _grouped(layer.experts, layer.router), _loop(weights, layer.router, model)
    x, upstream = (torch.randn(tokens, model.width, generator=generator) for _ in range(2))
    for name, ours, plain in zip(("output", "gradient"), grouped(x, upstream), loop(x, upstream), strict=True):
        if (error := float((ours - plain).abs().max())) > TOLERANCE:
            raise BenchError(f"expert layer and plain loop differ by {error:.2g} in their {name}: nothing to compare")
    seconds = _fastest((grouped, loop), x, upstream, signals, repeats)
    kept = [kept_bytes(layer_run, x, upstream, weights) for layer_run in (grouped, loop)]
    return Comparison(
        grouped_tokens_per_cpu_s=tokens / seconds[0],
        loop_tokens_per_cpu_s=tokens / seconds[1],
        ratio=seconds[1] / seconds[0],
        grouped_kept_bytes=kept[0],
        loop_kept_bytes=kept[1],
        kept_ratio=kept[0] / kept[1],
    )


def _fastest(runs: Sequence[Run], x: Tensor, upstream: Tensor, signals: Interruptible, repeats: int) -> list[float]:
    """CPU seconds of the fastest of `repeats` runs of each, in turn: what disturbs a run can only slow it down."""
    fastest = [float("inf")] * len(runs)
    for _ in range(repeats):
        signals.pause(0)
        for index, layer_run in enumerate(runs):
            began = time.process_time()
            layer_run(x, upstream)
            fastest[index] = min(fastest[index], time.process_time() - began)
    return fastest


def kept_bytes(layer_run: Run, x: Tensor, upstream: Tensor, weights: FlatWeights) -> int:
    """Bytes that a run keeps from its forward to its backward pass, each storage once and `weights` not counted."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer_run(x, upstream)
    for flat in (weights.theta, weights.frozen):
        kept.pop(flat.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def _grouped(experts: ExpertLayer, router: Tensor) -> Run:
    """The layer that the trainer runs."""

    def layer_run(x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y, _ = experts(x, router)
        gradients = torch.autograd.grad(y, (x, router, experts.gate_up, experts.down), upstream)
        return y.detach(), gradients[0]

    return layer_run


def _loop(weights: FlatWeights, router: Tensor, model: ModelConfig) -> Run:
    """The layer as it is usually written: pick each expert's tokens, add its outputs; frozen ones get no gradient."""
    shape = (3, model.expert_width, model.width)
    matrices = [weights.values(f"expert-{index}").detach().view(shape).unbind() for index in range(model.experts)]
    trained = [matrix.requires_grad_() for unit in weights.owned for matrix in matrices[unit.index]]

    def layer_run(x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        logits = F.linear(x, router)
        probabilities = logits.softmax(-1)
        router_weights, chosen = probabilities.topk(model.top_k, dim=-1)
        router_losses(logits, probabilities, chosen)
        y = torch.zeros_like(x)
        for index, (gate, up, down) in enumerate(matrices):
            token, place = torch.where(chosen == index)
            hidden = F.silu(x[token] @ gate.T) * (x[token] @ up.T)
            y = y.index_add(0, token, (hidden @ down) * router_weights[token, place].unsqueeze(-1))
        gradients = torch.autograd.grad(y, (x, router, *trained), upstream)
        return y.detach(), gradients[0]

    return layer_run
