"""What the training configurations refuse early, and what they carry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nnx import (
    Checkpoints,
    MetricSpec,
    MonitorSpec,
    NNOptimParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    Optims,
)
from torch.utils.data import DataLoader, TensorDataset

ADAM = NNOptimParams.builder().adam(max_lr=0.1).build()
RUN = "0123456789abcdef0123456789abcdef"


def single(**values):
    return NNTrainParams(**{"n_epochs": 2, **values})


def several(**values):
    return NNTrainerParams(**{"n_epochs": 2, "optims": {"a": ADAM}, **values})


both = pytest.mark.parametrize("make", [single, several], ids=["NNTrainParams", "NNTrainerParams"])


def test_the_defaults_are_the_documented_ones():
    params = NNTrainParams(n_epochs=1)
    assert params.optim == NNOptimParams(
        name=Optims.ADAM, max_lr=0.01, weight_decay=5e-5, momentum=(0.9, 0.999)
    )
    assert params.scheduler == NNSchedulerParams(
        min_lr=1e-7, factor=0.95, patience=8, cooldown=2, threshold=1e-3
    )
    assert params.resume_from_checkpoint == "last"
    assert (params.resume_mode, params.resume_epochs) == ("auto", "additional")


class Wrapped:
    """Its own iterator, once."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


class StartsAnew:
    """Its own iterator, which starts anew each time."""

    def __iter__(self):
        self.left = [1, 2]
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop()


LOADER = DataLoader(TensorDataset(torch.zeros(4, 1)))


@both
@pytest.mark.parametrize("field", ["train_loader", "val_loader"])
@pytest.mark.parametrize(
    "loader",
    [
        (x for x in [1]), iter([1]), map(str, [1]), zip([1], [2]), enumerate([1]), reversed([1]),
        Wrapped(), iter(LOADER),
    ],
    ids=lambda loader: type(loader).__name__,
)  # fmt: skip
def test_a_one_shot_iterator_is_no_loader(make, field, loader):
    with pytest.raises(ValueError, match=rf"{field} is a one-shot iterator .* second epoch"):
        make(**{field: loader})


@both
@pytest.mark.parametrize("loader", [[1], (1,), LOADER, StartsAnew(), range(3)])
def test_anything_that_can_be_read_again_is_a_loader(make, loader):
    assert make(train_loader=loader).train_loader is loader
    assert make().with_train_loader(loader).train_loader is loader
    assert make().with_val_loader(loader).val_loader is loader


def test_the_generator_is_not_read_by_the_refusal():
    numbers = iter([1, 2])
    with pytest.raises(ValueError, match="one-shot"):
        single(train_loader=numbers)
    assert list(numbers) == [1, 2]


@both
def test_what_is_no_iterable_is_no_loader(make):
    with pytest.raises(ValueError, match=r"must be an iterable of batches, not 'data\.csv'"):
        make(train_loader="data.csv")
    with pytest.raises(ValueError, match="train_loader must be an iterable of batches, not 3"):
        make(train_loader=3)


@both
def test_a_monitor_watches_the_loss_the_error_or_a_declared_metric(make):
    for metric in ("loss", "error"):
        assert make(monitor=MonitorSpec(metric=metric)).monitor.mode == "min"
    declared = make(metrics=[MetricSpec("f1", name="macro")], monitor=MonitorSpec(metric="macro"))
    assert declared.metrics == (MetricSpec("f1", name="macro"),)
    with pytest.raises(
        ValueError,
        match=r"\.monitor watches 'f1', which is not declared.*known: loss, error, macro",
    ):
        make(metrics=[MetricSpec("f1", name="macro")], monitor=MonitorSpec(metric="f1"))
    with pytest.raises(ValueError, match=r"watches 'nll'.*metrics=\[MetricSpec\('nll'\)\]"):
        make(monitor=MonitorSpec(metric="nll"))
    with pytest.raises(ValueError, match="'loss', which is both the run's own"):
        make(metrics=[MetricSpec("nll", name="loss")], monitor=MonitorSpec(metric="loss"))


@both
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (MetricSpec("nll"), "metrics must be a sequence of MetricSpec"),
        ("nll", "metrics must be a sequence of MetricSpec"),
        (["nll"], r"metrics\[0\] must be a MetricSpec, not 'nll'"),
        ([MetricSpec("nll"), MetricSpec("brier", name="nll")], r"metrics\[1\] must be named apart"),
    ],
)
def test_metrics_are_specs_with_names_of_their_own(make, metrics, message):
    with pytest.raises(ValueError, match=message):
        make(metrics=metrics)


@both
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resume_mode": "weights"}, "resume_mode must be one of auto, stateful, weights_only"),
        (
            {"resume_from_run_id": RUN, "resume_from_checkpoint": None},
            "resume_from_checkpoint must be the name of a checkpoint of the resumed run",
        ),
        ({"resume_from_checkpoint": ""}, "resume_from_checkpoint must be a non-empty string"),
        ({"resume_from_run_id": ""}, "resume_from_run_id must be a non-empty string"),
        ({"parent_run_id": 3}, "parent_run_id must be a non-empty string"),
        ({"seed": 2**32}, "seed must be an integer >= 0 and <= 4.29497e"),
        ({"data_id": 3}, "data_id must be a non-empty string, not 3"),
        ({"overwrite_existing": 1}, "overwrite_existing must be True or False"),
        ({"save_phase_checkpoints": None}, "save_phase_checkpoints must be True or False"),
        ({"extra_metrics": [len]}, "extra_metrics must be a mapping from names to callables"),
        ({"extra_metrics": {"m": 3}}, r"extra_metrics\['m'\] must be a callable"),
        ({"monitor": "loss"}, "monitor must be a MonitorSpec"),
    ],
)
def test_what_contradicts_or_is_out_of_domain_is_refused(make, values, message):
    with pytest.raises(ValueError, match=message):
        make(**values)


def test_a_planned_resume_needs_the_plan_that_weights_alone_do_not_carry():
    with pytest.raises(ValueError, match="resume_epochs must be one of additional, planned"):
        single(resume_epochs="all")
    with pytest.raises(ValueError, match="resume_epochs must be 'additional' with resume_mode='w"):
        single(resume_from_run_id=RUN, resume_mode="weights_only", resume_epochs="planned")


@both
def test_a_resume_request_is_stored_as_lineage_and_comes_back_as_lineage(make):
    params = make(
        resume_from_run_id=RUN, resume_from_checkpoint=Checkpoints.BEST, resume_mode="stateful"
    )
    state = params.state()
    assert (state["parent_run_id"], state["parent_checkpoint"]) == (RUN, "best")
    assert "resume_mode" not in state
    again = type(params).from_state(state)
    assert again.resume_from_run_id is None
    assert (again.parent_run_id, again.resume_from_checkpoint) == (RUN, "best")
    assert again.resume_mode == "auto"
    assert again.state() == state
    further = dataclasses.replace(again, resume_from_run_id="b" * 32, resume_from_checkpoint="last")
    assert further.state()["parent_run_id"] == "b" * 32


@both
def test_only_what_is_set_is_stored(make):
    bare = make().state()
    runtime = make(
        train_loader=[1], val_loader=[2], extra_metrics={"m": len}, overwrite_existing=True,
        resume_mode="weights_only", resume_from_checkpoint="best",
    )  # fmt: skip
    assert runtime.state() == bare
    stored = make(checkpoint_every=5, seed=0, data_id="d", save_phase_checkpoints=False)
    assert stored.state() == {
        **bare, "checkpoint_every": 5, "seed": 0, "data_id": "d", "save_phase_checkpoints": False,
    }  # fmt: skip
    assert type(stored).from_state(stored.state()) == stored


def test_resume_epochs_is_part_of_the_id():
    assert single(resume_epochs="planned").state()["resume_epochs"] == "planned"


@both
def test_loaders_are_compared_by_identity_and_never_read(make):
    batches = [torch.zeros(2), torch.ones(2)]
    assert make(train_loader=batches) == make(train_loader=batches)
    assert make(train_loader=batches) != make(train_loader=list(batches))
    assert hash(make(train_loader=batches)) == hash(make(train_loader=batches))
    assert make() != single(n_epochs=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"name": "adam"}}, "optim must be an NNOptimParams or NNOptimFactoryParams"),
        ({"optim": NNOptimParams.builder().adam(max_lr=1)}, "optim must be an NNOptimParams"),
        ({"scheduler": 1}, "scheduler must be an NNSchedulerParams or SchedulerSpec"),
    ],
)
def test_optim_and_scheduler_are_params(values, message):
    with pytest.raises(ValueError, match=f"NNTrainParams.{message}"):
        single(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optims": [ADAM]}, "optims must be a mapping from names"),
        ({"optims": {1: ADAM}}, "optims name must be a non-empty string, not 1"),
        ({"optims": {"a": "adam"}}, r"optims\['a'\] must be an NNOptimParams"),
        ({"schedulers": {"a": ADAM}}, r"schedulers\['a'\] must be an NNSchedulerParams"),
        ({"auto_step_schedulers": 0}, "auto_step_schedulers must be True or False"),
    ],
)
def test_a_trainer_takes_named_params(values, message):
    with pytest.raises(ValueError, match=f"NNTrainerParams.{message}"):
        several(**values)
