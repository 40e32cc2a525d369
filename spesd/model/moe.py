"""The expert layer: a dropless top-k mixture in which frozen experts cost their weights and one input gradient.

Tokens are sorted by expert, trained experts first, so that each matrix needs two grouped products: one over the trained
experts, one over the frozen ones. The backward pass is written out because it can then keep far less than autograd
would: the input once (not once per chosen expert) and the gate and up products, but neither the activation nor the
outputs of the experts. Weights are cast to the compute dtype on the fly, so no copy of them is kept either.

Experts may have matrices in common: then each computes with its own plus the common ones. Those are shared parameters,
so that the tokens of every peer reach every expert, for the memory and the bytes of a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spesd.config.manifest import ModelConfig
from spesd_kernels.grouped import grouped_matmul, grouped_outer


class RouterLosses(NamedTuple):
    """Auxiliary losses of one layer or their mean over layers, fp32 scalars."""

    balance: Tensor
    z: Tensor


class Balance(NamedTuple):
    """What the load-balancing loss of one layer looks at beside its micro-batch, fp32 [experts] each.

    `routed` are the assignments of the step so far, `factors` the weights of the experts' terms.
    """

    routed: Tensor
    factors: Tensor


class ExpertLayer(nn.Module):
    """Router and experts of one layer. Trained experts are parameters, frozen ones are buffers."""

    slots: Tensor
    frozen_gate_up: Tensor
    frozen_down: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        empty = torch.empty(0, device="meta")
        self.gate_up = nn.Parameter(empty)
        self.down = nn.Parameter(empty)
        for name in ("slots", "frozen_gate_up", "frozen_down"):
            self.register_buffer(name, empty, persistent=False)

    def forward(
        self, x: Tensor, router: Tensor, common: Tensor | None = None, balance: Balance | None = None
    ) -> tuple[Tensor, RouterLosses]:
        """Map [tokens, width] to [tokens, width]; `router` is [experts, width], `common` [3F, width] or None.

        The router weight is applied after the expert. Routing runs in fp32 whatever autocast says.
        """
        device = x.device.type
        with torch.autocast(device, enabled=False):
            logits = F.linear(x.float(), router)
            probabilities = logits.softmax(-1)
            weights, chosen = probabilities.topk(self.config.top_k, dim=-1)
            losses = router_losses(logits, probabilities, chosen, balance)
        if self.config.renormalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        matrices = (self.gate_up, self.down, self.frozen_gate_up, self.frozen_down)
        y: Tensor = _SparseExperts.apply(x.to(dtype), weights, self.slots[chosen], common, *matrices)  # type: ignore[no-untyped-call]
        return y, losses


def router_losses(
    logits: Tensor, probabilities: Tensor, chosen: Tensor, balance: Balance | None = None
) -> RouterLosses:
    """Load-balancing loss and z-loss over one micro-batch.

    `logits` and `probabilities` are fp32 [tokens, experts], `chosen` int64 [tokens, top_k]. Balance is
    E * sum_e c_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4) with f_e the share of assignments that went to
    expert e, 1 when balanced and all c_e are; z is the mean of logsumexp squared (ST-MoE, arXiv 2202.08906, eq. 5).
    With `balance` f_e counts all micro-batches of the step up to this one, whose assignments are added to it: no second
    pass and no memory. Early micro-batches know less than one big batch would, so that of 8 micro-batches of 64 random
    tokens the router's gradient is off by a third; with each for itself it is by two thirds.
    """
    experts = logits.shape[-1]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    if balance is None:
        share = counts / chosen.numel()
    else:
        balance.routed.add_(counts)
        share = balance.factors * balance.routed / balance.routed.sum()
    loss = experts * (share * probabilities.mean(0)).sum()
    return RouterLosses(loss, logits.logsumexp(-1).square().mean())


class _Segment(NamedTuple):
    """A run of rows of the sorted tokens and the experts that see them."""

    rows: slice
    ends: Tensor
    gate_up: Tensor
    down: Tensor


def _segments(
    counts: Tensor, split: int, rows: Tensor, common: Tensor | None, matrices: Sequence[Tensor]
) -> tuple[_Segment, _Segment]:
    """Trained and frozen segment of `rows`, cut at row `split`; `counts` is int64 [experts] in slot order."""
    if common is not None:
        width = matrices[1].shape[1]
        matrices = [m + c for m, c in zip(matrices, 2 * (common[: 2 * width], common[2 * width :]), strict=True)]
    trained_gate_up, trained_down, frozen_gate_up, frozen_down = (matrix.to(rows.dtype) for matrix in matrices)
    trained, frozen = counts.split_with_sizes([len(trained_gate_up), len(frozen_gate_up)])
    return (
        _Segment(slice(0, split), trained.cumsum(0, dtype=torch.int32), trained_gate_up, trained_down),
        _Segment(slice(split, len(rows)), frozen.cumsum(0, dtype=torch.int32), frozen_gate_up, frozen_down),
    )


class _SparseExperts(torch.autograd.Function):
    """SwiGLU experts over [T, H] with router weights [T, k] and expert slots [T, k]; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, slots: Tensor, common: Tensor | None, *matrices: Tensor
    ) -> Tensor:
        top_k = slots.shape[1]
        order = slots.flatten().argsort(stable=True)
        counts = torch.bincount(slots.flatten(), minlength=len(matrices[0]) + len(matrices[2]))
        ctx.split = int(counts[: len(matrices[0])].sum())  # the layer's one synchronisation with the device
        rows = x[order // top_k]
        hidden, outputs = [], []
        for segment in _segments(counts, ctx.split, rows, common, matrices):
            if segment.rows.start == segment.rows.stop:
                hidden.append(rows.new_empty(0, 2 * segment.down.shape[1]))
                continue
            hidden.append(grouped_matmul(rows[segment.rows], segment.gate_up.mT, segment.ends))
            gate, up = hidden[-1].chunk(2, dim=-1)
            outputs.append(grouped_matmul(F.silu(gate) * up, segment.down, segment.ends))
        ctx.save_for_backward(x, weights, order, counts, common, *hidden, *matrices)
        by_token = torch.cat(outputs)[_inverse(order)].view(*slots.shape, -1)
        return (by_token * weights.to(x.dtype).unsqueeze(-1)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, counts, common, trained_hidden, frozen_hidden, *matrices = ctx.saved_tensors
        token = order // weights.shape[1]
        rows, grad_rows, weight = x[token], grad_output[token], weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        grad_x, grad_weight = torch.empty_like(rows), torch.empty_like(order, dtype=weights.dtype)
        grad_matrices: list[Tensor | None] = [None] * 4
        grad_common = torch.zeros_like(common) if common is not None else None
        trained, frozen = _segments(counts, ctx.split, rows, common, matrices)
        for segment, hidden in ((trained, trained_hidden), (frozen, frozen_hidden)):
            at = segment.rows
            if at.start == at.stop:
                continue
            gate, up = hidden.chunk(2, dim=-1)
            activation = F.silu(gate) * up
            # <grad, activation @ down> is <grad @ down^T, activation>: the router's gradient needs no expert output.
            grad_activation = grouped_matmul(grad_rows[at], segment.down.mT, segment.ends)
            grad_weight[at] = (grad_activation * activation).sum(-1).to(weights.dtype)
            grad_hidden = _swiglu_backward(grad_activation * weight[at], gate, up)
            grad_x[at] = grouped_matmul(grad_hidden, segment.gate_up, segment.ends)
            activation *= weight[at]
            if segment is trained:
                grad_gate_up = grouped_outer(grad_hidden, rows[at], segment.ends)
                grad_down = grouped_outer(activation, grad_rows[at], segment.ends)
                grad_matrices[:2] = grad_gate_up.to(matrices[0].dtype), grad_down.to(matrices[1].dtype)
            if grad_common is not None:
                grad_common += torch.cat([grad_hidden.mT @ rows[at], activation.mT @ grad_rows[at]])
        back = _inverse(order)
        grad_input = grad_x[back].view(*weights.shape, -1).sum(1)
        return grad_input, grad_weight[back].view_as(weights), None, grad_common, *grad_matrices


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Gradient of silu(gate) * up: [R, F] to [R, 2F], gate's half first."""
    sigmoid = gate.sigmoid()
    return torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], dim=-1)


def _inverse(order: Tensor) -> Tensor:
    """Inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
