"""From a plan to a run: seed, make what factories make, build, train."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from nnx.nn_model import NNModel
from nnx.params import NNModelParams, NNTrainParams
from nnx.plans import validation
from nnx.plans.experiment import ATTEMPT_SALT_PREFIX, INHERIT, Experiment
from nnx.plans.outcomes import Diagnostic, FitResult, PlanError, SplitMetrics
from nnx.provenance import ExperimentManifest
from nnx.seeding import set_seed
from nnx.store import NNRun

if TYPE_CHECKING:
    from nnx.records import NNEvaluationDataPoint

_OF_ONE_ATTEMPT = ("n_epochs", "resume_epochs", "parent_run_id", "parent_checkpoint")
_FIELDS = ("loss", "error", "accuracy", "f1", "recall", "precision")


def fit(plan: Experiment, *, attempt: str | None) -> FitResult:
    """Train ``plan`` once."""
    refuse_ranks()
    problems = (*validation.validate(plan).diagnostics, *validation.attempt_problems(attempt))
    if problems:
        raise PlanError(problems)
    attempt_id = uuid.uuid4().hex if attempt is None else attempt
    seed = seed_of(plan)
    if seed is not None:
        set_seed(seed)
    train_data, val_data, callbacks = _made(plan)
    model = NNModel(plan.net, plan.model, batch_adapter=plan.batch_adapter)
    run = model.train(
        dataclasses.replace(planned_training(plan), train_loader=train_data, val_loader=val_data),
        callbacks=callbacks or None,
        train_step_fn=plan.train_step_fn,
        eval_step_fn=plan.eval_step_fn,
        salt=ATTEMPT_SALT_PREFIX + attempt_id,
        components=plan.components or None,
        objective=plan.objective,
        provenance=plan.provenance,
    )
    return FitResult(model, run, metrics_of(run), attempt_id)


def refuse_ranks() -> None:
    """Raise in a process group of several ranks, each of which would train a copy."""
    groups = torch.distributed
    if groups.is_available() and groups.is_initialized() and groups.get_world_size() > 1:
        raise RuntimeError(
            f"a plan trains in one process, but this one is of a group of "
            f"{groups.get_world_size()}: each would train a copy of its own into the same runs. "
            "Train one model over the group with NNModel.train(..., distributed=DDP())"
        )


def seed_of(plan: Experiment) -> int | None:
    """The plan's seed, or else the training's."""
    return plan.seed if plan.seed is not None else getattr(plan.train, "seed", None)


def planned_training(plan: Experiment) -> NNTrainParams:
    """The training with the plan's seed, data identity and resume; its loaders as they are."""
    assert isinstance(plan.train, NNTrainParams)
    changes: dict[str, Any] = {"seed": seed_of(plan)}
    if plan.data_identity is not INHERIT:
        changes["data_id"] = plan.data_identity
    if plan.resume is not None:
        resume = plan.resume
        changes |= {
            "resume_from_run_id": resume.run_id,
            "resume_from_checkpoint": resume.checkpoint,
        }
        if resume.mode is not None:
            changes["resume_mode"] = resume.mode
        if resume.epochs is not None:
            changes["resume_epochs"] = resume.epochs
    return dataclasses.replace(plan.train, **changes)


def planned_run(plan: Experiment, attempt: str) -> NNRun:
    """The run that a fit would write, without its history."""
    problems = (*validation.validate(plan).diagnostics, *validation.attempt_problems(attempt))
    if problems:
        raise PlanError(problems)
    assert isinstance(plan.model, NNModelParams)
    train = dataclasses.replace(planned_training(plan), train_loader=None, val_loader=None)
    return NNRun(net=plan.net, model=plan.model, train=train, salt=ATTEMPT_SALT_PREFIX + attempt)


def manifest_of(plan: Experiment) -> ExperimentManifest:
    """What the plan's parameters say of the experiment, for a plan that declares no provenance."""
    assert isinstance(plan.model, NNModelParams)
    train = planned_training(plan)
    model = {k: v for k, v in plan.model.state().items() if k not in ("task", "device")}
    if plan.net is not None:
        model["net_params"] = plan.net.state()
    task = None if plan.model.task is None else plan.model.task.state()
    settings = {k: v for k, v in train.state().items() if k not in _OF_ONE_ATTEMPT}
    return ExperimentManifest(
        task=task,
        labels=(task or {}).get("labels"),
        model=model,
        data={} if train.data_id is None else {"data": train.data_id},
        config={"train": settings},
    )


def metrics_of(run: NNRun) -> Mapping[str, SplitMetrics]:
    """The scores of both splits in the run's last epoch."""
    if not run.idps:
        reason = "the run ended before its first epoch did"
        none = {name: SplitMetrics(name, False, reason=reason) for name in ("train", "val")}
        return MappingProxyType(none)
    last = run.idps[-1]
    whole = last.train_summary is not None
    record = last.train_summary if last.train_summary is not None else last.train_edp
    train = SplitMetrics(
        "train", True, last.epoch_idx, "epoch" if whole else "last_batch", _scores(record)
    )
    if last.val_edp is None:
        val = SplitMetrics("val", False, last.epoch_idx, reason="the plan has no validation data")
    else:
        val = SplitMetrics("val", True, last.epoch_idx, "epoch", _scores(last.val_edp))
    return MappingProxyType({"train": train, "val": val})


def _scores(record: NNEvaluationDataPoint) -> dict[str, float]:
    """A record's numbers, those of metric functions as ``extra/<name>``; NaN is kept."""
    named = {name: getattr(record, name) for name in _FIELDS}
    named |= record.metrics
    named |= {f"extra/{name}": value for name, value in record.extra.items()}
    return {name: value for name, value in named.items() if value is not None}


def _made(plan: Experiment) -> tuple[Any, Any, list[Any]]:
    """The data and callbacks of one fit: each factory is called once, and what it made checked."""
    problems: list[Diagnostic] = []
    data = []
    for name, source in (
        ("data.train", validation.training_source(plan)),
        ("data.val", validation.validation_source(plan)),
    ):
        if source is not None and validation.is_factory(source):
            source = source()
            if source is None:
                problems.append(Diagnostic(name, "its factory made nothing (None)"))
            else:
                problems += validation.source_problems(source, name)
        data.append(source)
    callbacks = list(plan.callbacks)
    for i, factory in enumerate(plan.callback_factories):
        callback = factory()
        problems += validation.callback_problems(plan, callback, f"callback_factories[{i}]")
        callbacks.append(callback)
    if problems:
        raise PlanError(tuple(problems))
    return data[0], data[1], callbacks
