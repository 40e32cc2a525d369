"""All weights of a peer in two flat vectors, so that a unit is one contiguous run of values.

`theta` holds every trained unit (the shared shards in order, which together are the whole shared vector, then the owned
experts in id order); `grad` matches it value for value; `frozen` holds all other experts. The model's parameters are
views into these vectors, and autograd accumulates into `grad` in place. So a snapshot of a unit is one copy, a shift is
one addition, and the gradient norm is one reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor, nn

from spesd.model.units import Unit, UnitLayout


class FlatWeights:
    """The weights of one peer: `theta` and `grad` fp32 [trained values], `frozen` fp32 [frozen values].

    `owned` names the expert units to train. Raises ValueError when one of them is no expert of the layout.
    """

    def __init__(self, layout: UnitLayout, owned: Iterable[str], device: torch.device | str = "cpu") -> None:
        wanted = set(owned)
        experts = [unit for unit in layout.units if unit.kind == "expert"]
        if unknown := wanted - {unit.id for unit in experts}:
            raise ValueError(f"owned units {sorted(unknown)} are not experts of this model")
        self.layout = layout
        self.owned = tuple(unit for unit in experts if unit.id in wanted)
        self.foreign = tuple(unit for unit in experts if unit.id not in wanted)
        self.trained = (*(unit for unit in layout.units if unit.kind == "shared"), *self.owned)
        self.theta = torch.zeros(sum(unit.size for unit in self.trained), device=device)
        self.grad = torch.zeros_like(self.theta)
        self.frozen = torch.zeros(sum(unit.size for unit in self.foreign), device=device)
        self._trained_at = _places(self.trained)
        self._frozen_at = _places(self.foreign)

    def values(self, unit_id: str) -> Tensor:
        """View of a unit's values, fp32 [unit.size]. Raises KeyError for an unknown unit."""
        if unit_id in self._trained_at:
            return self.theta[self._trained_at[unit_id]]
        return self.frozen[self._frozen_at[unit_id]]

    def gradient(self, unit_id: str) -> Tensor:
        """View of a trained unit's gradient, fp32 [unit.size]. Raises KeyError for a unit that is not trained."""
        return self.grad[self._trained_at[unit_id]]

    def is_trained(self, unit_id: str) -> bool:
        """Whether the unit has a gradient here."""
        return unit_id in self._trained_at

    def with_owned(self, owned: Iterable[str]) -> FlatWeights:
        """Copy that trains other experts, every value kept, gradients zero. For a moment memory holds both."""
        other = FlatWeights(self.layout, owned, self.theta.device)
        for unit in self.layout.units:
            other.values(unit.id).copy_(self.values(unit.id))
        return other

    def shared_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Shared parameters by name, each a view into `theta` whose gradient is a view into `grad`."""
        at = 0
        for name, shape in self.layout.shared_shapes.items():
            size = prod(shape)
            yield name, _leaf(self.theta[at : at + size].view(shape), self.grad[at : at + size].view(shape))
            at += size

    def expert_parameters(self, layer: int) -> tuple[nn.Parameter, nn.Parameter]:
        """One layer's trained experts: gate and up [owned, 2F, width], down [owned, F, width], F the expert width."""
        values = self._expert_matrices(self.theta[self.layout.shared_size :], layer)
        gradients = self._expert_matrices(self.grad[self.layout.shared_size :], layer)
        gate_up, down = (_leaf(value, gradient) for value, gradient in zip(values, gradients, strict=True))
        return gate_up, down

    def frozen_experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's frozen experts, shaped as `expert_parameters`, without gradients."""
        return self._expert_matrices(self.frozen, layer)

    def expert_slots(self) -> Tensor:
        """Place of each expert in the order in which a layer computes them, trained ones first: int64 [experts]."""
        order = torch.tensor([unit.index for unit in (*self.owned, *self.foreign)], device=self.theta.device)
        return order.argsort()

    def _expert_matrices(self, experts: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        m = self.layout.model
        matrices = experts.view(-1, m.layers, 3 * m.expert_width, m.width)[:, layer]
        return matrices[:, : 2 * m.expert_width], matrices[:, 2 * m.expert_width :]


def _places(units: tuple[Unit, ...]) -> dict[str, slice]:
    places, at = {}, 0
    for unit in units:
        places[unit.id] = slice(at, at + unit.size)
        at += unit.size
    return places


def _leaf(values: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return parameter
