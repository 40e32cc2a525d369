"""AdamW over units, and the learning rate as a function of the swarm's round."""

from __future__ import annotations

from math import cos, pi

import torch
from torch import Tensor, nn

from spesd.config.manifest import OptimizerConfig
from spesd.model.flat import FlatWeights


def learning_rate(config: OptimizerConfig, round_number: int) -> float:
    """Linear warm-up over `warmup_rounds`, then a cosine to `final_ratio` at `total_rounds`, then flat."""
    span = max(1, config.total_rounds - config.warmup_rounds)
    done = min(1.0, max(0, round_number - config.warmup_rounds) / span)
    ratio = config.final_ratio + (1 - config.final_ratio) * (1 + cos(pi * done)) / 2
    return config.learning_rate * ratio * run_warmth(config, round_number)


def run_warmth(config: OptimizerConfig, round_number: int) -> float:
    """How far the run's own warm-up is, up to 1."""
    return min(1.0, (round_number + 1) / max(1, config.warmup_rounds))


def balance_factor(config: OptimizerConfig, round_number: int) -> float:
    """Weight of trained experts' terms in the load-balancing loss: from `balance_start` to 1 over a fifth of the run.

    While it is below 1, the router finds it cheaper to send tokens to the experts that learn from them. From the
    authors' code (`spes/decayed_load_balance_loss.py` in github.com/zjr2000/SPES, for arXiv 2602.11543), which weighs
    the same terms alike, by steps where we count rounds.
    """
    done = min(1.0, 5 * round_number / config.total_rounds)
    return config.balance_start + (1 - config.balance_start) * done


def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scale a flat gradient in place to at most `max_norm` and return the norm it had, which may not be finite."""
    norm = torch.linalg.vector_norm(gradient)
    gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


class UnitAdamW:
    """AdamW with one parameter and one learning-rate factor for each trained unit.

    Weight decay applies to everything, norms and embeddings too, as in the authors' code. Experts may have a learning
    rate of their own, and one whose moments are fresh warms up.
    """

    def __init__(self, weights: FlatWeights, config: OptimizerConfig) -> None:
        self._config = config
        self._steps: dict[str, int] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._adamw: torch.optim.AdamW
        self.rebind(weights)

    def rebind(self, weights: FlatWeights) -> None:
        """Follow a change of ownership: kept units keep their moments, without a copy; new ones start afresh."""
        kept = {unit_id: self._adamw.state[parameter] for unit_id, parameter in self._parameters.items()}
        self._steps = {unit.id: self._steps.get(unit.id, 0) for unit in weights.trained}
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

    def step(self, round_number: int) -> None:
        """Update all trained units in place from their gradients, at the learning rate of the round."""
        rate = learning_rate(self._config, round_number)
        for unit_id, group in zip(self._parameters, self._adamw.param_groups, strict=True):
            group["lr"] = rate * self.factor(unit_id, round_number)
            self._steps[unit_id] += 1
        self._adamw.step()

    def factor(self, unit_id: str, round_number: int) -> float:
        """Learning rate of a unit over that of shared parameters.

        While the run itself warms up, an expert is as warm as the less warm of the two: at genesis all moments are
        fresh, and warming up twice would be too slow.
        """
        if not unit_id.startswith("expert"):
            return 1.0
        warmth = (self._steps[unit_id] + 1) / max(1, self._config.owner_warmup_steps)
        return self._config.expert_rate * min(1.0, warmth / run_warmth(self._config, round_number))

    def resume(self, unit_id: str, steps: float) -> None:
        """A unit's moments were restored: they are so many steps old."""
        self._steps[unit_id] = int(steps)
        self.state(unit_id)["step"].fill_(steps)

    def state(self, unit_id: str) -> dict[str, Tensor]:
        """A unit's `step` (scalar), `exp_avg` and `exp_avg_sq` (fp32 [unit.size]): live, not copies."""
        state: dict[str, Tensor] = self._adamw.state[self._parameters[unit_id]]
        return state
