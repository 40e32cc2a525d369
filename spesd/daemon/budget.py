"""How many experts this machine can train, from what its owner gives."""

from __future__ import annotations

from spesd.config.errors import ConfigError
from spesd.config.peer import PeerConfig
from spesd.model.units import UnitLayout

TRAINED_BYTES = 16
"""Per trained value: weight, gradient and two Adam moments, fp32."""

FROZEN_BYTES = 4
"""Per frozen value: its weight."""

DAEMON_BYTES = 4
"""Per value of the whole model: the daemon's agreed state."""


def memory_bytes(layout: UnitLayout, experts: int) -> int:
    """Static memory of trainer and daemon that train `experts` experts; activations come on top."""
    trained = layout.shared_size + experts * layout.expert_size
    frozen = layout.total_size - trained
    return TRAINED_BYTES * trained + FROZEN_BYTES * frozen + DAEMON_BYTES * layout.total_size


def experts_to_train(config: PeerConfig, layout: UnitLayout) -> int:
    """The budget: as configured, or as many as fit `memory_gib`, or a quarter of all.

    Raises ConfigError when not even one expert fits.
    """
    experts = layout.model.experts
    if config.train_experts is not None:
        return min(config.train_experts, experts)
    if config.memory_gib is None:
        return max(1, experts // 4)
    limit = config.memory_gib * (1 << 30)
    fitting = [count for count in range(1, experts + 1) if memory_bytes(layout, count) <= limit]
    if not fitting:
        needed = memory_bytes(layout, 1) / (1 << 30)
        raise ConfigError(
            f"{config.origin('memory_gib')}: {config.memory_gib:g} GiB are not enough to train one expert of this run, "
            f"{needed:.2f} GiB are needed"
        )
    return fitting[-1]
