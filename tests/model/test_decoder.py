"""The whole decoder, and the state that a run begins with."""

import numpy as np
import pytest
import torch
from blake3 import blake3

from spesd.config.manifest import ModelConfig
from spesd.model.flat import FlatWeights
from spesd.model.genesis import initial_state
from spesd.model.transformer import Transformer, rotary_tables, rotate
from spesd.model.units import UnitLayout

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")
MODEL = ModelConfig(layers=2, width=16, heads=2, expert_width=8, experts=4, top_k=2, vocabulary=32, seed=7)


def decoder(owned=("expert-1",), **changes):
    weights = FlatWeights(UnitLayout(MODEL.model_copy(update=changes), 3), owned)
    state = torch.from_numpy(initial_state(weights.layout))
    for unit in weights.layout.units:
        at = weights.layout.offsets[unit.id]
        weights.values(unit.id).copy_(state[at : at + unit.size])
    return weights, Transformer(weights, sequence_length=12)


def test_a_token_sees_only_those_before_it():
    _, model = decoder()
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 32
    torch.testing.assert_close(model(tokens)[0][:, :7], model(changed)[0][:, :7])
    assert not torch.allclose(model(tokens)[0][:, 7:], model(changed)[0][:, 7:])


def test_the_loss_does_not_depend_on_who_owns_what():
    blocks = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(0))
    losses = [decoder(owned)[1].loss(blocks).total.item() for owned in ((), ("expert-0", "expert-3"), ("expert-2",))]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_common_matrices_begin_at_zero_and_fold_into_the_experts():
    blocks = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(0))
    plain_weights, plain = decoder()
    weights, model = decoder(common_expert=True)
    assert model.loss(blocks).total.item() == plain.loss(blocks).total.item()
    for layer in model.layers:
        layer.common.data.normal_(std=0.1)
    for expert in range(4):
        own = plain_weights.values(f"expert-{expert}").view(2, -1)
        for index, layer in enumerate(model.layers):
            own[index] += layer.common.data.flatten()
    assert model.loss(blocks).total.item() == pytest.approx(plain.loss(blocks).total.item(), abs=1e-5)
    assert weights.layout.shared_size == plain_weights.layout.shared_size + weights.layout.expert_size


def test_the_balance_of_a_step_knows_which_experts_are_trained():
    _, model = decoder(("expert-1", "expert-3"))
    balances = model.balances(0.7)
    assert [balance.factors.tolist() for balance in balances] == [pytest.approx([1.0, 0.7, 1.0, 0.7])] * 2
    blocks = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(0))
    whole = model.loss(blocks, model.balances()).total.item()
    assert whole == pytest.approx(model.loss(blocks).total.item(), abs=1e-6)
    for part in blocks.split(1):
        model.loss(part, balances)
    assert [balance.routed.sum().item() for balance in balances] == [2 * 12 * 2] * 2


def test_every_trained_parameter_gets_a_gradient_in_place():
    weights, model = decoder(("expert-0", "expert-1", "expert-2", "expert-3"))
    model.loss(torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(0))).total.backward()
    storage = weights.grad.untyped_storage().data_ptr()
    for name, parameter in model.named_parameters():
        assert parameter.grad.untyped_storage().data_ptr() == storage, name
        assert parameter.grad.any(), name


def test_gradient_of_the_loss_matches_finite_differences():
    """With all experts chosen, since a choice of experts that flips is a jump of the loss."""
    weights, model = decoder(("expert-0", "expert-1", "expert-2", "expert-3"), top_k=4)
    weights.theta.mul_(torch.where(weights.theta == 1, 1, 8))  # larger weights, so that differences rise above rounding
    blocks = torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(0))
    model.loss(blocks).total.backward()
    direction = torch.sign(weights.grad) * (weights.grad.abs() > weights.grad.abs().quantile(0.9))
    values, losses = weights.theta.clone(), []
    for step in (2e-5, -2e-5):
        weights.theta.copy_(values + step * direction)
        with torch.no_grad():
            losses.append(model.loss(blocks).total.double())
    assert ((losses[0] - losses[1]) / 4e-5).item() == pytest.approx((weights.grad * direction).sum().item(), rel=0.05)


def test_rotation_depends_on_distance_alone():
    cos, sin = rotary_tables(MODEL, 20)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    at = [rotate(query, cos[i], sin[i]) @ rotate(key, cos[i - 3], sin[i - 3]) for i in (3, 11, 19)]
    torch.testing.assert_close(torch.stack(at), at[0].expand(3))


def test_bf16_autocast_runs_forward_and_backward():
    weights, model = decoder()
    blocks = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(0))
    exact = model.loss(blocks).total.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(blocks).total
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=0.02)
    assert torch.isfinite(weights.grad).all()


def test_genesis_is_the_same_bits_everywhere():
    """The hash was computed once; a platform that differs would found a run that no other can check."""
    state = initial_state(UnitLayout(MODEL, 3))
    assert state.dtype == np.float32
    digest = blake3(state.astype("<f4").tobytes()).hexdigest()
    assert digest == "6779f78af7794bf50d1ab459e015e660ac1394f835bcdca59dc6c752207cc10f"


def test_genesis_does_not_depend_on_the_shards_but_on_the_seed():
    state = initial_state(UnitLayout(MODEL, 3))
    assert np.array_equal(state, initial_state(UnitLayout(MODEL, 5)))
    other = initial_state(UnitLayout(MODEL.model_copy(update={"seed": 8}), 3))
    assert (state != other).mean() > 0.9


def test_genesis_has_the_wanted_spread_and_unit_norms():
    layout = UnitLayout(MODEL, 3)
    weights, model = decoder()
    assert torch.equal(model.final_norm, torch.ones(16))
    assert torch.equal(model.layers[1].attention.q_norm, torch.ones(16))
    experts = initial_state(layout)[layout.shared_size :]
    assert experts.std() == pytest.approx(MODEL.init_std, rel=0.05)
    assert abs(experts.mean()) < MODEL.init_std / 20
    assert np.abs(experts).max() < MODEL.init_std * 1.7321
    assert len({weights.values(f"expert-{e}").sum().item() for e in range(4)}) == 4
