"""The expert layer against a plain loop over tokens and experts."""

import pytest
import torch
import torch.nn.functional as F

from spesd.config.manifest import ModelConfig
from spesd.model.flat import FlatWeights
from spesd.model.moe import Balance, router_losses
from spesd.model.transformer import Transformer
from spesd.model.units import UnitLayout
from spesd_kernels.grouped import grouped_outer_reference

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")


def make(owned, experts=5, top_k=2, renormalise=False, width=8):
    model = ModelConfig(
        layers=1, width=width, heads=2, expert_width=8, experts=experts, top_k=top_k, vocabulary=16,
        renormalise_top_k=renormalise,
    )  # fmt: skip
    weights = FlatWeights(UnitLayout(model, 2), [f"expert-{e}" for e in owned])
    generator = torch.Generator().manual_seed(1)
    for unit in weights.layout.units:
        weights.values(unit.id).normal_(generator=generator)
    return weights, Transformer(weights, 8).layers[0]


def loop(x, router, experts, config):
    """Straight from the definition; `experts` is a list of [3, F, H]."""
    weights, chosen = F.linear(x, router).softmax(-1).topk(config.top_k, dim=-1)
    if config.renormalise_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    out = []
    for token, row_weights, row_chosen in zip(x, weights, chosen, strict=True):
        outputs = []
        for weight, e in zip(row_weights, row_chosen.tolist(), strict=True):
            gate, up, down = experts[e]
            outputs.append(weight * (F.silu(gate @ token) * (up @ token)) @ down)
        out.append(sum(outputs))
    return torch.stack(out)


@pytest.mark.parametrize("owned", [[], [0, 1, 2, 3, 4], [1, 3], [4]])
@pytest.mark.parametrize(
    ("tokens", "top_k", "renormalise"), [(12, 2, False), (12, 2, True), (1, 1, False), (3, 5, False)]
)
def test_values_and_gradients_equal_the_loop(owned, tokens, top_k, renormalise):
    """Whoever owns what; with one token most experts are empty."""
    weights, layer = make(owned, top_k=top_k, renormalise=renormalise)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    upstream = torch.randn(tokens, 8, generator=generator)
    y, _ = layer.experts(x, layer.router)
    y.backward(upstream)

    x2 = x.detach().clone().requires_grad_()
    router = layer.router.detach().clone().requires_grad_()
    experts = [weights.values(f"expert-{e}").clone().view(3, 8, 8).requires_grad_() for e in range(5)]
    expected = loop(x2, router, experts, layer.config)
    expected.backward(upstream)

    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(y, expected, **close)
    torch.testing.assert_close(x.grad, x2.grad, **close)
    torch.testing.assert_close(layer.router.grad, router.grad, **close)
    for e in owned:
        wanted = torch.zeros(3, 8, 8) if experts[e].grad is None else experts[e].grad
        torch.testing.assert_close(weights.gradient(f"expert-{e}").view(3, 8, 8), wanted, **close)


@pytest.mark.parametrize("owned", [[], [1, 3], [0, 1, 2, 3, 4]])
def test_what_experts_have_in_common_is_added_to_each_and_learns_from_all_tokens(owned):
    weights, layer = make(owned)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 8, generator=generator, requires_grad=True)
    common = torch.randn(24, 8, generator=generator, requires_grad=True)
    y, _ = layer.experts(x, layer.router, common)
    y.square().sum().backward()

    x2, common2 = (t.detach().clone().requires_grad_() for t in (x, common))
    router = layer.router.detach().clone().requires_grad_()
    own = [weights.values(f"expert-{e}").clone().view(3, 8, 8).requires_grad_() for e in range(5)]
    expected = loop(x2, router, [matrices + common2.view(3, 8, 8) for matrices in own], layer.config)
    expected.square().sum().backward()

    close = {"atol": 1e-2, "rtol": 1e-4}
    torch.testing.assert_close(y, expected, **close)
    for ours, wanted in ((x, x2), (common, common2), (layer.router, router)):
        torch.testing.assert_close(ours.grad, wanted.grad, **close)
    for e in owned:
        if own[e].grad is not None:
            torch.testing.assert_close(weights.gradient(f"expert-{e}").view(3, 8, 8), own[e].grad, **close)


def test_frozen_experts_have_no_gradient_and_stay():
    weights, layer = make([1])
    before = weights.frozen.clone()
    y, _ = layer.experts(torch.randn(6, 8), layer.router)
    y.sum().backward()
    assert torch.equal(weights.frozen, before)
    assert not weights.frozen.requires_grad
    assert not layer.experts.frozen_gate_up.requires_grad


@pytest.mark.parametrize(("owned", "products"), [([1], 2), ([0, 1, 2, 3, 4], 2), ([], 0)])
def test_weight_gradients_are_computed_for_trained_experts_alone(monkeypatch, owned, products):
    calls = []

    def count(left, right, ends):
        calls.append(len(ends))
        return grouped_outer_reference(left, right, ends)

    monkeypatch.setattr("spesd.model.moe.grouped_outer", count)
    _, layer = make(owned)
    x = torch.randn(20, 8, requires_grad=True)
    layer.experts(x, layer.router)[0].sum().backward()
    assert calls == [len(owned)] * products


def test_backward_keeps_one_input_and_the_hidden_rows_only():
    """Tensors saved per layer: x, gate and up, the routing; views of weights are no copies."""
    weights, layer = make([1, 2])
    own = {weights.theta.untyped_storage().data_ptr(), weights.frozen.untyped_storage().data_ptr()}
    saved = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 64
    x = torch.randn(tokens, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer.experts(x, layer.router)
    rows = tokens * 2
    floats = tokens * 8 + rows * 16
    routing = 4 * tokens * 5 * 4 + 4 * rows * 8
    assert sum(saved.values()) <= 4 * floats + routing + 1024


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients():
    weights, layer = make([0, 2], width=16)
    x = torch.randn(10, 16, requires_grad=True)
    exact, _ = layer.experts(x, layer.router)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer.experts(x, layer.router)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, atol=0.5, rtol=0.1)
    y.float().sum().backward()
    assert layer.experts.gate_up.grad.dtype == torch.float32
    assert weights.gradient("expert-0").any() or weights.gradient("expert-2").any()


def test_balance_is_one_when_balanced_and_experts_when_collapsed():
    logits = torch.zeros(4, 4)
    balanced = router_losses(logits, logits.softmax(-1), torch.arange(4).view(4, 1))
    assert balanced.balance.item() == pytest.approx(1.0)
    assert balanced.z.item() == pytest.approx(torch.tensor(4.0).log().item() ** 2)
    logits = torch.tensor([[50.0, 0, 0, 0]] * 4)
    collapsed = router_losses(logits, logits.softmax(-1), torch.zeros(4, 1, dtype=torch.long))
    assert collapsed.balance.item() == pytest.approx(4.0)


def test_balance_looks_at_the_whole_step_and_weighs_trained_experts():
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    chosen = [part.topk(2).indices for part in logits]
    balance = Balance(torch.zeros(4), torch.tensor([0.7, 1.0, 1.0, 1.0]))
    losses = [
        router_losses(part, part.softmax(-1), rows, balance).balance for part, rows in zip(logits, chosen, strict=True)
    ]
    counts = torch.stack([torch.bincount(rows.flatten(), minlength=4) for rows in chosen])
    assert torch.equal(balance.routed, counts.sum(0).float())
    for index, loss in enumerate(losses):
        share = counts[: index + 1].sum(0) / counts[: index + 1].sum()
        expected = 4 * (balance.factors * share * logits[index].softmax(-1).mean(0)).sum()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def router_gradient(micro_batches: list[torch.Tensor], balance: Balance | None) -> torch.Tensor:
    """Gradient of the mean balance loss of the micro-batches by their logits: [tokens of all, experts]."""
    leaves = [logits.clone().requires_grad_() for logits in micro_batches]
    losses = [router_losses(x, x.softmax(-1), x.topk(2).indices, balance).balance for x in leaves]
    torch.stack(losses).mean().backward()
    return torch.cat([leaf.grad for leaf in leaves])


def test_micro_batches_that_route_alike_balance_as_one_big_batch():
    logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    whole = router_gradient([logits.repeat(4, 1)], None)
    torch.testing.assert_close(router_gradient([logits] * 4, Balance(torch.zeros(8), torch.ones(8))), whole)


def test_any_micro_batches_balance_more_like_one_big_batch_than_each_for_itself():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, 8, generator=generator) + torch.linspace(0, 1, 8) for _ in range(8)]
    whole = router_gradient([torch.cat(parts)], None)
    together, apart = (
        (router_gradient(parts, balance) - whole).norm() / whole.norm()
        for balance in (Balance(torch.zeros(8), torch.ones(8)), None)
    )
    assert together < 0.6 * apart
