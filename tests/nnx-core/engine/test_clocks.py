"""What a scheduler step counts, how far a schedule may go, and what a resume keeps of it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    ComponentRestoreError,
    NNCheckpoint,
    NNModel,
    NNSchedulerParams,
    Schedulers,
    default_train_step,
    supervised_objective,
)


def schedule(kind, clock="optimizer_update", **kwargs):
    return NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0,
        kind=kind, clock=clock, **kwargs,
    )  # fmt: skip


def rates(run):
    return [idp.lr for idp in run.idps]


class IterableOnly:
    """Yields the loader's batches, and claims another number of them (or none)."""

    def __init__(self, loader, claimed=None):
        self.loader, self.claimed = loader, claimed

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        if self.claimed is None:
            raise TypeError("no length")
        return self.claimed


def test_the_documented_warm_up_sequence(kit):
    params = kit.train_params(
        n_epochs=1,
        train_loader=kit.loader(64),
        optim=kit.adam(max_lr=0.12),
        scheduler=schedule(Schedulers.LINEAR_WARMUP_DECAY, warmup_steps=3, total_steps=8),
    )
    run = kit.model().train(params)
    assert rates(run) == pytest.approx([0.04, 0.08, 0.12, 0.12], abs=1e-12)


def test_windows_of_two_microbatches_are_three_updates_an_epoch(kit):
    """Two epochs of five microbatches at accumulation two: six updates."""
    seen = []

    def note(self, ctx):
        seen.append((ctx.epoch, ctx.committed_updates, ctx.scheduler.last_epoch))

    look = type("Look", (Callback,), {"on_epoch_end": note})()
    params = kit.train_params(
        n_epochs=2,
        train_loader=kit.loader(80),
        optim=kit.adam(max_lr=0.1, accumulate_grad_batches=2),
        scheduler=schedule(Schedulers.STEP, step_size=2),
    )
    run = kit.model().train(params, callbacks=[look])
    assert seen == [(0, 3, 3), (1, 6, 6)]
    # a microbatch trains at the rate in force: 0.1 for two updates, then halves
    assert rates(run) == [0.1] * 4 + [0.05] + [0.05] * 2 + [0.025] * 3


def test_the_default_horizon_is_the_planned_updates(kit):
    params = kit.train_params(
        n_epochs=2,
        train_loader=kit.loader(80),
        optim=kit.adam(max_lr=0.1, accumulate_grad_batches=2),
        scheduler=schedule(Schedulers.COSINE_ANNEALING),
    )
    periods = []
    callback = type(
        "Look",
        (Callback,),
        {"on_train_begin": lambda self, ctx: periods.append(ctx.scheduler.T_max)},
    )()
    run = kit.model().train(params, callbacks=[callback])
    assert periods == [6]
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=6, eta_min=0.0)
    expected = []
    for _ in range(6):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        cosine.step()
    windows = [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert rates(run) == [expected[w] for w in windows]


@pytest.mark.parametrize("owner", ["default", "explicit", "objective"])
def test_every_owner_reports_its_updates(kit, owner):
    arguments = {
        "default": {},
        "explicit": {"train_step_fn": default_train_step},
        "objective": {"objective": supervised_objective()},
    }[owner]
    params = kit.train_params(
        n_epochs=1, optim=kit.adam(max_lr=0.1), scheduler=schedule(Schedulers.STEP, step_size=1)
    )
    assert rates(kit.model().train(params, **arguments)) == [0.1 * 0.5**i for i in range(6)]


def test_a_delegating_step_reports_once(kit):
    params = kit.train_params(
        n_epochs=1, optim=kit.adam(max_lr=0.1), scheduler=schedule(Schedulers.STEP, step_size=1)
    )
    run = kit.model().train(params, train_step_fn=lambda ctx: default_train_step(ctx))
    assert rates(run) == [0.1 * 0.5**i for i in range(6)]


def test_a_step_that_reports_nothing_warns_once_per_epoch(kit):
    def silent(ctx):
        return default_train_step(dataclasses.replace(ctx, report_update=lambda: None))

    params = kit.train_params(n_epochs=2, scheduler=schedule(Schedulers.STEP, step_size=1))
    with pytest.warns(RuntimeWarning, match="reported no optimizer update") as caught:
        run = kit.model().train(params, train_step_fn=silent)
    assert len([w for w in caught if "reported no" in str(w.message)]) == 2
    assert set(rates(run)) == {0.01}


# Budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Schedulers.ONE_CYCLE, Schedulers.LINEAR_WARMUP_DECAY])
def test_an_update_past_the_budget_stops_the_run_uncommitted(kit, kind):
    params = kit.train_params(
        n_epochs=3, scheduler=schedule(kind, total_steps=8, warmup_steps=2, max_lr=0.1)
    )
    with pytest.raises(ValueError, match=r"8 steps.*update 9"):
        kit.model().train(params)
    run = next(
        p.name for p in Path("runs").iterdir() if not p.name.startswith(".") and p.name != "best"
    )
    assert NNCheckpoint.load(run=run, type=Checkpoints.LAST).idp.epoch_idx == 0


def test_a_default_budget_stops_a_loader_that_yields_more_than_its_length(kit):
    params = kit.train_params(
        n_epochs=1,
        train_loader=IterableOnly(kit.loader(), claimed=4),
        scheduler=schedule(Schedulers.ONE_CYCLE, max_lr=0.1),
    )
    with pytest.raises(ValueError, match="4 steps"):
        kit.model().train(params)
    explicit = schedule(Schedulers.ONE_CYCLE, max_lr=0.1, total_steps=6)
    run = kit.model().train(dataclasses.replace(params, scheduler=explicit))
    assert len(run.idps) == 6


def test_a_source_without_length_needs_its_budget(kit):
    params = kit.train_params(
        n_epochs=1,
        train_loader=IterableOnly(kit.loader()),
        scheduler=schedule(Schedulers.COSINE_ANNEALING),
    )
    with pytest.raises(ValueError, match="T_max"):
        kit.model().train(params)


def test_a_cosine_past_its_default_period_warns_once(kit):
    params = kit.train_params(
        n_epochs=1,
        train_loader=IterableOnly(kit.loader(), claimed=3),
        scheduler=schedule(Schedulers.COSINE_ANNEALING),
    )
    with pytest.warns(RuntimeWarning, match="T_max") as caught:
        kit.model().train(params)
    assert len([w for w in caught if "T_max" in str(w.message)]) == 1


def test_a_chosen_period_may_be_passed_silently(kit):
    class Own(NNModel):
        def _build_scheduler(self, optimizer, params, horizon, monitor=None):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)

    chosen = kit.train_params(n_epochs=1, scheduler=schedule(Schedulers.COSINE_ANNEALING, T_max=3))
    default = kit.train_params(n_epochs=1, scheduler=schedule(Schedulers.COSINE_ANNEALING))
    own = Own(net_params=kit.model().net_params, params=kit.model().params)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        kit.model().train(chosen)
        own.train(default)


# Epoch clock --------------------------------------------------------------------------------


def test_an_epoch_clock_counts_epochs(kit):
    params = kit.train_params(
        n_epochs=3, scheduler=schedule(Schedulers.STEP, clock="epoch", step_size=1)
    )
    assert rates(kit.model().train(params)) == [0.01] * 6 + [0.005] * 6 + [0.0025] * 6


def test_a_plateau_follows_the_validation_error(kit):
    params = kit.train_params(
        n_epochs=3,
        optim=kit.adam(max_lr=0.01),
        scheduler=NNSchedulerParams(min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.99),
    )
    run = kit.model().train(params)
    # an epoch must cut the error to a hundredth to count as better
    assert [idp.lr for idp in run.idps if idp.batch_idx == 0] == [0.01, 0.01, 0.005]


# Checkpoints --------------------------------------------------------------------------------


def resuming(params, run, **kwargs):
    return dataclasses.replace(params, resume_from_run_id=run.id, resume_mode="stateful", **kwargs)


def test_a_resume_goes_on_at_the_position_of_the_checkpoint(kit):
    warmup = schedule(Schedulers.LINEAR_WARMUP_DECAY, warmup_steps=4, total_steps=24)
    whole = kit.model().train(kit.train_params(n_epochs=2, scheduler=warmup))
    part = kit.train_params(n_epochs=1, scheduler=warmup)
    first = kit.model().train(part)
    state = NNCheckpoint.load_training_state(run=first.id, type=Checkpoints.LAST)
    saved = state["components"]["nnx.scheduler_clock"]
    assert saved["required"]
    assert saved["state"]["position"] == 6
    rest = kit.model().train(resuming(part, first))
    assert rates(first) + rates(rest) == rates(whole)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (schedule(Schedulers.STEP, clock="epoch", step_size=3), "nnx.scheduler_clock"),
        (schedule(Schedulers.STEP, step_size=4), "built for 3 updates"),
    ],
)
def test_another_clock_or_budget_is_refused(kit, change, match):
    params = kit.train_params(n_epochs=1, scheduler=schedule(Schedulers.STEP, step_size=3))
    first = kit.model().train(params)
    with pytest.raises(ComponentRestoreError, match=match):
        kit.model().train(resuming(dataclasses.replace(params, scheduler=change), first))


def test_an_update_clock_is_not_resumed_from_one_that_counts_epochs(kit):
    params = kit.train_params(
        n_epochs=1, scheduler=schedule(Schedulers.STEP, clock="epoch", step_size=3)
    )
    first = kit.model().train(params)
    updates = schedule(Schedulers.STEP, step_size=3)
    with pytest.raises(ComponentRestoreError, match=r"nnx\.scheduler_clock: required"):
        kit.model().train(resuming(dataclasses.replace(params, scheduler=updates), first))


def test_updates_past_the_budget_are_refused_at_the_resume(kit):
    params = kit.train_params(
        n_epochs=1, scheduler=schedule(Schedulers.ONE_CYCLE, max_lr=0.1, total_steps=8)
    )
    first = kit.model().train(params)
    with pytest.raises(ComponentRestoreError, match=r"8 steps.*took 6.*12"):
        kit.model().train(resuming(params, first))


@pytest.mark.parametrize("clock", ["epoch", "optimizer_update"])
def test_a_resumed_cosine_warns_about_the_period_it_has(kit, clock):
    """``T_max`` comes with the checkpoint; the resumed run's own default never takes effect."""
    cosine = schedule(Schedulers.COSINE_ANNEALING, clock)
    per_epoch = 6 if clock == "optimizer_update" else 1
    params = kit.train_params(n_epochs=2, scheduler=cosine)
    first = kit.model().train(params)
    more = dataclasses.replace(resuming(params, first), n_epochs=3)
    if clock == "optimizer_update":  # a default budget does not resume on this clock
        with pytest.raises(ComponentRestoreError, match="budget"):
            kit.model().train(more)
        return
    with pytest.warns(RuntimeWarning, match=f"passed its T_max of {2 * per_epoch};") as caught:
        run = kit.model().train(more)
    assert len([w for w in caught if "T_max" in str(w.message)]) == 1
    # torch's own schedule of that period, five epochs long
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.01)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    expected = []
    for _ in range(5):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert rates(run)[::6] == pytest.approx(expected[2:], abs=1e-12)


def test_a_resumed_cosine_whose_period_was_chosen_is_silent(kit):
    params = kit.train_params(
        n_epochs=2, scheduler=schedule(Schedulers.COSINE_ANNEALING, "epoch", T_max=2)
    )
    first = kit.model().train(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kit.model().train(resuming(params, first))
