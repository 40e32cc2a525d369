"""Parameters, units and the flat vectors that hold both."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.config.manifest import ModelConfig
from spesd.model.flat import FlatWeights
from spesd.model.transformer import Transformer
from spesd.model.units import UnitLayout


@st.composite
def layouts(draw):
    heads = draw(st.sampled_from([1, 2]))
    experts = draw(st.integers(1, 5))
    model = ModelConfig(
        layers=draw(st.integers(1, 3)),
        width=draw(st.sampled_from([8, 12, 16])) // (2 * heads) * 2 * heads,
        heads=heads,
        expert_width=draw(st.sampled_from([4, 8, 20])),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        vocabulary=draw(st.integers(2, 40)),
    )
    return UnitLayout(model, shared_shards=draw(st.integers(1, 7)))


def all_values(weights):
    return torch.cat([weights.values(unit.id) for unit in weights.layout.units])


@settings(deadline=None, max_examples=40)
@given(layout=layouts(), data=st.data())
def test_every_value_lies_in_exactly_one_unit(layout, data):
    """Values numbered in the units are found once each in parameters; changed there, they change in the units."""
    ids = [unit.id for unit in layout.units if unit.kind == "expert"]
    weights = FlatWeights(layout, data.draw(st.sets(st.sampled_from(ids))))
    for unit in layout.units:
        at = layout.offsets[unit.id]
        weights.values(unit.id).copy_(torch.arange(at, at + unit.size, dtype=torch.float32))
    model = Transformer(weights, sequence_length=8)

    parameters = dict(model.named_parameters())
    shared = torch.cat([parameters[name].flatten() for name in layout.shared_shapes])
    assert torch.equal(shared, torch.arange(layout.shared_size, dtype=torch.float32))
    frozen = [
        model.get_buffer(f"layers.{i}.experts.frozen_{m}")
        for i in range(layout.model.layers)
        for m in ("gate_up", "down")
    ]
    held = torch.cat([tensor.detach().flatten() for tensor in (*parameters.values(), *frozen)])
    assert torch.equal(held.sort().values, torch.arange(layout.total_size, dtype=torch.float32))

    with torch.no_grad():
        for tensor in (*parameters.values(), *frozen):
            tensor.add_(1)
    assert torch.equal(all_values(weights), torch.arange(1, layout.total_size + 1, dtype=torch.float32))


@pytest.fixture
def layout():
    model = ModelConfig(layers=2, width=8, heads=2, expert_width=8, experts=4, top_k=2, vocabulary=16)
    return UnitLayout(model, shared_shards=3)


def test_matrices_lie_where_the_layout_says(layout):
    """An expert's unit is [layers][gate|up|down][expert_width][width]."""
    weights = FlatWeights(layout, ["expert-2"])
    weights.values("expert-2").copy_(torch.arange(layout.expert_size, dtype=torch.float32))
    unit = weights.values("expert-2").view(2, 3, 8, 8)
    gate_up, down = weights.expert_parameters(layer=1)
    assert torch.equal(gate_up[0, :8], unit[1, 0])
    assert torch.equal(gate_up[0, 8:], unit[1, 1])
    assert torch.equal(down[0], unit[1, 2])


def test_values_held_match_the_formula(layout):
    """Trained values are held twice (theta, grad; the moments are the optimizer's), frozen ones once, nothing more."""
    weights = FlatWeights(layout, ["expert-0", "expert-3"])
    model = Transformer(weights, sequence_length=8)
    shared = sum(prod(shape) for shape in layout.shared_shapes.values())
    assert weights.theta.numel() == weights.grad.numel() == shared + 2 * layout.expert_size
    assert weights.frozen.numel() == 2 * layout.expert_size
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert storages == {weights.theta.untyped_storage().data_ptr()}
    assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == {
        weights.grad.untyped_storage().data_ptr()
    }


def test_change_of_ownership_keeps_every_value(layout):
    weights = FlatWeights(layout, ["expert-0", "expert-3"])
    for unit in layout.units:
        weights.values(unit.id).normal_()
    other = weights.with_owned(["expert-1"])
    assert torch.equal(all_values(weights), all_values(other))
    assert [unit.id for unit in other.owned] == ["expert-1"]
    assert not other.grad.any()


@pytest.mark.parametrize("unit_id", ["expert-4", "shared-0", "nonsense"])
def test_owning_what_is_no_expert_is_refused(layout, unit_id):
    with pytest.raises(ValueError, match=unit_id):
        FlatWeights(layout, [unit_id])


def test_a_frozen_unit_has_no_gradient(layout):
    with pytest.raises(KeyError):
        FlatWeights(layout, ["expert-0"]).gradient("expert-1")
