"""AdamW over units, the learning rate, and moments on disk."""

import math

import pytest
import torch

from spesd.config.manifest import ModelConfig, OptimizerConfig
from spesd.model.flat import FlatWeights
from spesd.model.units import UnitLayout
from spesd.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from spesd.train.optim import UnitAdamW, balance_factor, clip_gradient, learning_rate

LAYOUT = UnitLayout(ModelConfig(layers=1, width=8, heads=2, expert_width=8, experts=3, top_k=1, vocabulary=8), 2)
CONFIG = OptimizerConfig(learning_rate=0.1, warmup_rounds=4, total_rounds=14, sequences=1, weight_decay=0.1)
LAST = CONFIG.total_rounds  # the learning rate is 0.01 from here on


def trained(steps=2, owned=("expert-0", "expert-1")):
    weights = FlatWeights(LAYOUT, owned)
    generator = torch.Generator().manual_seed(0)
    weights.theta.normal_(generator=generator)
    optimizer = UnitAdamW(weights, CONFIG)
    for _ in range(steps):
        weights.grad.normal_(generator=generator)
        optimizer.step(LAST)
    return weights, optimizer


def test_learning_rate_follows_the_round():
    rates = [learning_rate(CONFIG, number) for number in range(20)]
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates[9] == pytest.approx(0.055)
    assert rates[14:] == pytest.approx([0.01] * 6)
    assert rates[4:15] == sorted(rates[4:15], reverse=True)


def test_clipping_bounds_the_norm_and_leaves_small_gradients_alone():
    gradient = torch.tensor([3.0, 4.0])
    assert clip_gradient(gradient, 1.0) == pytest.approx(5.0)
    assert gradient.norm().item() == pytest.approx(1.0, rel=1e-5)
    small = torch.tensor([0.3, 0.4])
    clip_gradient(small, 1.0)
    assert small.tolist() == pytest.approx([0.3, 0.4])
    assert not math.isfinite(clip_gradient(torch.tensor([1.0, math.nan]), 1.0))


def test_units_step_as_one_vector_would():
    weights, _ = trained(steps=0)
    whole = torch.nn.Parameter(weights.theta.clone())
    adamw = torch.optim.AdamW([whole], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = UnitAdamW(weights, CONFIG)
    for _ in range(3):
        weights.grad.normal_()
        whole.grad = weights.grad.clone()
        optimizer.step(LAST)
        adamw.step()
    torch.testing.assert_close(weights.theta, whole.data)


def test_experts_may_have_a_learning_rate_of_their_own():
    weights, _ = trained(steps=0)
    before = {unit.id: weights.values(unit.id).clone() for unit in weights.trained}
    optimizer = UnitAdamW(weights, CONFIG.model_copy(update={"expert_rate": 0.5, "weight_decay": 0.0}))
    weights.grad.fill_(1.0)
    optimizer.step(LAST)
    moved = {unit: (old - weights.values(unit)).mean().item() for unit, old in before.items()}
    assert moved == pytest.approx({"shared-0": 0.01, "shared-1": 0.01, "expert-0": 0.005, "expert-1": 0.005}, rel=1e-3)


def test_a_fresh_owner_s_expert_warms_up_and_a_kept_or_restored_one_does_not(tmp_path):
    config = CONFIG.model_copy(update={"owner_warmup_steps": 4})
    weights, _ = trained(steps=0)
    optimizer = UnitAdamW(weights, config)
    factors = []
    for _ in range(5):
        factors.append(optimizer.factor("expert-1", LAST))
        optimizer.step(LAST)
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert optimizer.factor("shared-0", LAST) == 1.0
    optimizer.rebind(weights.with_owned(["expert-1", "expert-2"]))
    assert [optimizer.factor(unit, LAST) for unit in ("expert-1", "expert-2")] == [1.0, 0.25]
    save_checkpoint(tmp_path / "c", optimizer, weights.with_owned(["expert-1"]).trained, "run", 1, 1)
    fresh = UnitAdamW(weights, config)
    load_checkpoint(tmp_path / "c", fresh, weights.trained, "run")
    assert [fresh.factor(unit, LAST) for unit in ("expert-0", "expert-1")] == [0.25, 1.0]


def test_a_run_that_warms_up_does_not_warm_its_experts_up_twice():
    weights, _ = trained(steps=0)
    optimizer = UnitAdamW(weights, CONFIG.model_copy(update={"owner_warmup_steps": 8}))
    rates = []
    for round_number in (0, 0, 1, 1, 2, 2, 3, 3, 4):  # two steps a round, warm after 4 rounds or 8 steps
        rates.append(learning_rate(CONFIG, round_number) * optimizer.factor("expert-0", round_number))
        optimizer.step(round_number)
    assert rates == pytest.approx([0.1 * step / 8 for step in range(1, 9)] + [0.1])
    assert all(rate <= learning_rate(CONFIG, number // 2) + 1e-9 for number, rate in enumerate(rates))


def test_the_weight_of_trained_experts_in_the_balance_rises_over_a_fifth_of_the_run():
    config = CONFIG.model_copy(update={"balance_start": 0.7, "total_rounds": 50})
    factors = [balance_factor(config, number) for number in (0, 5, 10, 40)]
    assert factors == pytest.approx([0.7, 0.85, 1.0, 1.0])
    assert balance_factor(CONFIG, 0) == 1.0


def test_moments_of_kept_units_survive_a_change_of_ownership():
    weights, optimizer = trained()
    kept = {unit: optimizer.state(unit)["exp_avg"].clone() for unit in ("shared-0", "shared-1", "expert-1")}
    optimizer.rebind(weights.with_owned(["expert-1", "expert-2"]))
    for unit, moment in kept.items():
        assert torch.equal(optimizer.state(unit)["exp_avg"], moment)
        assert optimizer.state(unit)["step"] == 2
    assert not optimizer.state("expert-2")["exp_avg_sq"].any()
    assert optimizer.state("expert-2")["step"] == 0


def test_moments_come_back_from_disk(tmp_path):
    weights, optimizer = trained()
    save_checkpoint(tmp_path / "c", optimizer, weights.trained, "run", 7, 123)
    others, fresh = trained(steps=0, owned=("expert-1", "expert-2"))
    info = load_checkpoint(tmp_path / "c", fresh, others.trained, "run")
    assert (info.round, info.position) == (7, 123)
    for unit in ("shared-0", "shared-1", "expert-1"):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(fresh.state(unit)[name], optimizer.state(unit)[name])
    assert fresh.state("expert-2")["step"] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def damage(kind, path):
    content = bytearray(path.read_bytes())
    match kind:
        case "missing":
            return path.unlink()
        case "cut":
            del content[len(content) // 2 :]
        case "flipped":
            content[-1] ^= 1
        case "garbage":
            content = bytearray(b"\xff" * 100)
        case "empty":
            content = bytearray()
    return path.write_bytes(content)


@pytest.mark.parametrize("kind", ["missing", "cut", "flipped", "garbage", "empty"])
def test_a_damaged_checkpoint_touches_no_moment(tmp_path, kind):
    path = tmp_path / "c"
    weights, optimizer = trained()
    save_checkpoint(path, optimizer, weights.trained, "run", 7, 123)
    damage(kind, path)
    others, fresh = trained(steps=0)
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path, fresh, others.trained, "run")
    assert not any(fresh.state(unit.id)["exp_avg"].any() for unit in others.trained)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    weights, optimizer = trained()
    save_checkpoint(tmp_path / "c", optimizer, weights.trained, "run", 7, 123)
    with pytest.raises(CheckpointError, match="belongs to run"):
        load_checkpoint(tmp_path / "c", optimizer, weights.trained, "other")
