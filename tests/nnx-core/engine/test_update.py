"""The update engine against plain PyTorch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from nnx.engine.update import UpdateEngine
from nnx.engine.window import TermTotals, WindowTotals
from nnx.objectives import LossTerm, ObjectiveResult
from nnx.tasks.losses import supervised_terms
from torch import nn
from torch.nn import functional as F


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    return x, y


def cross_entropy(model, x, y, name="ce", **kwargs):
    valid = int((y != -100).sum())
    return LossTerm(name, F.cross_entropy(model(x), y, reduction="sum"), valid, **kwargs)


def sgd(model, lr=0.1, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


def engine_of(model, **kwargs):
    return UpdateEngine({"default": sgd(model)}, **kwargs)


def run(engine, results, epoch_idx=0):
    return [
        engine.apply(result, epoch_idx=epoch_idx, batch_idx=i, is_last=i + 1 == len(results))
        for i, result in enumerate(results)
    ]


def assert_equal_weights(model, other, **tolerance):
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, **tolerance)


def same_bits(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


EXACT = {"rtol": 1e-5, "atol": 1e-7}


# -- the arithmetic of a window --------------------------------------------------------------


def scalar_engine(accumulate):
    weight = nn.Parameter(torch.zeros(()))
    return weight, UpdateEngine(
        {"default": torch.optim.SGD([weight], lr=1.0)}, accumulate=accumulate
    )


def test_numerators_8_and_1_over_counts_2_and_1_average_to_3():
    weight, engine = scalar_engine(2)
    applied = run(
        engine,
        [ObjectiveResult([LossTerm("t", 8 + 8 * weight, 2)]),
         ObjectiveResult([LossTerm("t", 1 + 1 * weight, 1)])],
    )  # fmt: skip
    assert [a.value for a in applied] == [4.0, 1.0]
    assert [a.committed for a in applied] == [False, True]
    (event,) = applied[1].events
    assert event.losses == {"t": 3.0}
    assert event.loss == 3.0
    assert event.microbatches == 2
    assert weight.item() == -3.0  # (8 + 1) / 3
    assert engine.epoch_loss() == 3.0


def test_as_sums_they_total_9():
    weight, engine = scalar_engine(2)
    applied = run(
        engine,
        [ObjectiveResult([LossTerm("t", 8 + 8 * weight, reduction="sum")]),
         ObjectiveResult([LossTerm("t", 1 + 1 * weight, reduction="sum")])],
    )  # fmt: skip
    assert applied[1].events[0].loss == 9.0
    assert weight.item() == -9.0
    assert engine.epoch_loss() == 9.0


def test_the_epoch_loss_divides_summed_numerators_by_summed_denominators():
    weight, engine = scalar_engine(1)
    for numerator, count in ((8.0, 2), (1.0, 1), (3.0, 3)):
        engine.apply(
            ObjectiveResult([LossTerm("t", numerator + 0 * weight, count, weight=0.5),
                             LossTerm("s", numerator + 0 * weight, reduction="sum")]),
            epoch_idx=0, batch_idx=0, is_last=False,
        )  # fmt: skip
    assert engine.epoch_loss() == 0.5 * 12 / 6 + 12.0
    engine.begin_epoch()
    assert engine.epoch_loss() is None


# -- equal to the full batch -----------------------------------------------------------------


@pytest.mark.parametrize("rows", [[4, 4, 4, 4], [7, 1, 5, 3], [1, 9]])
def test_uneven_microbatches_and_a_short_last_window_take_the_full_batch_update(rows):
    batches = [batch(n, seed) for seed, n in enumerate(rows)]
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=3)
    for index, (x, y) in enumerate(batches):
        engine.apply(
            ObjectiveResult([cross_entropy(model, x, y)]),
            epoch_idx=0, batch_idx=index, is_last=index + 1 == len(batches),
        )  # fmt: skip

    optimizer = sgd(oracle)
    for start in range(0, len(batches), 3):
        window = batches[start : start + 3]
        x, y = (torch.cat(parts) for parts in zip(*window))
        optimizer.zero_grad()
        F.cross_entropy(oracle(x), y).backward()
        optimizer.step()

    assert_equal_weights(model, oracle, **EXACT)
    assert engine.updates == math.ceil(len(rows) / 3)


def test_ignored_targets_take_the_full_batch_update():
    first, second = batch(6, 1), batch(4, 2)
    first[1][:5] = -100
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=2)
    for index, (x, y) in enumerate((first, second)):
        engine.apply(
            ObjectiveResult([cross_entropy(model, x, y)]),
            epoch_idx=0, batch_idx=index, is_last=False,
        )  # fmt: skip
    optimizer = sgd(oracle)
    x, y = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    F.cross_entropy(oracle(x), y).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


def test_terms_of_unequal_denominators_each_take_their_own_mean():
    batches = [batch(n, seed) for seed, n in enumerate((5, 2, 8))]
    masks = [torch.rand(n, generator=torch.Generator().manual_seed(n)) > 0.4 for n in (5, 2, 8)]

    def parts(model, x, y, mask):
        logits = model(x)
        return (
            F.cross_entropy(logits, y, reduction="sum"),
            (logits[mask] ** 2).sum(),
            logits.abs().sum(),
        )

    model, oracle = net(), net()
    engine = engine_of(model, accumulate=3)
    for index, ((x, y), mask) in enumerate(zip(batches, masks)):
        supervised, penalty, total = parts(model, x, y, mask)
        applied = engine.apply(
            ObjectiveResult([
                LossTerm("supervised", supervised, len(y), weight=0.7),
                LossTerm("penalty", penalty, int(mask.sum()), weight=0.3),
                LossTerm("total", total, reduction="sum", weight=0.01),
            ]),
            epoch_idx=0, batch_idx=index, is_last=False,
        )  # fmt: skip

    optimizer = sgd(oracle)
    x, y = (torch.cat(parts) for parts in zip(*batches))
    mask = torch.cat(masks)
    supervised, penalty, total = parts(oracle, x, y, mask)
    loss = 0.7 * supervised / len(y) + 0.3 * penalty / int(mask.sum()) + 0.01 * total
    loss.backward()
    optimizer.step()

    assert_equal_weights(model, oracle, **EXACT)
    assert applied.events[0].loss == pytest.approx(loss.item(), rel=1e-6)
    assert set(applied.events[0].losses) == {"supervised", "penalty", "total"}


def test_a_term_may_come_and_go_within_a_window():
    (x1, y1), (x2, y2) = batch(3, 1), batch(5, 2)
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=3)
    run(
        engine,
        [ObjectiveResult([cross_entropy(model, x1, y1, "a")]),
         ObjectiveResult([cross_entropy(model, x2, y2, "b", weight=2.0)]),
         ObjectiveResult([cross_entropy(model, x2, y2, "a")])],
    )  # fmt: skip
    optimizer = sgd(oracle)
    a = F.cross_entropy(oracle(torch.cat([x1, x2])), torch.cat([y1, y2]))
    (a + 2 * F.cross_entropy(oracle(x2), y2)).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


def test_a_weight_that_changes_within_a_window_weighs_each_numerator():
    weight, engine = scalar_engine(2)
    run(
        engine,
        [ObjectiveResult([LossTerm("t", 8 * weight + 8, 2, weight=2.0)]),
         ObjectiveResult([LossTerm("t", 2 * weight + 2, 2, weight=0.5)])],
    )  # fmt: skip
    assert weight.item() == -(2.0 * 8 + 0.5 * 2) / 4


# -- how it is computed ----------------------------------------------------------------------


class CountingBackward:
    """Counts passes through a shared part of the graph."""

    def __init__(self, model):
        self.passes = 0
        model[0].register_forward_hook(self._watch)

    def _watch(self, _module, _inputs, output):
        output.register_hook(self._count)

    def _count(self, _gradient):
        self.passes += 1


def two_terms(model, x, y, second_weight=1.0):
    logits = model(x)
    return ObjectiveResult([
        LossTerm("ce", F.cross_entropy(logits, y, reduction="sum"), len(y)),
        LossTerm("l2", logits.square().sum(), len(y), weight=second_weight),
    ])  # fmt: skip


def test_a_window_of_one_microbatch_takes_one_backward_pass():
    model, (x, y) = net(), batch(4, 0)
    counter = CountingBackward(model)
    engine_of(model).apply(two_terms(model, x, y), epoch_idx=0, batch_idx=0, is_last=False)
    assert counter.passes == 1
    # also a window that the end of the epoch makes one microbatch long
    engine_of(model, accumulate=4).apply(
        two_terms(model, x, y), epoch_idx=0, batch_idx=0, is_last=True
    )
    assert counter.passes == 2


def test_a_longer_window_takes_one_pass_per_term():
    model, (x, y) = net(), batch(4, 0)
    counter = CountingBackward(model)
    engine_of(model, accumulate=2).apply(
        two_terms(model, x, y), epoch_idx=0, batch_idx=0, is_last=False
    )
    assert counter.passes == 2


def test_a_term_of_weight_0_is_reported_and_never_back_propagated():
    model, (x, y) = net(), batch(4, 0)
    counter = CountingBackward(model)
    poison = torch.tensor(float("inf"), requires_grad=True)
    engine = engine_of(model, accumulate=2)
    for last in (False, True):
        applied = engine.apply(
            ObjectiveResult([cross_entropy(model, x, y), LossTerm("off", poison * 1.0, 4, weight=0.0)]),
            epoch_idx=0, batch_idx=0, is_last=last,
        )  # fmt: skip
    assert counter.passes == 2
    assert poison.grad is None
    assert math.isfinite(applied.value)
    assert applied.events[0].losses["off"] == math.inf
    assert math.isfinite(applied.events[0].loss)


def test_only_parameters_that_an_optimizer_owns_and_that_require_gradients_are_differentiated():
    model, (x, y) = net(), batch(4, 0)
    model[2].weight.requires_grad_(False)
    temperature = nn.Parameter(torch.tensor(2.0))
    engine = UpdateEngine({"head": torch.optim.SGD([*model[2].parameters()], lr=0.1)})
    before = copy.deepcopy(model)
    engine.apply(
        ObjectiveResult([LossTerm("ce", F.cross_entropy(model(x) / temperature, y), 1)]),
        epoch_idx=0, batch_idx=0, is_last=False,
    )  # fmt: skip
    assert temperature.grad is None
    assert model[0].weight.grad is None
    assert model[2].weight.grad is None
    assert torch.equal(model[2].weight, before[2].weight)
    assert not torch.equal(model[2].bias, before[2].bias)


def test_freezing_and_unfreezing_between_epochs_trains_like_a_plain_loop():
    model, oracle = net(), net()
    engine, optimizer = engine_of(model, accumulate=2), sgd(oracle)
    batches = [batch(4, s) for s in range(4)]
    for epoch in range(3):
        for m in (model, oracle):
            m[0].requires_grad_(epoch != 1)
        engine.begin_epoch()
        for index, (x, y) in enumerate(batches):
            engine.apply(
                ObjectiveResult([cross_entropy(model, x, y)]),
                epoch_idx=epoch, batch_idx=index, is_last=index == 3,
            )  # fmt: skip
        for start in (0, 2):
            x, y = (torch.cat(parts) for parts in zip(*batches[start : start + 2]))
            optimizer.zero_grad()
            F.cross_entropy(oracle(x), y).backward()
            optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


def test_a_parameter_group_added_between_windows_is_owned_from_then_on():
    model, (x, y) = net(), batch(4, 0)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    engine = UpdateEngine({"default": optimizer})
    first = model[0].weight.clone()
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    assert torch.equal(model[0].weight, first)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=1, is_last=False
    )
    assert not torch.equal(model[0].weight, first)


def test_sparse_gradients_accumulate_too():
    embedding = nn.Embedding(10, 3, sparse=True)
    oracle = copy.deepcopy(embedding)
    engine = UpdateEngine({"default": sgd(embedding)}, accumulate=2)
    ids = [torch.tensor([1, 2, 2]), torch.tensor([2, 5])]
    for index, i in enumerate(ids):
        engine.apply(
            ObjectiveResult([LossTerm("t", embedding(i).square().sum(), len(i)),
                             LossTerm("u", embedding(i).sum(), len(i))]),
            epoch_idx=0, batch_idx=index, is_last=False,
        )  # fmt: skip
    optimizer = sgd(oracle)
    out = oracle(torch.cat(ids))
    ((out.square().sum() + out.sum()) / 5).backward()
    optimizer.step()
    torch.testing.assert_close(embedding.weight, oracle.weight)


def test_gradients_stay_readable_after_a_commit_and_are_cleared_at_the_next_window():
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model)
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    assert model[0].weight.grad is not None
    engine.apply(ObjectiveResult([]), epoch_idx=0, batch_idx=1, is_last=False)
    assert model[0].weight.grad is None


# -- masked windows --------------------------------------------------------------------------


def test_a_fully_masked_window_takes_no_update_and_fires_no_event():
    model = net()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    engine = UpdateEngine({"default": optimizer}, accumulate=2)
    x, y = batch(4, 0)
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=True
    )
    before = copy.deepcopy(model)
    masked = torch.full_like(y, -100)
    applied = run(engine, [ObjectiveResult([cross_entropy(model, x, masked)]), ObjectiveResult([])])
    assert [a.value for a in applied] == [None, None]
    assert applied[1].closed
    assert not applied[1].committed
    assert applied[1].events == ()
    assert engine.updates == 1
    assert same_bits(model, before)


def test_a_masked_microbatch_adds_nothing_to_its_window():
    x, y = batch(4, 0)
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=2)
    nan_mean = F.cross_entropy(model(x), torch.full_like(y, -100))  # 0 / 0
    run(
        engine,
        [
            ObjectiveResult([LossTerm("ce", nan_mean, 0)]),
            ObjectiveResult([cross_entropy(model, x, y)]),
        ],
    )
    optimizer = sgd(oracle)
    F.cross_entropy(oracle(x), y).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


def test_the_loss_of_a_masked_term_is_left_out_of_the_event():
    weight, engine = scalar_engine(1)
    applied = engine.apply(
        ObjectiveResult([LossTerm("on", 2 * weight + 2, 1), LossTerm("off", 0 * weight, 0)]),
        epoch_idx=3, batch_idx=5, is_last=False,
    )  # fmt: skip
    (event,) = applied.events
    assert event.losses == {"on": 2.0}
    assert (event.optimizer, event.update_idx, event.epoch_idx, event.batch_idx) == (
        "default",
        1,
        3,
        5,
    )


# -- non-finite ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fail_raises_before_anything_is_stepped(bad):
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model, accumulate=2)
    before = copy.deepcopy(model)
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=1, batch_idx=0, is_last=False
    )
    term = LossTerm("ce", F.cross_entropy(model(x), y, reduction="sum") * bad, 4)
    with pytest.raises(
        FloatingPointError, match=r"loss term 'ce' is (nan|inf) at epoch 1, batch 7"
    ):
        engine.apply(ObjectiveResult([term]), epoch_idx=1, batch_idx=7, is_last=False)
    assert same_bits(model, before)
    assert all(p.grad is None for p in model.parameters())
    assert engine.updates == 0


def test_fail_names_a_parameter_whose_gradient_is_not_finite():
    weight = nn.Parameter(torch.zeros(2))
    engine = UpdateEngine({"G": torch.optim.SGD([weight], lr=0.1)})
    with pytest.raises(FloatingPointError, match=r"optimizer 'G', parameter 0, shape \(2,\)"):
        engine.apply(
            ObjectiveResult([LossTerm("t", weight.sum().sqrt(), 1)]),
            epoch_idx=0, batch_idx=0, is_last=False,
        )  # fmt: skip
    assert torch.equal(weight, torch.zeros(2))
    assert weight.grad is None


def test_skip_drops_the_whole_window_and_leaves_it_out_of_the_epoch_loss():
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model, accumulate=2, nonfinite="skip")
    before = copy.deepcopy(model)
    bad = LossTerm("ce", F.cross_entropy(model(x), y) * math.nan, 4)
    applied = run(engine, [ObjectiveResult([cross_entropy(model, x, y)]), ObjectiveResult([bad])])
    assert applied[1].closed
    assert not applied[1].committed
    assert same_bits(model, before)
    assert math.isnan(engine.epoch_loss())  # every window dropped

    good = F.cross_entropy(model(x), y).item()
    run(engine, [ObjectiveResult([cross_entropy(model, x, y)])])
    assert engine.epoch_loss() == pytest.approx(good)
    assert engine.updates == 1


def test_skip_drops_a_window_whose_gradient_is_not_finite():
    weight = nn.Parameter(torch.zeros(2))
    engine = UpdateEngine({"G": torch.optim.SGD([weight], lr=0.1)}, nonfinite="skip")
    applied = engine.apply(
        ObjectiveResult([LossTerm("t", weight.sum().sqrt(), 1)]),
        epoch_idx=0, batch_idx=0, is_last=False,
    )  # fmt: skip
    assert not applied.committed
    assert torch.equal(weight, torch.zeros(2))
    assert math.isnan(engine.epoch_loss())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"nonfinite must be one of fail, skip"):
        UpdateEngine({}, nonfinite="ignore")


# -- refusals --------------------------------------------------------------------------------


def test_a_term_that_switches_its_reduction_within_a_window_fails():
    weight, engine = scalar_engine(2)
    engine.apply(
        ObjectiveResult([LossTerm("t", 2 * weight, 1)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    with pytest.raises(
        ValueError, match="'t' is reduced by 'sum' after 'mean' in one update window"
    ):
        engine.apply(
            ObjectiveResult([LossTerm("t", 2 * weight, reduction="sum")]),
            epoch_idx=0, batch_idx=1, is_last=False,
        )  # fmt: skip
    assert weight.grad is None
    # the next window may reduce differently
    engine.apply(
        ObjectiveResult([LossTerm("t", 2 * weight, reduction="sum")]),
        epoch_idx=0, batch_idx=2, is_last=True,
    )  # fmt: skip
    assert engine.updates == 1


def test_a_detached_objective_is_refused():
    _, engine = scalar_engine(1)
    with pytest.raises(RuntimeError, match=r"no loss term depends on a parameter.*terms: t"):
        engine.apply(
            ObjectiveResult([LossTerm("t", torch.tensor(1.0), 1)]),
            epoch_idx=0, batch_idx=0, is_last=False,
        )  # fmt: skip


# -- several optimizers ----------------------------------------------------------------------


def test_every_optimizer_with_gradients_steps_once_with_its_own_clip():
    left, right, idle = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    engine = UpdateEngine(
        {"a": torch.optim.SGD([left], lr=1.0),
         "b": torch.optim.SGD([right], lr=1.0),
         "idle": torch.optim.SGD([idle], lr=1.0, weight_decay=0.5)},
        clip_norms={"a": 1.0, "b": None},
    )  # fmt: skip
    slope = torch.tensor([3.0, 4.0])
    applied = engine.apply(
        ObjectiveResult([LossTerm("t", (left * slope).sum() + (right * slope).sum(), 1)]),
        epoch_idx=0, batch_idx=0, is_last=False,
    )  # fmt: skip
    assert [event.optimizer for event in applied.events] == ["a", "b"]
    torch.testing.assert_close(left.data, -slope / 5, rtol=1e-5, atol=1e-6)
    assert torch.equal(right.data, -slope)
    assert engine.update_counts == {"a": 1, "b": 1, "idle": 0}
    assert engine.updates == 1


def test_clipping_acts_on_the_accumulated_gradient():
    batches = [batch(3, 1), batch(5, 2)]
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=2, clip_norms={"default": 0.05})
    run(engine, [ObjectiveResult([cross_entropy(model, x, y)]) for x, y in batches])
    optimizer = sgd(oracle)
    x, y = (torch.cat(parts) for parts in zip(*batches))
    F.cross_entropy(oracle(x), y).backward()
    torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


# -- mixed precision -------------------------------------------------------------------------


def cpu_scaler(scale=2.0**10):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_a_scaled_window_equals_the_hand_written_scaler_loop_bit_for_bit():
    model, oracle = net(), net()
    engine = UpdateEngine(
        {"default": torch.optim.Adam(model.parameters(), lr=0.01)},
        scaler=cpu_scaler(), clip_norms={"default": 0.5},
    )  # fmt: skip
    optimizer, scaler = torch.optim.Adam(oracle.parameters(), lr=0.01), cpu_scaler()
    for step in range(4):
        x, y = batch(8, step)
        engine.apply_supervised(
            supervised_terms(nn.CrossEntropyLoss(), None, model(x), y),
            epoch_idx=0, batch_idx=step, is_last=False,
        )  # fmt: skip
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(oracle(x), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert same_bits(model, oracle)
    assert engine.scaler.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("nonfinite", ["fail", "skip"])
def test_an_overflow_under_the_scaler_is_a_quiet_skip_of_every_optimizer(nonfinite):
    fine, overflowing = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    engine = UpdateEngine(
        {"a": torch.optim.SGD([fine], lr=0.1), "b": torch.optim.SGD([overflowing], lr=0.1)},
        scaler=cpu_scaler(2.0**16), nonfinite=nonfinite,
    )  # fmt: skip

    def result(slope):
        return ObjectiveResult([LossTerm("t", fine.sum() + (overflowing * slope).sum(), 1)])

    applied = engine.apply(result(1e36), epoch_idx=0, batch_idx=0, is_last=False)
    assert not applied.committed
    assert applied.events == ()
    assert engine.updates == 0
    assert torch.equal(fine, torch.ones(2))
    assert engine.scaler.get_scale() == 2.0**15  # backed off
    assert fine.grad is None

    applied = engine.apply(result(1.0), epoch_idx=0, batch_idx=1, is_last=False)
    assert [event.optimizer for event in applied.events] == ["a", "b"]
    assert torch.allclose(fine, torch.full((2,), 0.9))
    assert engine.scaler.get_scale() == 2.0**15


def test_a_fused_optimizer_is_not_stepped_by_an_overflow():
    weight = nn.Parameter(torch.ones(2))
    engine = UpdateEngine(
        {"default": torch.optim.Adam([weight], lr=0.1, fused=True)}, scaler=cpu_scaler(2.0**16)
    )
    applied = engine.apply(
        ObjectiveResult([LossTerm("t", (weight * 1e36).sum(), 1)]),
        epoch_idx=0, batch_idx=0, is_last=False,
    )  # fmt: skip
    assert not applied.committed
    assert torch.equal(weight, torch.ones(2))


def test_scaled_accumulation_of_uneven_microbatches_is_the_full_batch_update():
    batches = [batch(7, 1), batch(2, 2)]
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=2, scaler=cpu_scaler())
    run(engine, [ObjectiveResult([cross_entropy(model, x, y)]) for x, y in batches])
    optimizer = sgd(oracle)
    x, y = (torch.cat(parts) for parts in zip(*batches))
    F.cross_entropy(oracle(x), y).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)


# -- the default step ------------------------------------------------------------------------


def supervised(model, loss_fn, x, y):
    return supervised_terms(loss_fn, None, model(x), y)


LOSSES = {
    "cross_entropy": (nn.CrossEntropyLoss(), lambda y: y),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.5, 0.3])), lambda y: y),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda y: y),
    "summed": (nn.CrossEntropyLoss(reduction="sum"), lambda y: y),
    "bce": (nn.BCEWithLogitsLoss(), lambda y: F.one_hot(y, 3).float()),
    "mse": (nn.MSELoss(), lambda y: F.one_hot(y, 3).float()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_default_step_is_a_plain_loop_bit_for_bit(loss):
    loss_fn, encode = LOSSES[loss]
    model, oracle = net(), net()
    engine = UpdateEngine(
        {"default": torch.optim.Adam(model.parameters(), lr=0.01)},
        clip_norms={"default": 0.7},
    )  # fmt: skip
    optimizer = torch.optim.Adam(oracle.parameters(), lr=0.01)
    for step in range(5):
        x, y = batch(6 + step, step)
        applied = engine.apply_supervised(
            supervised(model, loss_fn, x, encode(y)), epoch_idx=0, batch_idx=step, is_last=False
        )
        optimizer.zero_grad()
        plain = loss_fn(oracle(x), encode(y))
        plain.backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.7)
        optimizer.step()
        assert applied.value == plain.item()
        assert applied.committed
    assert same_bits(model, oracle)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce", "mse"])
def test_accumulation_over_equal_microbatches_is_the_plain_accumulation_loop_bit_for_bit(loss):
    loss_fn, encode = LOSSES[loss]
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=4)
    optimizer = sgd(oracle)
    for step in range(8):
        x, y = batch(8, step)
        engine.apply_supervised(
            supervised(model, loss_fn, x, encode(y)), epoch_idx=0, batch_idx=step, is_last=False
        )
        if step % 4 == 0:
            optimizer.zero_grad()
        (loss_fn(oracle(x), encode(y)) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
    assert same_bits(model, oracle)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_default_step_accumulates_like_one_full_batch(loss):
    loss_fn, encode = LOSSES[loss]
    batches = [batch(7, 1), batch(2, 2), batch(4, 3)]
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=3)
    for index, (x, y) in enumerate(batches):
        engine.apply_supervised(
            supervised(model, loss_fn, x, encode(y)), epoch_idx=0, batch_idx=index, is_last=False
        )
    optimizer = sgd(oracle)
    x, y = (torch.cat(parts) for parts in zip(*batches))
    loss_fn(oracle(x), encode(y)).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_default_step_takes_no_update_for_a_masked_window(accumulate, reduction):
    model, (x, y) = net(), batch(4, 0)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    engine = UpdateEngine({"default": sgd(model, weight_decay=0.1)}, accumulate=accumulate)
    before = copy.deepcopy(model)
    for index in range(2):
        applied = engine.apply_supervised(
            supervised(model, loss_fn, x, torch.full_like(y, -100)),
            epoch_idx=0, batch_idx=index, is_last=False,
        )  # fmt: skip
    assert applied.value is None
    assert applied.closed
    assert not applied.committed
    assert same_bits(model, before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_default_step_raises_on_a_diverged_loss_before_stepping(accumulate):
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model, accumulate=accumulate)
    before = copy.deepcopy(model)
    x[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="nan at epoch 2, batch 3"):
        engine.apply_supervised(
            supervised(model, nn.CrossEntropyLoss(), x, y), epoch_idx=2, batch_idx=3, is_last=False
        )
    assert same_bits(model, before)
    assert all(p.grad is None for p in model.parameters())


# -- the end of an epoch ---------------------------------------------------------------------


def test_close_steps_a_window_that_a_short_epoch_left_open():
    x, y = batch(4, 0)
    model, oracle = net(), net()
    engine = engine_of(model, accumulate=4)
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    applied = engine.close(epoch_idx=0, batch_idx=0)
    assert applied.committed
    assert applied.events[0].microbatches == 1
    optimizer = sgd(oracle)
    F.cross_entropy(oracle(x), y).backward()
    optimizer.step()
    assert_equal_weights(model, oracle, **EXACT)
    assert not engine.close(epoch_idx=0, batch_idx=0).closed


def test_a_new_epoch_forgets_an_open_window():
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model, accumulate=4)
    engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    engine.begin_epoch()
    assert all(p.grad is None for p in model.parameters())
    assert not engine.close(epoch_idx=1, batch_idx=0).closed


# -- state -----------------------------------------------------------------------------------


def test_the_counters_are_a_component():
    model, (x, y) = net(), batch(4, 0)
    engine = engine_of(model)
    for _ in range(3):
        engine.apply(
            ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
        )
    assert engine.component_spec().name == "nnx.update_engine"
    other = engine_of(net())
    other.load_component_state(engine.component_state(), version=1)
    applied = other.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    assert not applied.committed  # another model's parameters: no gradients
    assert (other.updates, other.update_counts) == (3, {"default": 3})


def test_an_open_window_continues_from_its_state_bit_for_bit(tmp_path):
    batches = [batch(n, n) for n in (3, 5, 2, 4)]
    model = net()
    engine = engine_of(model, accumulate=4)

    def feed(engine, model, indices):
        for index in indices:
            x, y = batches[index]
            yield engine.apply(
                two_terms(model, x, y, 0.5), epoch_idx=0, batch_idx=index, is_last=False
            )

    list(feed(engine, model, range(2)))
    torch.save(engine.window_state(), tmp_path / "window.pt")
    resumed_model = copy.deepcopy(model)
    resumed = engine_of(resumed_model, accumulate=4)
    resumed.load_window_state(torch.load(tmp_path / "window.pt", weights_only=True))
    *_, straight = feed(engine, model, range(2, 4))
    *_, continued = feed(resumed, resumed_model, range(2, 4))

    assert same_bits(model, resumed_model)
    assert continued.events == straight.events
    assert resumed.epoch_loss() == engine.epoch_loss()


# -- several processes -----------------------------------------------------------------------


class Rank:
    """One process of a simulated group: the test hands it what the others contributed."""

    def __init__(self, others_totals=(), others_gradients=()):
        self.others_totals, self.others_gradients = list(others_totals), list(others_gradients)
        self.sent_totals, self.sent_gradients = [], []

    def shares(self, terms, *, closes):
        return None  # each rank back-propagates on its own

    def all_finite(self, finite):
        return finite

    def totals(self, totals):
        self.sent_totals.append(copy.deepcopy(totals))
        return WindowTotals.merged([totals, *self.others_totals])

    def gradients(self, parameters):
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        self.sent_gradients.append(own)
        for index, parameter in enumerate(parameters):
            parameter.grad = own[index] + sum(g[index] for g in self.others_gradients)


def test_synchronized_windows_equal_one_process_on_the_union():
    shards = [[batch(5, 1), batch(2, 2)], [batch(1, 3), batch(6, 4)]]

    def play(rank, shard):
        model = net()
        engine = engine_of(model, accumulate=2, synchronize=rank)
        applied = run(engine, [two_terms(model, x, y, 0.5) for x, y in shard])
        return model, engine, applied[-1]

    # First pass: learn what each rank sends, given the other's totals.
    alone = [Rank(), Rank()]
    for rank, shard in zip(alone, shards):
        play(rank, shard)
    totals = [rank.sent_totals[0] for rank in alone]
    exchange = [
        Rank([totals[1]], [[torch.zeros(())] * 4]),
        Rank([totals[0]], [[torch.zeros(())] * 4]),
    ]
    for rank, shard in zip(exchange, shards):
        play(rank, shard)
    gradients = [rank.sent_gradients[0] for rank in exchange]
    results = [play(Rank([totals[1 - i]], [gradients[1 - i]]), shards[i]) for i in range(2)]

    oracle = net()
    optimizer = sgd(oracle)
    x, y = (torch.cat(parts) for parts in zip(*shards[0], *shards[1]))
    logits = oracle(x)
    loss = F.cross_entropy(logits, y) + 0.5 * logits.square().sum() / len(y)
    loss.backward()
    optimizer.step()
    for model, engine, applied in results:
        assert_equal_weights(model, oracle, **EXACT)
        assert applied.events[0].loss == pytest.approx(loss.item())
        assert applied.events[0].microbatches == 4
        assert engine.epoch_loss() == pytest.approx(loss.item())


def test_every_process_leaves_a_window_that_is_not_finite_on_one_of_them():
    model, (x, y) = net(), batch(4, 0)
    poisoned = WindowTotals({"ce": TermTotals("mean", math.nan, math.nan, 4.0, True)}, True, 1)
    rank = Rank([poisoned])
    engine = engine_of(model, nonfinite="skip", synchronize=rank)
    before = copy.deepcopy(model)
    applied = engine.apply(
        ObjectiveResult([cross_entropy(model, x, y)]), epoch_idx=0, batch_idx=0, is_last=False
    )
    assert not applied.committed
    assert rank.sent_gradients == []
    assert same_bits(model, before)


def test_a_window_masked_here_is_stepped_when_another_process_has_samples():
    model = net()
    others = [torch.ones_like(p) for p in model.parameters()]
    rank = Rank([WindowTotals({"ce": TermTotals("mean", 2.0, 2.0, 4.0, True)}, False, 1)], [others])
    engine = engine_of(model, synchronize=rank)
    before = copy.deepcopy(model)
    applied = engine.apply(ObjectiveResult([]), epoch_idx=0, batch_idx=0, is_last=False)
    assert applied.committed
    assert applied.events[0].loss == 0.5
    for parameter, old in zip(model.parameters(), before.parameters()):
        torch.testing.assert_close(parameter, old - 0.1)
