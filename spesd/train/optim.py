"""AdamW over units, and the learning rate as a function of the swarm's round."""

from __future__ import annotations

from math import cos, pi

import torch
from torch import Tensor, nn

from spesd.config.manifest import OptimizerConfig
from spesd.model.flat import FlatWeights


def learning_rate(config: OptimizerConfig, round_number: int) -> float:
    """Linear warm-up over `warmup_rounds`, then a cosine to `final_ratio` at `total_rounds`, then flat."""
    if round_number < config.warmup_rounds:
        return config.learning_rate * (round_number + 1) / config.warmup_rounds
    span = max(1, config.total_rounds - config.warmup_rounds)
    done = min(1.0, (round_number - config.warmup_rounds) / span)
    ratio = config.final_ratio + (1 - config.final_ratio) * (1 + cos(pi * done)) / 2
    return config.learning_rate * ratio


def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scale a flat gradient in place to at most `max_norm` and return the norm it had, which may not be finite."""
    norm = torch.linalg.vector_norm(gradient)
    gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


class UnitAdamW:
    """AdamW with one parameter and one learning-rate factor for each trained unit.

    Weight decay applies to everything, norms and embeddings too, as in the authors' code. `factors` scales the learning
    rate of single units (1 for all others).
    """

    def __init__(self, weights: FlatWeights, config: OptimizerConfig) -> None:
        self._config = config
        self.factors: dict[str, float] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._adamw: torch.optim.AdamW
        self.rebind(weights)

    def rebind(self, weights: FlatWeights) -> None:
        """Follow a change of ownership: kept units keep their moments, without a copy; new ones start afresh."""
        kept = {unit_id: self._adamw.state[parameter] for unit_id, parameter in self._parameters.items()}
        self._parameters = {unit.id: nn.Parameter(weights.values(unit.id)) for unit in weights.trained}
        c = self._config
        self._adamw = torch.optim.AdamW(
            [{"params": [parameter]} for parameter in self._parameters.values()],
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            weight_decay=c.weight_decay,
            fused=True,
        )
        for unit_id, parameter in self._parameters.items():
            parameter.grad = weights.gradient(unit_id)
            self._adamw.state[parameter] = kept.get(unit_id) or {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def step(self, rate: float) -> None:
        """Update all trained units in place from their gradients."""
        for unit_id, group in zip(self._parameters, self._adamw.param_groups, strict=True):
            group["lr"] = rate * self.factors.get(unit_id, 1.0)
        self._adamw.step()

    def state(self, unit_id: str) -> dict[str, Tensor]:
        """A unit's `step` (scalar), `exp_avg` and `exp_avg_sq` (fp32 [unit.size]): live, not copies."""
        state: dict[str, Tensor] = self._adamw.state[self._parameters[unit_id]]
        return state
