"""Schedules by id: their rates, what they need, and that a split run equals a whole one."""

from __future__ import annotations

import math

import pytest
import torch
from nnx import (
    MissingSchedulerError,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNRun,
    NNTrainParams,
    SchedulerSpec,
    register_scheduler,
    registered_schedulers,
    unregister_scheduler,
)
from nnx.schedulers import build_scheduler, schedule_horizon
from torch import nn
from torch.optim import lr_scheduler


def optimizer(lr=0.5):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates(scheduler, steps):
    opt, seen = scheduler.optimizer, []
    for _ in range(steps):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return seen


def rates_of(spec, steps=10, n_epochs=10):
    return rates(
        build_scheduler(optimizer(), spec, schedule_horizon(spec, n_epochs=n_epochs)), steps
    )


@pytest.mark.parametrize(
    ("spec", "torchs"),
    [
        (SchedulerSpec("exponential", config={"gamma": 0.8}), lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        (SchedulerSpec("polynomial", config={"power": 2, "total_steps": 6}), lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0)),
        (SchedulerSpec("warmup_cosine", config={"warmup_steps": 0, "floor": 0.1}), lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.05)),
        (SchedulerSpec("cosine_restarts", config={"period": 2, "growth": 2, "floor": 0.1}),
         lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, eta_min=0.05)),
        (SchedulerSpec("cosine_restarts", config={"period": 3}), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)),
        (SchedulerSpec("constant"), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ],
)  # fmt: skip
def test_the_rates_are_those_of_torch(spec, torchs):
    assert rates_of(spec) == pytest.approx(rates(torchs(optimizer()), 10), abs=1e-12)


def test_a_warm_up_and_a_floor():
    spec = SchedulerSpec("warmup_cosine", config={"warmup_steps": 2, "floor": 0.2})
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * s / 8)) / 2 for s in range(8)]
    expected = [0.25, 0.5, *(0.5 * factor for factor in cosine), 0.1, 0.1]
    assert rates_of(spec, 12) == pytest.approx(expected)


def test_warm_up_stable_decay():
    spec = SchedulerSpec("wsd", config={"warmup_steps": 2, "decay_steps": 4, "floor": 0.2})
    expected = [0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    factors = [0.25, 0.5, *[0.5] * 4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    assert rates_of(spec, 12) == pytest.approx(expected) == factors


def test_defaults_follow_the_length_of_the_run():
    assert schedule_horizon(SchedulerSpec("warmup_cosine"), n_epochs=20).steps == 20
    per_update = SchedulerSpec("wsd", clock="optimizer_update")
    assert schedule_horizon(per_update, n_epochs=20, updates=70).steps == 70
    assert schedule_horizon(SchedulerSpec("constant"), n_epochs=20).steps is None
    assert rates_of(SchedulerSpec("warmup_cosine"), 3, n_epochs=20)[:2] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (SchedulerSpec("exponential", config={"gama": 1}), ValueError, "no key 'gama'; did you mean 'gamma'"),
        (SchedulerSpec("exponential", config={"gamma": 1.5}), ValueError, "gamma must be .* <= 1"),
        (SchedulerSpec("wsd", config={"warmup_steps": 8, "decay_steps": 4}), ValueError, "10 steps long, .*8 \\+ 4 steps"),
        (SchedulerSpec("wsd", config={"total_steps": 0}), ValueError, "total_steps must be an integer >= 1"),
        (SchedulerSpec("exponentail"), MissingSchedulerError, "did you mean 'exponential'"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_take_is_refused(spec, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        train(10, spec)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_number_of_updates_needs_total_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = SchedulerSpec("warmup_cosine", clock="optimizer_update")
    with pytest.raises(ValueError, match="needs total_steps in its config"):
        train(2, spec, train_step_fn=lambda ctx: None)
    assert list(tmp_path.iterdir()) == []


X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
BATCHES = [(X[i : i + 4], X[i : i + 4].sum(1, keepdim=True)) for i in (0, 4, 8)]


def train(n_epochs, spec, *, train_step_fn=None, salt=None, **more):
    torch.manual_seed(0)
    model = NNModel(params=NNModelParams(loss="mse"), module=nn.Linear(2, 1))
    training = NNTrainParams(
        n_epochs=n_epochs, train_loader=BATCHES, val_loader=BATCHES, scheduler=spec,
        optim=NNOptimParams(name="adam", max_lr=0.1, weight_decay=0.0, momentum=(0.9, 0.99)),
        **more,
    )  # fmt: skip
    return model, model.train(training, train_step_fn=train_step_fn, salt=salt)


@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        (SchedulerSpec("warmup_cosine", config={"total_steps": 4}), None),
        (SchedulerSpec("wsd", config={"total_steps": 12}, clock="optimizer_update"), None),
        (SchedulerSpec("cosine_restarts", config={"period": 2}, clock="optimizer_update"), [1.0, 0.5]),
        (None, [1.0]),
    ],
)  # fmt: skip
def test_a_split_run_equals_the_whole_one_and_a_plain_loop(spec, factors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, run = train(4, spec)
    _, first = train(2, spec)
    rest, _ = train(2, spec, resume_from_run_id=first.id)
    for one, other in zip(whole.net.parameters(), rest.net.parameters()):
        assert torch.equal(one, other)
    assert NNRun.load(run.id).train.scheduler == (spec or SchedulerSpec("constant"))
    if factors is None:
        return
    torch.manual_seed(0)
    plain, step = nn.Linear(2, 1), 0
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1, betas=(0.9, 0.99))
    for _ in range(4):
        for x, y in BATCHES:
            optimizer.param_groups[0]["lr"] = 0.1 * factors[step % len(factors)]
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
            step += 1
    for one, other in zip(whole.net.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other)


def test_a_resume_needs_one_length_for_both_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, first = train(2, "warmup_cosine")
    with pytest.raises(ValueError, match="warmup_cosine schedule of 'default' has no total_steps"):
        train(2, "warmup_cosine", resume_from_run_id=first.id)


def test_a_schedule_of_ones_own_is_registered_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    register_scheduler(
        "tests.halves", 1, lambda opt, config: lr_scheduler.StepLR(opt, 1, config["by"])
    )
    try:
        assert ("tests.halves", 1) in registered_schedulers()
        spec = SchedulerSpec("tests.halves", config={"by": 0.5})
        assert rates_of(spec, 3) == [0.5, 0.25, 0.125]
        register_scheduler("tests.halves", 1, lambda opt, config: 3, replace=True)
        with pytest.raises(TypeError, match="must be a torch LRScheduler, not int"):
            train(1, spec)
    finally:
        assert unregister_scheduler("tests.halves", 1)
