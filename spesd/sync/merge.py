"""Expert-merging warm-up: early in training each expert moves a little toward the experts most like it.

Per layer the likeness of two experts is the cosine similarity of their gate matrices. An expert moves by `alpha` times
the difference between the mean of its `top_k` most similar others and itself; all experts move from the same values.
Source: SPES, arXiv 2602.11543, section 3.3, and the authors' server, whose results the tests reproduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spesd.sync.codec import Values

MATRICES = 3
"""Matrices of an expert in each layer of its unit: gate, up, down, of equal size, the gate first."""

Similarity = NDArray[np.float64]


def alpha_at(step: int, start: float, decay_steps: int) -> float:
    """Strength of merging: falls in a straight line from `start` to 0 at `decay_steps`."""
    return start * max(0.0, 1 - step / decay_steps)


def gate_similarity(experts: Sequence[Values], layers: int) -> Similarity:
    """Cosine similarities [layers, E, E] of the gates of E expert units, each [layers * MATRICES * F * H]."""
    gates = np.stack([unit.reshape(layers, MATRICES, -1)[:, 0] for unit in experts], axis=1).astype(np.float64)
    gates /= np.maximum(np.linalg.norm(gates, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    return np.asarray(gates @ gates.swapaxes(-1, -2), np.float64)


def projected_similarity(experts: Sequence[Values], layers: int, dimensions: int, seed: int) -> Similarity:
    """The same from a fixed random projection of the gates to `dimensions` values: an estimate for big experts.

    Each gate value gets a random sign and a random bucket (count sketch, Charikar et al. 2002), which keeps cosines
    up to an error of about `dimensions ** -0.5` at the cost of one pass.
    """
    size = experts[0].size // (layers * MATRICES)
    random = np.random.Generator(np.random.Philox(seed))
    buckets = random.integers(0, dimensions, size)
    signs = random.choice(np.array([-1.0, 1.0]), size)
    sketches = np.empty((layers, len(experts), dimensions))
    for index, unit in enumerate(experts):
        for layer, gate in enumerate(unit.reshape(layers, MATRICES, -1)[:, 0]):
            sketches[layer, index] = np.bincount(buckets, signs * gate, minlength=dimensions)
    sketches /= np.maximum(np.linalg.norm(sketches, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    return np.asarray(sketches @ sketches.swapaxes(-1, -2), np.float64)


def merge_update(expert: int, experts: Sequence[Values], similarity: Similarity, top_k: int, alpha: float) -> Values:
    """What merging adds to one expert unit: float32 of its shape. Ties go to the lower expert."""
    layers = len(similarity)
    rows = [unit.reshape(layers, -1) for unit in experts]
    update = np.empty_like(rows[expert])
    for layer in range(layers):
        order = np.argsort(-similarity[layer, expert], kind="stable")
        donors = [int(other) for other in order if other != expert][:top_k]
        mean = np.mean([rows[other][layer] for other in donors], axis=0, dtype=np.float64)
        update[layer] = alpha * (mean - rows[expert][layer])
    return update.reshape(-1)
