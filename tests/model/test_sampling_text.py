"""Generation: repeatable, greedy at temperature 0, and blind beyond its context."""

from __future__ import annotations

import numpy as np

from spesd.config.manifest import ModelConfig
from spesd.model.genesis import initial_state
from spesd.model.sample import generate
from spesd.model.units import UnitLayout

LAYOUT = UnitLayout(
    ModelConfig(layers=1, width=16, heads=2, expert_width=8, experts=4, top_k=2, vocabulary=256, init_std=0.3), 2
)


def tokens(prompt: list[int], **changes: float) -> list[int]:
    values = initial_state(LAYOUT)
    states = {u.id: values[LAYOUT.offsets[u.id] :][: u.size] for u in LAYOUT.units}
    options = {"context": 8, "count": 12, "temperature": 1.0, "seed": 0} | changes
    return list(generate(LAYOUT, states, np.array(prompt), **options))


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    assert tokens([1, 2, 3]) == tokens([1, 2, 3])
    assert tokens([1, 2, 3]) != tokens([1, 2, 3], seed=1)


def test_temperature_zero_does_not_depend_on_the_seed() -> None:
    assert tokens([5], temperature=0) == tokens([5], temperature=0, seed=9)


def test_only_the_context_counts() -> None:
    assert tokens([7, *range(8)], count=1, temperature=0) == tokens([99, *range(8)], count=1, temperature=0)
