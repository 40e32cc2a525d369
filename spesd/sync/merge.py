"""Expert-merging warm-up: early in training each expert moves a little toward the experts most like it.

Per layer the likeness of two experts is the cosine similarity of their gate matrices. An expert moves by `alpha` times
the difference between the mean of its `top_k` most similar others and itself; all experts move from the same values.
Source: SPES, arXiv 2602.11543, section 3.3, and the authors' server, whose results the tests reproduce.

With no server, the reducer of an expert works the move into the packet of a merging round, from the agreed states that
it has: the packet is canonical, so all peers take the same move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spesd.config.manifest import MergeConfig
from spesd.sync.codec import Values
from spesd.sync.ledger import UnitId

MATRICES = 3
"""Matrices of an expert in each layer of its unit: gate, up, down, of equal size, the gate first."""

SEED = 20260212
"""Of the random projection; any number does, but all peers may share one."""

Similarity = NDArray[np.float64]


def alpha_at(step: int, start: float, decay_steps: int) -> float:
    """Strength of merging: falls in a straight line from `start` to 0 at `decay_steps`."""
    return start * max(0.0, 1 - step / decay_steps)


def gate_similarity(expert: int, experts: Sequence[Values], layers: int) -> Similarity:
    """Cosine similarity [layers, E] of one expert's gates to those of all E units, each [layers * MATRICES * F * H]."""
    return _cosines(expert, np.stack([_gates(unit, layers).astype(np.float64) for unit in experts], axis=1))


def projected_similarity(expert: int, experts: Sequence[Values], layers: int, dimensions: int) -> Similarity:
    """The same from a fixed random projection of the gates to `dimensions` values: an estimate for big experts.

    Each gate value gets a random sign and a random bucket (count sketch, Charikar et al. 2002), which keeps cosines
    up to an error of about `dimensions ** -0.5` at the cost of one pass.
    """
    random = np.random.Generator(np.random.Philox(SEED))
    size = experts[0].size // (layers * MATRICES)
    buckets = random.integers(0, dimensions, size)
    signs = random.choice(np.array([-1.0, 1.0]), size)
    sketches = np.empty((layers, len(experts), dimensions))
    for index, unit in enumerate(experts):
        for layer, gate in enumerate(_gates(unit, layers)):
            sketches[layer, index] = np.bincount(buckets, signs * gate, minlength=dimensions)
    return _cosines(expert, sketches)


def merge_update(expert: int, experts: Sequence[Values], similarity: Similarity, top_k: int, alpha: float) -> Values:
    """What merging adds to one expert unit: float32 of its shape. Of equally similar experts the lower one counts."""
    layers = len(similarity)
    rows = [unit.reshape(layers, -1) for unit in experts]
    update = np.empty_like(rows[expert])
    for layer in range(layers):
        order = np.argsort(-similarity[layer], kind="stable")
        donors = [int(other) for other in order if other != expert][:top_k]
        mean = np.mean([rows[other][layer] for other in donors], axis=0, dtype=np.float64)
        update[layer] = alpha * (mean - rows[expert][layer])
    return update.reshape(-1)


@dataclass(frozen=True, slots=True)
class Merging:
    """The merging of one run: `experts` are all expert units in index order, of `layers` layers each.

    With `stagger` above 1 experts take turns, and each moves from the states that the others have by then.
    """

    config: MergeConfig
    experts: Sequence[UnitId]
    layers: int
    stagger: int = 1

    def due(self, unit: UnitId, round_: int) -> bool:
        """Whether packets of `unit` in `round_` may hold a merging move: the same answer on every peer."""
        config = self.config
        on = config.interval > 0 and round_ // self.stagger % config.interval == 0 and unit in self.experts
        return on and alpha_at(round_, config.alpha, config.decay_rounds) > 0

    def update(self, unit: UnitId, round_: int, agreed: Mapping[UnitId, Values]) -> Values | None:
        """What the packet of `unit` in `round_` adds for merging; None if it is no merging round, or no expert."""
        config = self.config
        if not self.due(unit, round_) or len(self.experts) < 2 or not agreed.keys() >= set(self.experts):
            return None
        alpha = alpha_at(round_, config.alpha, config.decay_rounds)
        expert, states = self.experts.index(unit), [agreed[name] for name in self.experts]
        if config.projection:
            similarity = projected_similarity(expert, states, self.layers, config.projection)
        else:
            similarity = gate_similarity(expert, states, self.layers)
        return merge_update(expert, states, similarity, config.top_k, alpha)


def _gates(unit: Values, layers: int) -> Values:
    return unit.reshape(layers, MATRICES, -1)[:, 0]


def _cosines(expert: int, vectors: NDArray[np.float64]) -> Similarity:
    """Cosines [layers, E] of `vectors` [layers, E, n] with that of one expert."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    return np.asarray(np.einsum("len,ln->le", unit, unit[:, expert]), np.float64)
