"""Schedules from params, and the arithmetic of their horizons."""

from __future__ import annotations

import pytest
import torch
from nnx import MonitorSpec, NNSchedulerParams, Schedulers
from nnx.schedulers import Horizon, build_scheduler, call_builder, planned_updates, schedule_horizon
from torch.optim import lr_scheduler

PLATEAU = {"min_lr": 1e-4, "factor": 0.5, "patience": 2, "cooldown": 1, "threshold": 1e-3}


def params(**values):
    return NNSchedulerParams(**{**PLATEAU, **values})


def optimizer(lr=0.12, cls=torch.optim.SGD):
    return cls([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(scheduler, steps):
    opt, seen = scheduler.optimizer, []
    for _ in range(steps):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return seen


def test_the_warm_up_trains_the_first_updates_at_the_documented_rates():
    p = params(kind=Schedulers.LINEAR_WARMUP_DECAY, warmup_steps=3, total_steps=8)
    scheduler = build_scheduler(optimizer(), p, schedule_horizon(p, n_epochs=8))
    assert rates(scheduler, 9) == pytest.approx(
        [0.04, 0.08, 0.12, 0.12, 0.12 * 4 / 5, 0.12 * 3 / 5, 0.12 * 2 / 5, 0.12 / 5, 0.0]
    )


def test_a_warm_up_resumes_from_its_saved_state_alone():
    p = params(kind=Schedulers.LINEAR_WARMUP_DECAY, warmup_steps=3, total_steps=8)
    horizon = schedule_horizon(p, n_epochs=8)
    whole = rates(build_scheduler(optimizer(), p, horizon), 8)
    opt = optimizer()
    first = build_scheduler(opt, p, horizon)
    rates(first, 4)
    saved, opt_saved = first.state_dict(), opt.state_dict()
    other = optimizer()
    second = build_scheduler(other, p, Horizon(steps=100, explicit=True, warmup_steps=50))
    other.load_state_dict(opt_saved)
    second.load_state_dict(saved)
    assert rates(second, 4) == whole[4:]


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        (Schedulers.STEP, {"step_size": 2}, lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5)),
        (
            Schedulers.COSINE_ANNEALING,
            {"T_max": 6},
            lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=1e-4),
        ),
        (
            Schedulers.ONE_CYCLE,
            {"max_lr": 0.3, "total_steps": 10},
            lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10),
        ),
    ],
)
def test_the_rates_are_those_of_torch(kind, own, expected):
    p = params(kind=kind, **own)
    ours = build_scheduler(optimizer(), p, schedule_horizon(p, n_epochs=10))
    called = kind(optimizer(), p, 10)
    theirs = rates(expected(optimizer()), 9)
    assert rates(ours, 9) == rates(called, 9) == theirs


def test_a_plateau_reads_the_params_and_a_monitor_replaces_its_rule():
    scheduler = build_scheduler(optimizer(), params(), Horizon())
    assert type(scheduler) is lr_scheduler.ReduceLROnPlateau
    assert (scheduler.mode, scheduler.threshold, scheduler.threshold_mode) == ("min", 1e-3, "rel")
    assert (scheduler.factor, scheduler.patience, scheduler.cooldown) == (0.5, 2, 1)
    assert scheduler.min_lrs == [1e-4]
    monitor = MonitorSpec(metric="acc", mode="max", min_delta=0.01)
    watched = build_scheduler(optimizer(), params(), Horizon(), monitor=monitor)
    assert (watched.mode, watched.threshold, watched.threshold_mode) == ("max", 0.01, "abs")
    called = Schedulers.REDUCE_LR_ON_PLATEAU(optimizer(), params(), 5)
    assert type(called) is lr_scheduler.ReduceLROnPlateau


def test_a_schedule_without_steps_cannot_be_built():
    with pytest.raises(ValueError, match="needs a horizon with steps"):
        build_scheduler(optimizer(), params(kind=Schedulers.STEP), Horizon())
    with pytest.raises(ValueError, match="clock must be 'epoch' for a plateau schedule"):
        Schedulers.REDUCE_LR_ON_PLATEAU(
            optimizer(), params(kind=Schedulers.STEP, clock="optimizer_update"), 3
        )


def test_two_epochs_of_five_batches_in_windows_of_two_are_six_updates():
    assert planned_updates(2, 5, 2) == 6
    p = params(kind=Schedulers.ONE_CYCLE, clock="optimizer_update")
    horizon = schedule_horizon(p, n_epochs=2, updates=planned_updates(2, 5, 2))
    assert horizon == Horizon(steps=6, explicit=False)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Schedulers.STEP, "step_size"),
        (Schedulers.COSINE_ANNEALING, "T_max"),
        (Schedulers.ONE_CYCLE, "total_steps"),
        (Schedulers.LINEAR_WARMUP_DECAY, "total_steps"),
    ],
)
def test_an_update_clock_of_unknown_length_needs_its_budget(kind, field):
    p = params(kind=kind, clock="optimizer_update")
    with pytest.raises(ValueError, match=rf"of 'G'.{field} must be set on the optimizer_update"):
        schedule_horizon(p, n_epochs=3, owner="G")
    explicit = params(kind=kind, clock="optimizer_update", **{field: 7})
    assert schedule_horizon(explicit, n_epochs=3).steps == 7
    assert schedule_horizon(explicit, n_epochs=3).explicit


def test_the_epoch_clock_defaults_to_the_epochs():
    assert schedule_horizon(params(kind=Schedulers.COSINE_ANNEALING), n_epochs=9).steps == 9
    assert schedule_horizon(params(kind=Schedulers.STEP), n_epochs=9).steps == 3
    assert schedule_horizon(params(kind=Schedulers.STEP), n_epochs=1).steps == 1
    warm = schedule_horizon(params(kind=Schedulers.LINEAR_WARMUP_DECAY), n_epochs=40)
    assert (warm.steps, warm.warmup_steps) == (40, 4)
    short = schedule_horizon(params(kind=Schedulers.LINEAR_WARMUP_DECAY), n_epochs=3)
    assert short.warmup_steps == 1


def test_the_default_warm_up_is_a_tenth_of_the_epochs_or_of_the_updates():
    by_epoch = params(kind=Schedulers.LINEAR_WARMUP_DECAY, total_steps=100)
    assert schedule_horizon(by_epoch, n_epochs=20).warmup_steps == 2
    by_update = params(
        kind=Schedulers.LINEAR_WARMUP_DECAY, total_steps=100, clock="optimizer_update"
    )
    assert schedule_horizon(by_update, n_epochs=20).warmup_steps == 10


@pytest.mark.parametrize("kind", [None, Schedulers.REDUCE_LR_ON_PLATEAU])
def test_a_plateau_refuses_the_update_clock(kind):
    with pytest.raises(ValueError, match=r"NNSchedulerParams.clock must be 'epoch' for a plateau"):
        params(kind=kind, clock="optimizer_update")


def test_one_cycle_leaves_an_optimizer_without_momentum_alone():
    opt = optimizer(cls=torch.optim.Adagrad)
    p = params(kind=Schedulers.ONE_CYCLE, max_lr=0.3, total_steps=10)
    scheduler = build_scheduler(opt, p, schedule_horizon(p, n_epochs=10))
    assert max(rates(scheduler, 9)) == pytest.approx(0.3, rel=1e-2)


def test_one_cycle_peaks_at_each_groups_own_rate_when_no_peak_is_named():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt = torch.optim.SGD(
        [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.01}]
    )
    p = params(kind=Schedulers.ONE_CYCLE, total_steps=10)
    build_scheduler(opt, p, schedule_horizon(p, n_epochs=10))
    assert [group["max_lr"] for group in opt.param_groups] == [0.1, 0.01]


def test_an_override_takes_what_it_names():
    asked = params(kind=Schedulers.STEP, step_size=2)
    horizon, monitor = Horizon(steps=2), MonitorSpec("loss")
    seen = {
        "two": lambda optimizer, params: (params,),
        "horizon": lambda optimizer, params, horizon: (params, horizon),
        "monitor": lambda optimizer, params, *, monitor=None: (params, monitor),
        "named": lambda optimizer, params, **rest: (params, *rest.values()),
        "all": lambda *arguments: arguments[1:],
    }
    found = {name: call_builder(f, None, asked, horizon, monitor) for name, f in seen.items()}
    assert found == {
        "two": (asked,), "horizon": (asked, horizon), "monitor": (asked, monitor),
        "named": (asked, horizon, monitor), "all": (asked, horizon, monitor),
    }  # fmt: skip
