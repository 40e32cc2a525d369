"""From memory to a number of experts."""

from __future__ import annotations

import pytest

from spesd.config.errors import ConfigError
from spesd.config.manifest import ModelConfig
from spesd.config.peer import PeerConfig
from spesd.daemon.budget import experts_to_train, memory_bytes
from spesd.model.units import UnitLayout

LAYOUT = UnitLayout(
    ModelConfig(layers=2, width=64, heads=2, expert_width=64, experts=8, top_k=2, vocabulary=256), shared_shards=2
)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_memory_gives_as_many_experts_as_fit(count: int) -> None:
    gib = memory_bytes(LAYOUT, count) / (1 << 30)
    assert experts_to_train(PeerConfig(memory_gib=gib * 1.0001), LAYOUT) == count


def test_a_trained_expert_costs_twelve_bytes_a_value_more_than_a_frozen_one() -> None:
    assert memory_bytes(LAYOUT, 3) - memory_bytes(LAYOUT, 2) == 12 * LAYOUT.expert_size


def test_too_little_memory_is_told_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="not enough to train one expert"):
        experts_to_train(PeerConfig(memory_gib=1e-6), LAYOUT)


def test_without_a_budget_a_quarter_is_trained_and_never_more_than_there_are() -> None:
    assert experts_to_train(PeerConfig(), LAYOUT) == 2
    assert experts_to_train(PeerConfig(train_experts=99), LAYOUT) == 8
