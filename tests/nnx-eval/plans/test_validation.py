"""A plan's problems, each on its field, and nothing that looking for them does."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from made_plans import X, Y, net, plan, training
from nnx import (
    EarlyStopping,
    Losses,
    LRMonitor,
    MetricSpec,
    ModelSpec,
    MonitorSpec,
    Nets,
    NNModelParams,
    NNOptimParams,
    TaskSpec,
)
from nnx.data import NNTabularDataset
from nnx.objectives import Objective
from nnx.plans import ExperimentPlan, PlanError
from nnx.streaming import streaming_eval_step

BUILTIN = NNModelParams(net=Nets.FEED_FWD)


def one_required(idps) -> None: ...


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"model": None}, "model", "NNModelParams"),
        ({"model": NNModelParams()}, "model.net", "name one of the Nets"),
        ({"net": None}, "net", "needs an NNParams"),
        ({"net": {"input_dim": 3}}, "net", "must be an NNParams"),
        ({"model": NNModelParams(net=Nets.CONV)}, "net", "NNConvParams"),
        ({"model": NNModelParams(net=ModelSpec("acme.none", 1)), "net": None}, "model.net", "acme"),
        (
            {"model": NNModelParams(net=Nets.FEED_FWD, task=TaskSpec.categorical(5))},
            "model.task", "declares 5 outputs but the net has output_dim=2",
        ),
        (
            {"model": NNModelParams(
                net=Nets.FEED_FWD, task=TaskSpec.categorical(2), loss=Losses.MEAN_SQUARED_ERROR
            )},
            "model.task", "needs loss=",
        ),
        ({"train": None}, "train", "NNTrainParams"),
        ({"train_data": None}, "data.train", "is not set"),
        ({"train_data": iter([1])}, "data.train", "one-shot"),
        ({"train_data": {"a": 1}}, "data.train", "mapping"),
        ({"train_data": X}, "data.train", "wrap it in a DataLoader"),
        ({"val_data": X.numpy()}, "data.val", "wrap it in a DataLoader"),
        ({"val_data": torch.utils.data.TensorDataset(X, Y)}, "data.val", "single samples"),
        ({"val_data": []}, "data.val", "empty"),
        ({"train_data": lambda rows: rows}, "data.train", "without arguments"),
        ({"data_identity": ""}, "data.identity", "non-empty"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"seed": "3"}, "seed", "integer"),
        ({"callbacks": (LRMonitor,)}, "callbacks[0]", "the class itself"),
        ({"callbacks": (one_required, lambda: None)}, "callbacks[1]", "with_callback_factories"),
        ({"callbacks": (EarlyStopping(MonitorSpec("f1")),)}, "callbacks[0]", "not declared"),
        ({"callback_factories": (lambda ctx: ctx,)}, "callback_factories[0]", "without arguments"),
        ({"callback_factories": (3,)}, "callback_factories[0]", "callable"),
        ({"components": (object(),)}, "components[0]", "no component"),
        ({"provenance": {}}, "provenance", "ExperimentManifest"),
        ({"batch_adapter": 3}, "batch_adapter", "BatchAdapter"),
        ({"objective": 3}, "objective", "callable"),
        ({"objective": Objective(), "train_step_fn": print}, "objective", "not both"),
        ({"train_step_fn": 3}, "train_step_fn", "callable"),
        ({"train_step_fn": Objective()}, "train_step_fn", "objective="),
        ({"eval_step_fn": print, "val_data": None, "train": training(monitor=None)},
         "eval_step_fn", "never called"),
        ({"val_data": None}, "train.monitor", "val_loader is None"),
        ({"train": training(overwrite_existing=True)}, "train.overwrite_existing", "never replaces"),
        ({"train": training(metrics=[MetricSpec("mae")], monitor=None)},
         "train.metrics[0]", "continuous"),
        ({"train": training(metrics=[MetricSpec("acme.x")], monitor=None)},
         "train.metrics[0]", "acme.x"),
        ({"train": training(extra_metrics={"a": print}), "eval_step_fn": streaming_eval_step},
         "train.extra_metrics", "streaming_eval_step"),
        ({"train": training(monitor=MonitorSpec("nll", split="train")), "objective": Objective()},
         "train.monitor", "only the default training step"),
        ({"train": training(resume_epochs="planned")}, "train.resume_epochs", "no run is resumed"),
    ],
)  # fmt: skip
def test_each_problem_is_on_its_field(changes, path, message) -> None:
    problems = plan(**changes).validate()
    found = {problem.path: problem.message for problem in problems.diagnostics}
    assert path in found, problems
    assert message in found[path]
    assert not problems.ok
    with pytest.raises(PlanError) as error:
        plan(**changes).fit()
    assert path in {problem.path for problem in error.value.diagnostics}
    assert not os.path.exists("runs")


@pytest.mark.parametrize(
    ("resumed", "train", "path"),
    [
        ({"mode": "half"}, {}, "resume.mode"),
        ({"epochs": "some"}, {}, "resume.epochs"),
        ({"checkpoint": ""}, {}, "resume.checkpoint"),
        ({"mode": "weights_only", "epochs": "planned"}, {}, "resume.epochs"),
        ({"mode": "weights_only"}, {"resume_epochs": "planned"}, "resume.mode"),
        ({"epochs": "planned"}, {"resume_mode": "weights_only"}, "resume.epochs"),
        ({}, {"parent_run_id": "other"}, "train.parent_run_id"),
        ({}, {"resume_from_run_id": "other"}, "train.resume_from_run_id"),
    ],
)
def test_problems_of_a_resume_are_on_the_field_that_was_set(resumed, train, path) -> None:
    found = plan(train=training(**train)).resuming("abc", **resumed).validate().paths
    assert found == (path,)
    assert plan().resuming("abc", mode="stateful", epochs="planned").validate().ok


def test_all_problems_are_listed_at_once_with_a_bad_attempt_among_them() -> None:
    broken = ExperimentPlan(seed=-1)
    assert broken.validate().paths == ("model", "seed", "train")
    with pytest.raises(PlanError) as error:
        broken.fit(attempt=" ")
    assert [problem.path for problem in error.value.diagnostics] == [
        "model", "seed", "train", "attempt",
    ]  # fmt: skip
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TypeError)
    with pytest.raises(PlanError, match="seed: ExperimentPlan.seed must be"):
        broken.validate().raise_for_errors()


def test_looking_runs_nothing() -> None:
    def explode():
        raise AssertionError("a factory was called")

    class Loader:
        def __iter__(self):
            raise AssertionError("a loader was read")

    class Watched(EarlyStopping):
        bound = 0

    callback = Watched(MonitorSpec("nll"))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    examined = plan(
        train_data=explode, val_data=Loader(), callbacks=(callback,), callback_factories=(explode,)
    )
    assert examined.validate().ok
    assert callback.monitor_spec == MonitorSpec("nll")  # not bound: it has no direction yet
    assert before == (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
    )  # fmt: skip
    assert os.listdir() == []


def test_what_factories_make_is_checked_before_a_model_is_built(monkeypatch) -> None:
    def no_model(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr("nnx.plans.fitting.NNModel", no_model)
    made = plan(
        train_data=lambda: iter([1]), val_data=lambda: None,
        callback_factories=(lambda: EarlyStopping(MonitorSpec("f1")),),
    )  # fmt: skip
    assert made.validate().ok
    with pytest.raises(PlanError) as error:
        made.fit()
    assert [problem.path for problem in error.value.diagnostics] == [
        "data.train", "data.val", "callback_factories[0]",
    ]  # fmt: skip


def test_branches_leave_the_source_alone_and_keep_what_they_are_not_given() -> None:
    source = plan(data_identity="v1", train_data=[1], val_data=[2])
    other = source.with_data([3])
    assert (other.train_data, other.val_data, other.data_identity) == ([3], [2], "v1")
    assert source.train_data == [1]
    assert source.with_data(val=None).val_data is None
    assert source.with_data(identity="v2").data_identity == "v2"
    monitored = source.with_metrics(monitor=None)
    assert monitored.train.metrics == source.train.metrics
    assert monitored.train.monitor is None
    assert source.with_epochs(9).train.n_epochs == 9
    assert source.with_net(net(hidden_dims=[3])).net.hidden_dims == [3]
    assert (
        source.with_optim(NNOptimParams.builder().sgd(max_lr=0.1).build()).train.optim.max_lr == 0.1
    )
    assert source.with_step_fns(eval_step_fn=print).eval_step_fn is print
    assert source.resuming("a").without_resume().resume is None
    mine = {"lift": len}
    branch = source.with_extra_metrics(mine)
    mine["other"] = len
    assert list(branch.train.extra_metrics) == ["lift"]
    callbacks = [LRMonitor()]
    held = ExperimentPlan(callbacks=callbacks)
    callbacks.append(LRMonitor())
    assert len(held.callbacks) == 1


def test_a_dataset_object_with_loaders_is_no_batches(tmp_path) -> None:
    assert NNTabularDataset is not None
    with pytest.raises(ValueError, match="no training to change"):
        ExperimentPlan().with_epochs(3)
