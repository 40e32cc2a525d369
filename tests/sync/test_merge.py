"""Expert merging against the answers of the authors' server.

That server walks, for each expert, a Python *set* of parameter names, and adds the donors' matrices in the order in
which their own sets come. All three matrices have the same shape, so nothing stops it from adding a donor's gate to
an up matrix; which goes where follows from the string hashes of that one process. Ours matches matrices by name. To
compare all else, `ORDERS` says in which order the sets came when the vectors were made (recovered from the vectors by
least squares: with it every value agrees to 1e-5, and the same orders explain all files).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spesd.sync.codec import Values
from spesd.sync.merge import MATRICES, alpha_at, gate_similarity, merge_update, projected_similarity

VECTORS = Path(__file__).parent / "vectors"
META = json.loads((VECTORS / "meta.json").read_text())
LAYERS, EXPERTS = META["layers"], META["experts"]
NAMES = ("w1", "v1", "w2")

ORDERS = (
    ("w1 v1 w2", "w1 v1 w2", "w1 w2 v1", "v1 w1 w2", "w2 v1 w1", "w1 v1 w2", "w2 v1 w1", "v1 w2 w1"),
    ("w1 v1 w2", "v1 w2 w1", "w1 w2 v1", "v1 w1 w2", "v1 w2 w1", "w2 v1 w1", "w2 v1 w1", "w2 v1 w1"),
)
"""For each layer and expert the matrices in the order of the server's sets."""


def units(name: str) -> list[Values]:
    """The experts of a vector file as units: [layers][gate, up, down][ffn_hidden, d_model]."""
    tensors = load_file(VECTORS / f"{name}.safetensors")
    key = "transformer.blocks.{}.ffn.experts.mlp.expert_{}.{}"
    return [
        np.concatenate([tensors[key.format(layer, w, expert)].ravel() for layer in range(LAYERS) for w in NAMES])
        for expert in range(EXPERTS)
    ]


def reorder(unit: Values, expert: int, *, back: bool = False) -> Values:
    """Put a unit's matrices into the order of the server's sets, or back."""
    result = np.empty_like(unit).reshape(LAYERS, MATRICES, -1)
    for layer, matrices in enumerate(unit.reshape(LAYERS, MATRICES, -1)):
        order = [NAMES.index(name) for name in ORDERS[layer][expert].split()]
        result[layer] = matrices[np.argsort(order) if back else order]
    return result.reshape(-1)


SCHEDULE = [
    (f"merged_step{step}", META["topk"], alpha_at(step, META["merge_alpha_start"], META["merge_decay_steps"]))
    for step in (20, 60, 100)
]


@pytest.mark.parametrize(("name", "top_k", "alpha"), [*SCHEDULE, ("merged_top2_alpha0.1", 2, 0.1)])
def test_merging_reproduces_the_authors_server(name: str, top_k: int, alpha: float) -> None:
    before, after = units("aggregated"), units(name)
    as_server = [reorder(unit, expert) for expert, unit in enumerate(before)]
    for expert in range(EXPERTS):
        similarity = gate_similarity(expert, before, LAYERS)
        update = merge_update(expert, as_server, similarity, top_k, alpha)
        np.testing.assert_allclose(before[expert] + reorder(update, expert, back=True), after[expert], atol=1e-5)


def test_a_matrix_moves_toward_the_same_matrix_of_its_donors() -> None:
    before = units("aggregated")
    similarity = gate_similarity(0, before, LAYERS)
    update = merge_update(0, before, similarity, 1, 1.0).reshape(LAYERS, MATRICES, -1)
    for layer in range(LAYERS):
        donor = max(range(1, EXPERTS), key=lambda other: similarity[layer, other])
        moved = before[0].reshape(LAYERS, MATRICES, -1)[layer] + update[layer]
        np.testing.assert_allclose(moved, before[donor].reshape(LAYERS, MATRICES, -1)[layer], atol=1e-5)


def test_strength_falls_to_nothing_and_stays_there() -> None:
    assert [alpha_at(step, 0.05, 100) for step in (0, 20, 60, 100, 200)] == pytest.approx([0.05, 0.04, 0.02, 0, 0])


def test_projected_similarities_estimate_the_exact_ones() -> None:
    random = np.random.default_rng(0)
    common = random.standard_normal(2 * 3 * 4000)
    experts = [(share * common + random.standard_normal(common.size)).astype(np.float32) for share in (0, 1, 2, 4)]
    exact, estimate = gate_similarity(3, experts, 2), projected_similarity(3, experts, 2, dimensions=1024)
    np.testing.assert_allclose(estimate, exact, atol=5 * 1024**-0.5)
    assert (np.argsort(-estimate) == np.argsort(-exact)).all()
