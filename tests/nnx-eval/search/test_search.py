"""A budgeted study over a plan, against plain Optuna and against the runs that it wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import optuna
import pytest
from made_plans import net, plan, training
from nnx import Callback, LRMonitor, MonitorSpec, NNRun
from nnx.plugins.siblings import install_line
from nnx.search import (
    CategoricalParam,
    FloatParam,
    IntParam,
    SearchBudget,
    SearchSpace,
    search,
)

NLL = MonitorSpec("nll")
SPACE = SearchSpace((FloatParam("lr", 1e-4, 1e-1, log=True), IntParam("hidden", 2, 16)))


def apply(base, params):
    optim = dataclasses.replace(base.train.optim, max_lr=params["lr"])
    return base.with_optim(optim).with_net(net(hidden_dims=[params["hidden"]]))


def searched(trials=3, base=None, space=SPACE, apply=apply, **options):
    budget = options.pop("budget", None) or SearchBudget(trials)
    options = {"study_name": "s", "monitor": NLL, **options}
    return search(base or plan(), space, apply=apply, budget=budget, **options)


def sampler(seed=0):
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=2)


def test_trials_are_those_of_plain_optuna_and_values_those_of_best() -> None:
    base = plan()
    found = searched(5, base, sampler=sampler())
    study = optuna.create_study(sampler=sampler())
    values = iter([outcome.monitor_value for outcome in found.outcomes])

    def objective(trial):
        trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        trial.suggest_int("hidden", 2, 16)
        return next(values)

    study.optimize(objective, n_trials=5)
    assert [dict(o.params) for o in found.outcomes] == [trial.params for trial in study.trials]
    assert found.best.number == study.best_trial.number
    assert (found.asked, found.stop_reason, found.direction) == (5, "budget", "min")
    assert found.monitor == "val.nll"
    for outcome in found.outcomes:
        run = NNRun.load(outcome.run_id)
        best = [i.selection.value for i in run.idps if i.selection and i.selection.improved][-1]
        assert outcome.monitor_value == best
        assert (outcome.epochs, outcome.updates, outcome.checkpoint) == (3, 15, "best")
        assert [epoch for epoch, _ in outcome.observations] == [0, 1, 2]
        assert run.net.hidden_dims == [outcome.params["hidden"]]
        assert run.salt == f"plan-attempt:{outcome.attempt_id}"
        assert outcome.seconds > 0
    assert base.net == net()
    assert set(found.trial_runs) == set(range(5))


@pytest.mark.parametrize("storage", ["studies/s.journal", "sqlite:///s.db"])
def test_a_stored_study_goes_on_within_its_budget(storage) -> None:
    first = searched(2, storage=storage)
    again = searched(3, storage=storage)
    assert again.outcomes[:2] == first.outcomes
    assert len(again.outcomes) == again.asked == 3
    assert set(again.trial_runs) == {2}
    full = searched(3, storage=storage)
    assert (full.stop_reason, len(full.trial_runs)) == ("budget", 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"space": SearchSpace((IntParam("hidden", 2, 4),))}, "space"),
        ({"base": plan(seed=8)}, "plan"),
        ({"base": plan(train=training(monitor=MonitorSpec("nll", min_delta=1.0))),
          "monitor": MonitorSpec("nll", min_delta=1.0)}, "monitor, plan"),
    ],
)  # fmt: skip
def test_a_study_of_something_else_is_refused_before_any_trial(change, what) -> None:
    searched(1, storage="s.journal")
    with pytest.raises(ValueError, match=f"of another {what}"):
        searched(2, storage="s.journal", **change)
    assert len(os.listdir("runs")) >= 1
    assert searched(1, storage="s.journal").asked == 1


def test_an_orphan_counts_and_an_enqueued_trial_does_not() -> None:
    searched(1, storage="s.journal")
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("s.journal")
    )
    study = optuna.load_study(study_name="s", storage=storage)
    study.ask()  # as a crashed process leaves it
    study.enqueue_trial({"lr": 0.01, "hidden": 3})
    found = searched(3, storage="s.journal")
    assert [o.state for o in found.outcomes] == ["completed", "orphaned", "completed"]
    assert dict(found.outcomes[2].params) == {"lr": 0.01, "hidden": 3}
    assert found.asked == 3


def test_a_grid_that_is_used_up_ends_the_search_and_spends_nothing() -> None:
    grid = {"hidden": [2, 3]}
    space = SearchSpace((CategoricalParam("hidden", (2, 3)),))

    def narrow(base, params):
        return base.with_net(net(hidden_dims=[params["hidden"]]))

    options = {
        "space": space, "apply": narrow, "storage": "g.journal",
    }  # fmt: skip
    found = searched(9, sampler=optuna.samplers.GridSampler(grid), **options)
    assert (found.stop_reason, found.asked) == ("exhausted", 2)
    assert sorted(o.params["hidden"] for o in found.outcomes) == [2, 3]
    again = searched(9, sampler=optuna.samplers.GridSampler(grid), **options)
    assert (again.stop_reason, again.asked) == ("exhausted", 2)


class FailOn(Callback):
    def __init__(self, error, epoch=1):
        self.error, self.at = error, epoch

    def on_epoch_begin(self, ctx):
        if ctx.epoch == self.at:
            raise self.error


def test_a_fit_that_raises_is_a_failed_trial_and_the_search_goes_on() -> None:
    def sometimes(base, params):
        branch = apply(base, params)
        if params["hidden"] % 2:
            return branch.with_callback_factories(lambda: FailOn(OSError("no space")))
        return branch

    found = searched(6, apply=sometimes, sampler=sampler())
    failed = [o for o in found.outcomes if o.params["hidden"] % 2]
    assert failed
    assert len(failed) < 6
    for outcome in failed:
        assert (outcome.state, outcome.reason) == ("failed", "error")
        assert outcome.error == "OSError: no space"
        assert (outcome.epochs, outcome.checkpoint) == (1, "last")
    assert found.best.state == "completed"


def test_a_value_that_is_not_finite_or_missing_fails_the_trial() -> None:
    def diverge(base, params):
        return base.with_optim(dataclasses.replace(base.train.optim, max_lr=1e30))

    found = searched(1, apply=diverge)
    assert (found.outcomes[0].state, found.outcomes[0].reason) == ("failed", "nonfinite")
    assert found.best is None

    from nnx import NNEvaluationDataPoint

    def silent(ctx):
        return NNEvaluationDataPoint(loss=1.0)

    with pytest.warns(RuntimeWarning, match="has no value"):
        found = searched(1, plan(eval_step_fn=silent), apply=lambda p, _: p)
    assert (found.outcomes[0].state, found.outcomes[0].reason) == ("failed", "missing")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda p, _: 1 / 0, "division"),
        (lambda p, _: None, "must be an ExperimentPlan"),
        (lambda p, _: p.with_callbacks(LRMonitor()), "lends its callbacks"),
        (lambda p, _: p.with_metrics(monitor=MonitorSpec("loss")), "declare it with"),
    ],
)
def test_a_configuration_error_fails_its_trial_and_is_raised(bad, message) -> None:
    with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=message):
        searched(3, apply=bad, storage="s.journal")
    stored = searched(1, storage="s.journal")
    assert [(o.state, o.reason) for o in stored.outcomes] == [("failed", "configuration")]
    assert message in stored.outcomes[0].error
    assert not os.path.exists("runs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": plan(callbacks=(LRMonitor(),))}, "lends its callbacks"),
        ({"base": plan(train_data=[1])}, "lends its train data"),
        ({"base": plan(val_data=[1])}, "lends its val data"),
        ({"monitor": MonitorSpec("loss")}, "declare it with"),
        ({"monitor": MonitorSpec("nll", split="train")}, "validation split"),
        ({"monitor": "nll"}, "MonitorSpec"),
        ({"budget": SearchBudget(1, updates_per_trial=3),
          "base": plan(train_step_fn=lambda ctx: None)}, "updates_per_trial"),
        ({"base": plan(seed=-1)}, "seed"), ({"space": [1]}, "SearchSpace"),
        ({"study_name": ""}, "study_name"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_before_a_study_exists(options, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        searched(storage="s.journal", **options)
    assert os.listdir() == []


def test_an_update_cap_stops_right_after_that_update() -> None:
    found = searched(budget=SearchBudget(1, updates_per_trial=7))
    (outcome,) = found.outcomes
    assert (outcome.state, outcome.reason, outcome.updates) == ("completed", "update_cap", 7)
    assert outcome.epochs == 1
    assert [i.epoch_idx for i in NNRun.load(outcome.run_id).idps] == [0] * 5
    early = searched(budget=SearchBudget(1, updates_per_trial=2)).outcomes[0]
    assert (early.state, early.reason, early.checkpoint) == ("failed", "no_epoch", None)
    assert not os.path.exists(f"runs/{early.run_id}/checkpoints/last.pt")


def test_a_deadline_starts_no_trial_and_stops_a_running_one() -> None:
    now = [0.0]

    class Tick(Callback):
        def on_epoch_begin(self, ctx):
            now[0] += 4.0

    ticking = plan(callback_factories=(Tick,))
    found = searched(
        base=ticking, budget=SearchBudget(9, deadline_seconds=10.0), clock=lambda: now[0]
    )
    first = found.outcomes[0]
    assert found.stop_reason == "deadline"
    assert len(found.outcomes) == 1
    assert (first.reason, first.epochs, first.overrun_seconds) == ("deadline", 2, 2.0)
    assert found.deadline_overrun_seconds == 2.0


def test_a_pruner_sees_validated_epochs_and_stops_a_trial() -> None:
    found = searched(8, sampler=sampler(), pruner=optuna.pruners.MedianPruner(2, 0))
    pruned = [o for o in found.outcomes if o.state == "pruned"]
    assert pruned
    for outcome in pruned:
        assert outcome.epochs == len(outcome.observations) <= 3
    assert found.best.state == "completed"


def test_cancelling_cleans_up_and_records_the_trial_as_failed() -> None:
    closed = []

    class Interrupt(FailOn):
        def on_train_end(self, ctx):
            closed.append(ctx.failed)

    def interrupted(base, params):
        branch = apply(base, params)
        return branch.with_callback_factories(lambda: Interrupt(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        searched(3, apply=interrupted, storage="s.journal")
    (outcome,) = searched(1, storage="s.journal").outcomes
    assert (outcome.state, outcome.reason) == ("failed", "cancelled")
    assert closed == [True]
    NNRun.load(outcome.run_id).ensure_writable(overwrite=True)  # its lease is free


def test_the_space_is_data_and_refuses_what_has_no_values() -> None:
    space = SearchSpace((*SPACE.params, CategoricalParam("kind", ("a", None, 1, True))))
    json.dumps(space.state())
    assert space.digest() != SPACE.digest()
    assert SearchSpace(list(SPACE.params)).digest() == SPACE.digest()
    for wrong in (
        lambda: FloatParam("x", 2.0, 1.0), lambda: FloatParam("x", 0.0, 1.0, log=True),
        lambda: FloatParam("x", 0.1, 1.0, log=True, step=0.1), lambda: IntParam("x", 1, 2.5),
        lambda: IntParam("x", 1, 8, log=True, step=2), lambda: IntParam("", 1, 2),
        lambda: CategoricalParam("x", ()), lambda: CategoricalParam("x", "ab"),
        lambda: CategoricalParam("x", ([1],)), lambda: CategoricalParam("x", (1, 1)),
        lambda: SearchSpace(()), lambda: SearchSpace((IntParam("x", 1, 2), IntParam("x", 1, 3))),
        lambda: SearchBudget(0), lambda: SearchBudget(1, deadline_seconds=0),
        lambda: SearchBudget(1, updates_per_trial=0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()


def test_without_optuna_the_line_that_installs_it_is_named() -> None:
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "import nnx.search.study as s\n"
        "try: s.require_optuna()\n"
        "except ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "a search needs optuna" in done.stdout
    assert install_line("nnx-eval", "search") in done.stdout
