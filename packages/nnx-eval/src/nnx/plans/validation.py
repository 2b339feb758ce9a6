"""What is wrong with a plan, found without running any of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from nnx.callbacks import Callback, as_callback
from nnx.components import StatefulComponent
from nnx.engine.batches import loader_length
from nnx.engine.checks import check_monitors
from nnx.engine.owner import OwnerKind, UpdateOwner
from nnx.engine.step import default_train_step
from nnx.models import BatchAdapter, resolve_model_factory
from nnx.monitors.declared import check_inputs
from nnx.objectives import check_update_owner
from nnx.params import ModelSpec, NNModelParams, NNParams, NNTrainParams, RuntimeModule
from nnx.params.net import check_net_params
from nnx.params.training import RESUME_EPOCHS, RESUME_MODES, check_loader
from nnx.plans.experiment import INHERIT, Experiment
from nnx.plans.outcomes import Diagnostic, PlanValidation
from nnx.provenance import ExperimentManifest
from nnx.streaming.evaluation import eval_step_problems, is_streaming
from nnx.tasks.adapters import known_width, task_adapter
from nnx.tasks.semantics import Semantics
from nnx.utils import validation as check

Problems = Iterator[Diagnostic]


def validate(plan: Experiment) -> PlanValidation:
    """Every problem of ``plan``."""
    return PlanValidation(tuple(_problems(plan)))


def model_problems(plan: Experiment) -> Problems:
    """Those of the model, its network and the seed, which a probe needs."""
    yield from _model(plan)
    yield from _tried("seed", lambda: _check_seed(plan.seed))
    adapter = plan.batch_adapter
    if adapter is not None and not isinstance(adapter, BatchAdapter):
        yield Diagnostic("batch_adapter", f"must be a BatchAdapter, not {check.show(adapter)}")


def attempt_problems(attempt: Any) -> Problems:
    """What keeps ``attempt`` from naming a fit."""
    if attempt is not None:
        yield from _tried("attempt", lambda: check.salt("fit()", "attempt", attempt))


def callback_problems(plan: Experiment, callback: Any, path: str) -> Problems:
    """A callback of the wrong kind, or whose monitor the plan cannot serve."""
    try:
        as_callback(callback)
    except TypeError as error:
        yield Diagnostic(path, str(error))
        return
    if not isinstance(callback, Callback) and _needs_nothing(callback):
        yield Diagnostic(
            path,
            f"{check.show(callback)} can be called without arguments, as a factory is; pass it to "
            "with_callback_factories(...), or give a function of the records one required parameter",
        )
        return
    if isinstance(plan.train, NNTrainParams):
        params = plan.train
        request = _request(plan, dataclasses.replace(params, monitor=None))
        # On a copy: binding a monitor changes a callback.
        yield from _tried(path, lambda: check_monitors(request, [copy.copy(callback)]))


def source_problems(source: Any, path: str) -> Problems:
    """Why ``source`` is not batches that can be read again and again."""
    if isinstance(source, Mapping):
        yield Diagnostic(path, "is a mapping: iterating it gives its keys, not batches")
    elif isinstance(source, (torch.Tensor, np.ndarray)):
        kind = type(source).__name__
        yield Diagnostic(path, f"is one {kind}: its rows are no batches; wrap it in a DataLoader")
    elif isinstance(source, torch.utils.data.Dataset) and not isinstance(
        source, torch.utils.data.IterableDataset
    ):
        yield Diagnostic(
            path,
            f"is a dataset ({type(source).__name__}), which gives single samples; wrap it in a "
            "DataLoader",
        )
    else:
        yield from _tried(path, lambda: check_loader("ExperimentPlan", path, source))
        if loader_length(source) == 0:
            yield Diagnostic(path, "is empty: it has no batch")


def is_factory(source: Any) -> bool:
    """Whether ``source`` makes the data, rather than being it."""
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    return isinstance(source, type) or (callable(source) and not iterable)


def _problems(plan: Experiment) -> Problems:
    yield from model_problems(plan)
    if not isinstance(plan.train, NNTrainParams):
        yield Diagnostic("train", f"must be an NNTrainParams, not {check.show(plan.train)}")
    else:
        yield from _training(plan, plan.train)
        yield from _resuming(plan, plan.train)
    yield from _data(plan)
    yield from _updates(plan)
    for i, callback in enumerate(plan.callbacks):
        yield from callback_problems(plan, callback, f"callbacks[{i}]")
    for i, factory in enumerate(plan.callback_factories):
        yield from _factory(factory, f"callback_factories[{i}]")
    for i, component in enumerate(plan.components):
        if not isinstance(component, StatefulComponent):
            yield Diagnostic(
                f"components[{i}]",
                f"{check.show(component)} is no component: it must define component_spec(), "
                "component_state() and load_component_state(state, *, version)",
            )
    if plan.provenance is not None and not isinstance(plan.provenance, ExperimentManifest):
        yield Diagnostic(
            "provenance", f"must be an ExperimentManifest, not {check.show(plan.provenance)}"
        )


def _model(plan: Experiment) -> Problems:
    model: Any = plan.model
    net: Any = plan.net
    if net is not None and not isinstance(net, NNParams):
        yield Diagnostic("net", f"must be an NNParams or None, not {check.show(net)}")
        return
    if not isinstance(model, NNModelParams):
        yield Diagnostic("model", f"must be an NNModelParams, not {check.show(model)}")
        return
    if model.net is None:
        yield Diagnostic("model.net", "is not set: name one of the Nets, or a ModelSpec")
    elif isinstance(model.net, RuntimeModule):
        yield Diagnostic(
            "model.net",
            f"{model.net.module} is a runtime-only module, which a plan cannot build anew; "
            "register a factory and name it with a ModelSpec",
        )
    elif isinstance(model.net, ModelSpec):
        spec = model.net
        yield from _tried("model.net", lambda: resolve_model_factory(spec))
        if net is not None:
            yield Diagnostic("net", "must be None: a ModelSpec carries its own configuration")
    elif net is None:
        yield Diagnostic("net", f"is not set: Nets.{model.net.name} needs an NNParams")
    else:
        builtin = model.net
        yield from _tried("net", lambda: check_net_params(builtin, net))
    if not model.device.is_available:
        yield Diagnostic("model.device", f"this machine has no device {model.device.value!r}")
    if model.task is not None:
        width = getattr(net, "output_dim", None)
        adapter = task_adapter(model.task)
        yield from _tried(
            "model.task",
            lambda: adapter.check_model(net=model.net, loss=model.loss, output_dim=width),
        )


def _training(plan: Experiment, train: NNTrainParams) -> Problems:
    if train.overwrite_existing:
        yield Diagnostic(
            "train.overwrite_existing",
            "a plan never replaces a run: every fit is an attempt of its own",
        )
    if not train.optim.is_valid():
        yield Diagnostic("train.optim", f"is not valid: {train.optim}")
    yield from _metrics(plan, train)
    if train.monitor is not None:
        request = _request(plan, train)
        yield from _tried("train.monitor", lambda: check_monitors(request, ()))
    for where, problem in eval_step_problems(
        plan.eval_step_fn, extra_metrics=train.extra_metrics, metrics=train.metrics
    ):
        yield Diagnostic(f"train.{where}", problem)


def _metrics(plan: Experiment, train: NNTrainParams) -> Problems:
    """Each declared metric is registered and reads what the model gives."""
    computed = _default_step(plan) or plan.eval_step_fn is None or is_streaming(plan.eval_step_fn)
    semantics, width = None, None
    if computed and isinstance(plan.model, NNModelParams):
        semantics, width = _semantics(plan, plan.model)
    for i, spec in enumerate(train.metrics):
        path = f"train.metrics[{i}]"

        def checked(spec: Any = spec, path: str = path) -> None:
            check_inputs([spec], semantics, owner=path, width=width)

        yield from _tried(path, checked)


def _semantics(plan: Experiment, model: NNModelParams) -> tuple[Semantics, int | None]:
    """What outputs mean, and how many there are, from the parameters alone."""
    adapter = None if model.task is None else task_adapter(model.task)
    stand_in: Any = SimpleNamespace(task_adapter=adapter, net_params=plan.net, params=model)
    if adapter is None:
        return Semantics.of_loss(model.loss()), known_width(stand_in)
    return adapter.semantics, known_width(stand_in)


def _resuming(plan: Experiment, train: NNTrainParams) -> Problems:
    resume = plan.resume
    if resume is not None:
        yield from _tried("resume.run_id", lambda: check.text("resuming", "run_id", resume.run_id))
        yield from _tried(
            "resume.checkpoint", lambda: check.text("resuming", "checkpoint", resume.checkpoint)
        )
        for name, known in (("mode", RESUME_MODES), ("epochs", RESUME_EPOCHS)):
            value = getattr(resume, name)
            if value is not None and value not in known:
                yield Diagnostic(
                    f"resume.{name}", f"must be one of {', '.join(known)}, not {value!r}"
                )
        for name in ("parent_run_id", "resume_from_run_id"):
            if getattr(train, name) is not None:
                yield Diagnostic(
                    f"train.{name}",
                    f"names {getattr(train, name)!r}, but the plan resumes {resume.run_id!r}; "
                    "leave one of the two out",
                )
    own = resume is not None and resume.epochs is not None
    epochs = resume.epochs if own and resume is not None else train.resume_epochs
    where = "resume.epochs" if own else "train.resume_epochs"
    if epochs != "planned":
        return
    if resume is None and train.resume_from_run_id is None:
        yield Diagnostic(where, "is 'planned', but no run is resumed, whose plan would go on")
        return
    mode = train.resume_mode if resume is None or resume.mode is None else resume.mode
    if mode == "weights_only":
        if not own and resume is not None and resume.mode is not None:
            where = "resume.mode"
        yield Diagnostic(where, "a 'planned' horizon and 'weights_only', which restores no plan")


def _data(plan: Experiment) -> Problems:
    train = plan.train if isinstance(plan.train, NNTrainParams) else None
    source = training_source(plan)
    if source is None:
        if train is not None:
            yield Diagnostic("data.train", "is not set: with_data(train=...), or a train_loader")
    else:
        yield from _source(source, "data.train")
    validation = validation_source(plan)
    if validation is not None:
        yield from _source(validation, "data.val")
    elif plan.eval_step_fn is not None:
        yield Diagnostic("eval_step_fn", "is never called: the plan has no validation data")
    identity = plan.data_identity
    if identity is not INHERIT and identity is not None:
        yield from _tried(
            "data.identity", lambda: check.text("ExperimentPlan", "data_identity", identity)
        )


def training_source(plan: Experiment) -> Any:
    """The training data, or what makes it."""
    return getattr(plan.train, "train_loader", None) if plan.train_data is None else plan.train_data


def validation_source(plan: Experiment) -> Any:
    """The validation data, or what makes it; ``None`` without."""
    return getattr(plan.train, "val_loader", None) if plan.val_data is INHERIT else plan.val_data


def _source(source: Any, path: str) -> Problems:
    yield from (_factory(source, path) if is_factory(source) else source_problems(source, path))


def _updates(plan: Experiment) -> Problems:
    for name in ("train_step_fn", "eval_step_fn"):
        value = getattr(plan, name)
        if value is not None and not callable(value):
            yield Diagnostic(name, f"must be callable, not {check.show(value)}")
    both = plan.objective is not None
    yield from _tried(
        "objective" if both else "train_step_fn",
        lambda: check_update_owner(objective=plan.objective, step_fn=plan.train_step_fn),
    )


def _factory(factory: Any, path: str) -> Problems:
    if not callable(factory):
        yield Diagnostic(path, f"must be callable without arguments, not {check.show(factory)}")
    elif not _needs_nothing(factory):
        yield Diagnostic(path, f"{check.show(factory)} must be callable without arguments")


def _needs_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        return True
    return True


def _default_step(plan: Experiment) -> bool:
    return plan.objective is None and plan.train_step_fn in (None, default_train_step)


def _request(plan: Experiment, train: NNTrainParams) -> Any:
    """As much of a fit's request as the checks of monitors read."""
    has_validation = validation_source(plan) is not None
    params = dataclasses.replace(
        train, train_loader=None, val_loader=[()] if has_validation else None
    )
    owner = UpdateOwner()
    if plan.objective is not None:
        owner = UpdateOwner(OwnerKind.OBJECTIVE, plan.objective)
    elif not _default_step(plan):
        owner = UpdateOwner(OwnerKind.STEP_FUNCTION, plan.train_step_fn)
    return SimpleNamespace(params=params, owner=owner)


def _check_seed(seed: Any) -> None:
    if seed is not None:
        check.count("ExperimentPlan", "seed", seed, at_least=0, at_most=2**32 - 1)


def _tried(path: str, checked: Callable[[], object]) -> Problems:
    try:
        checked()
    except (ValueError, TypeError, LookupError, ImportError) as error:
        yield Diagnostic(path, str(error))
