"""Mixtures of experts and their balance."""

from __future__ import annotations

import nnx
import pytest
import torch
from nnx import MoELinear
from nnx.objectives import ObjectiveContext
from nnx.paradigms import expert_loads, masked_rows, moe_objective, upcycle
from small_models import X, Y, feed_forward, losses, mixture, numbers, training


def dense_loop(layer: MoELinear, x: torch.Tensor) -> torch.Tensor:
    """Every expert on every row, weighted."""
    scores = layer.router(x)
    top, chosen = scores.topk(layer.top_k, dim=-1)
    weights = torch.zeros_like(scores).scatter(1, chosen, top.softmax(-1))
    return sum(weights[:, e, None] * expert(x) for e, expert in enumerate(layer.experts))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_is_the_dense_loop_over_its_experts(top_k):
    layer = MoELinear(6, 5, num_experts=4, top_k=top_k).double()
    x = numbers(1, 30, 6).double()
    torch.testing.assert_close(layer(x), dense_loop(layer, x))
    first = torch.autograd.grad(layer(x).square().sum(), list(layer.router.parameters()))
    second = torch.autograd.grad(
        dense_loop(layer, x).square().sum(), list(layer.router.parameters())
    )
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(layer(x.view(5, 6, 6)), dense_loop(layer, x).view(5, 6, 5))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_balanced_router_has_the_balance_loss_of_1_for_any_k(top_k):
    layer = MoELinear(4, 2, num_experts=4, top_k=top_k)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
    rows = torch.stack([torch.eye(4).roll(shift, 1)[0] * 1.0 for shift in range(4)])
    graded = rows + 0.5 * rows.roll(1, 1) + 0.25 * rows.roll(2, 1)
    layer(graded)
    assert float(layer.last_aux_loss) == pytest.approx(1.0, abs=1e-6)


def test_a_collapsed_router_is_seen_and_its_balance_loss_is_switch_s():
    layer = MoELinear(2, 2, num_experts=4, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
    x = torch.ones(8, 2)
    layer(x)
    p = layer.router(x[0]).softmax(-1)
    assert float(layer.last_aux_loss) == pytest.approx(4 * float(p[2]))
    (gradient,) = torch.autograd.grad(layer.last_aux_loss, layer.router.weight)
    assert float(gradient.abs().sum()) > 0
    assert layer.last_routing.counts.tolist() == [0, 0, 8, 0]


def test_an_expert_without_rows_has_no_gradient():
    layer = MoELinear(2, 2, num_experts=4, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
    layer(torch.ones(8, 2)).sum().backward()
    assert [e.weight.grad is None for e in layer.experts] == [True, True, False, True]
    assert layer(torch.ones(0, 2)).shape == (0, 2)


def test_the_objective_is_the_step_and_names_what_the_experts_do():
    one, other = mixture(), mixture()
    first = one.train(training(), train_step_fn=nnx.moe_train_step_factory(aux_loss_weight=0.05))
    second = other.train(training(), objective=moe_objective(aux_loss_weight=0.05), salt="o")
    assert losses(first) == pytest.approx(losses(second), rel=1e-6)
    metrics = second.idps[0].train_edp.metrics
    assert metrics["moe_max_load"] >= 1.0
    assert 0 <= metrics["moe_entropy"] <= 1.3863
    assert metrics["moe_dead_experts"] in (0, 1, 2)
    assert first.idps[0].train_edp.accuracy == second.idps[0].train_edp.accuracy


def test_a_net_without_mixtures_trains_as_by_its_own_loss():
    one, other = feed_forward(), feed_forward()
    first = one.train(training())
    second = other.train(training(), train_step_fn=nnx.moe_train_step_factory(), salt="moe")
    assert losses(first) == losses(second)


def test_accumulated_windows_weigh_terms_by_their_rows():
    model = mixture()
    objective = moe_objective(aux_loss_weight=0.5)
    result = objective(ObjectiveContext(model, (X[:7], Y[:7]), 0, 0))
    terms = {t.name: t for t in result.terms}
    assert terms["balance"].denominator == 7
    assert terms["balance"].value == pytest.approx(
        float(model.net.layers[0].last_aux_loss.detach())
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts": 1},
        {"num_experts": 4, "top_k": 0},
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 4, "capacity_factor": 0.0},
    ],
)
def test_impossible_mixtures_are_refused(wrong):
    with pytest.raises(ValueError):
        MoELinear(3, 3, **wrong)
    with pytest.raises(ValueError):
        nnx.moe_train_step_factory(aux_loss_weight=-0.1)


def test_the_z_loss_is_the_mean_squared_normalizer_of_the_router():
    model = mixture()
    objective = moe_objective(aux_loss_weight=0.0, z_loss_weight=0.1)
    terms = {t.name: t for t in objective(ObjectiveContext(model, (X[:7], Y[:7]), 0, 0)).terms}
    scores = model.net.layers[0].router(X[:7])
    wanted = scores.exp().sum(1).log().square().mean()
    assert terms["router_z"].value == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert terms["router_z"].weight == 0.1
    with pytest.raises(ValueError):
        moe_objective(z_loss_weight=-1.0)


def test_a_full_expert_drops_what_comes_later_and_says_how_much():
    """First choices come before second ones; an evaluation drops nothing."""
    layer = MoELinear(6, 5, num_experts=3, top_k=2, capacity_factor=0.75).double()
    x = numbers(1, 20, 6).double()
    capacity = 10  # ceil(0.75 * 20 * 2 / 3)
    top, chosen = layer.router(x).topk(2, dim=-1)
    weights, taken, dropped = top.softmax(-1), [0, 0, 0], 0
    wanted = torch.zeros(20, 5).double()
    for choice in range(2):
        for row in range(20):
            expert = int(chosen[row, choice])
            if taken[expert] == capacity:
                dropped += 1
                continue
            taken[expert] += 1
            wanted[row] += weights[row, choice] * layer.experts[expert](x[row])
    assert dropped > 0
    torch.testing.assert_close(layer(x), wanted)
    assert int(layer.last_routing.dropped) == dropped
    assert int(layer.last_routing.counts.sum()) == 40  # what was asked for
    torch.testing.assert_close(layer.eval()(x), dense_loop(layer, x))
    assert int(layer.last_routing.dropped) == 0


def test_a_net_of_limited_experts_is_stored_with_its_limit_and_records_what_it_dropped():
    model = mixture(top_k=1, capacity=0.5)
    state = model.net_params.state()
    assert state["capacity_factor"] == 0.5
    assert "capacity_factor" not in mixture().net_params.state()
    run = model.train(training(), objective=moe_objective())
    assert run.idps[0].train_edp.metrics["moe_dropped"] > 0
    again = nnx.NNModel.from_checkpoint(nnx.NNCheckpoint.load(run.id, "last"))
    assert again.net.layers[0].capacity_factor == 0.5
    with pytest.raises(ValueError, match="capacity_factor"):
        mixture(capacity=-1.0)


def test_padding_goes_to_no_expert_and_counts_nowhere():
    layer = MoELinear(6, 5, num_experts=4, top_k=2)
    x, mask = numbers(1, 3, 4, 6), torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2:] = mask[2, 1:] = False
    alone = layer(x[mask])
    routing, balance = layer.last_routing, float(layer.last_aux_loss.detach())
    for out in (layer(x, mask), _masked(layer, x, mask)):
        torch.testing.assert_close(out[mask], alone)
        assert not out[~mask].any()
        assert torch.equal(layer.last_routing.counts, routing.counts)
        assert layer.last_routing.rows == 7
        assert float(layer.last_aux_loss.detach()) == pytest.approx(balance)
    assert layer.row_mask is None
    assert not layer(x, torch.zeros(3, 4, dtype=torch.bool)).any()
    with pytest.raises(ValueError, match=r"one boolean for each of \(3, 4\) rows"):
        layer(x, mask[0])


def _masked(layer, x, mask):
    with masked_rows(torch.nn.Sequential(layer), mask):
        return layer(x)


def test_the_objective_masks_the_padding_of_a_batch():
    model, mask = mixture(), torch.arange(16) < 9
    objective = moe_objective(row_mask=lambda batch: mask)
    terms = {t.name: t for t in objective(ObjectiveContext(model, (X[:16], Y[:16]), 0, 0)).terms}
    masked = terms["balance"]
    model.net(X[:9])
    wanted = float(model.net.layers[0].last_aux_loss.detach())
    assert masked.denominator == 9
    assert masked.value == pytest.approx(wanted, rel=1e-5)
    loads = expert_loads(model.net)["layers.0"]
    assert sum(loads) == pytest.approx(4.0)


def test_an_upcycled_net_computes_what_the_dense_one_did_and_is_rebuilt():
    model = feed_forward(dropout=0.0)
    before = model.net(X).detach()
    stream = torch.get_rng_state()
    assert upcycle(model, "layers.0", "layers.1", num_experts=4, top_k=2, seed=3) is model
    assert torch.equal(stream, torch.get_rng_state())
    torch.testing.assert_close(model.net(X).detach(), before, rtol=1e-5, atol=1e-6)
    assert float(model.net.layers[0].last_routing.counts.count_nonzero()) > 1
    run = model.train(training(), objective=moe_objective())
    again = nnx.NNModel.from_checkpoint(nnx.NNCheckpoint.load(run.id, "last"))
    assert isinstance(again.net.layers[1], MoELinear)
    assert again.transforms == model.transforms
    torch.testing.assert_close(again.net(X), model.net(X))
    resumed = upcycle(feed_forward(dropout=0.0), "layers.0", "layers.1", num_experts=4)
    params = training(resume_from_run_id=run.id, resume_from_checkpoint="last")
    resumed.train(params, objective=moe_objective())
    drawn = [p.router.weight for p in (upcycled(3).net.layers[0], upcycled(4).net.layers[0])]
    assert not torch.equal(*drawn)


def upcycled(seed):
    return upcycle(feed_forward(), "layers.0", num_experts=4, seed=seed)


def test_what_cannot_be_upcycled_is_refused_and_nothing_changes():
    model = feed_forward()
    for targets, options, match in (
        ((), {"num_experts": 2}, "name at least one"),
        (("layers.9",), {"num_experts": 2}, "'layers.9': it is no nn.Linear of the net"),
        (("layers.0", "layers"), {"num_experts": 2}, "'layers': it is no"),
        (("layers.0",), {"num_experts": 1}, "num_experts"),
        (("layers.0",), {"num_experts": 2, "top_k": 3}, "top_k"),
    ):
        with pytest.raises(ValueError, match=match):
            upcycle(model, *targets, **options)
    assert not model.transforms
    assert not any(isinstance(m, MoELinear) for m in model.net.modules())
