"""What a fit refuses before a callback runs, a loader is read or a run is reserved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnx.callbacks import as_callback, history_access_of
from nnx.engine.batches import loader_length
from nnx.engine.owner import OwnerKind
from nnx.engine.topology import unowned_parameters
from nnx.finetune.param_groups import check_patterns
from nnx.models import check_topology, check_wrapped_weights, state_topology
from nnx.monitors import check_metrics
from nnx.objectives import check_step_precision
from nnx.params import MonitorSpec, RuntimeModule
from nnx.utils import validation as check
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.models import Model
    from nnx.precision import ResolvedPrecision


def check_arguments(request: FitRequest) -> None:
    """The kinds and the values of the arguments."""
    params, kind = request.params, request.optimizers.params_type
    if not isinstance(params, kind):
        given = "None" if params is None else type(params).__name__
        raise check.WrongTypeError(f"params must be an {kind.__name__}, not {given}")
    if params.train_loader is None:
        raise ValueError(
            "params.train_loader is None: training needs a loader (with_train_loader(...))"
        )
    if loader_length(params.train_loader) == 0:
        raise ValueError("params.train_loader is empty: it has no batch to train on")
    if params.val_loader is not None and _is_empty(params.val_loader):
        raise ValueError(
            "params.val_loader is empty: it has no batch to evaluate; pass None to train without"
        )
    if request.eval_step_fn is not None and not callable(request.eval_step_fn):
        raise TypeError(f"eval_step_fn must be callable, not {type(request.eval_step_fn).__name__}")
    if request.salt is not None:
        check.salt("train()", "salt", request.salt)


def _is_empty(loader: Any) -> bool:
    """Whether there is nothing to read; one process's share of something may be empty."""
    return loader_length(loader) == 0 and not getattr(getattr(loader, "partition", None), "n", 0)


def check_callbacks(request: FitRequest) -> tuple[Any, ...]:
    """The callbacks as :class:`~nnx.callbacks.Callback` objects."""
    given = tuple(request.callbacks or ())
    wrapped = tuple(as_callback(callback) for callback in given)
    if request.history is None:
        return wrapped
    from nnx.history import HistoryJournal

    if not isinstance(request.history, HistoryJournal):
        raise TypeError(
            f"history must be a HistoryJournal or None, not {type(request.history).__name__}"
        )
    for original, callback in zip(given, wrapped):
        if callback is not original:
            raise ValueError(
                f"the function callback {original!r} reads the full list of records, which a "
                'history journal does not keep; write a Callback with history_access = "full"'
            )
        history_access_of(callback)
    return wrapped


def check_model(request: FitRequest) -> None:
    """Loss, task and metrics of the model, and whether its checkpoints could be rebuilt."""
    model, params = request.model, request.params
    if model.task_adapter is not None:
        model.task_adapter.check_loss_fn(model.loss_fn)
    _check_metrics(request)
    if request.eval_step_fn is not None and params.val_loader is None:
        warn_caller(
            "eval_step_fn is never called: it validates over params.val_loader, which is None",
            RuntimeWarning,
        )
    if request.eval_step_fn is not None:
        from nnx.streaming import check_eval_step

        check_eval_step(
            request.eval_step_fn, extra_metrics=params.extra_metrics, metrics=params.metrics
        )
    if model.transforms:
        check_topology(model)
    elif request.owner.step_fn is None:
        check_reconstructible(model)
    check_wrapped_weights(model)


def _check_metrics(request: FitRequest) -> None:
    """Declared metrics must be computable where NNx computes them."""
    from nnx.streaming.evaluation import is_streaming

    params, evaluator = request.params, request.eval_step_fn
    default = request.owner.is_default
    check_metrics(
        request.model,
        params.metrics,
        owner=f"{type(params).__name__}.metrics",
        computed=default or evaluator is None or is_streaming(evaluator),
        continuable=default and params.checkpoint_every is not None,
    )


def check_monitors(request: FitRequest, callbacks: Sequence[Any]) -> None:
    """The run's monitor and those of its callbacks need the split and values they watch."""
    if request.params.monitor is not None:
        _check_monitor(request, request.params.monitor)
    for callback in callbacks:
        bind = getattr(callback, "bind_monitor", None)
        if callable(bind):
            bind(request.params.metrics)
        if isinstance(getattr(callback, "monitor_spec", None), MonitorSpec):
            _check_monitor(request, callback.monitor_spec)


def _check_monitor(request: FitRequest, spec: MonitorSpec) -> None:
    params = request.params
    if spec.split == "val" and params.val_loader is None:
        raise ValueError(
            f"monitor {spec.key} watches the validation split, but params.val_loader is None"
        )
    declared = spec.metric not in ("loss", "error")
    if spec.split == "train" and declared and not request.owner.is_default:
        raise ValueError(
            f"monitor {spec.key} watches a declared metric on the training split, which only the "
            "default training step records; watch 'loss' or 'error', or the validation split"
        )


def check_reconstructible(model: Model) -> None:
    """Refuse low-rank factors in place of a layer of a model without a recipe."""
    if isinstance(model.params.net, RuntimeModule):
        return
    layout = model.recorded_topology
    now = state_topology(model.net)
    for name in layout:
        stem, _, leaf = name.rpartition(".")
        prefix = f"{stem}." if stem else ""
        factors = {f"{prefix}0.weight", f"{prefix}1.weight"}
        if leaf == "weight" and name not in now and factors <= now.keys():
            raise ValueError(
                f"{stem!r} was replaced by low-rank factors that no recipe records, so a checkpoint "
                "could not rebuild the net. Apply nnx.transforms.low_rank with a TransformRecipe, "
                "or train the net as NNModel(module=...)"
            )


def check_precision(request: FitRequest, precision: ResolvedPrecision) -> None:
    """Steps that train in full precision only."""
    if request.owner.step_fn is not None:
        check_step_precision(request.owner.step_fn, precision)
    if request.owner.kind is OwnerKind.TRAINER_STEP and precision.reduced:
        raise ValueError(
            f"a trainer_step_fn owns its updates in full precision, but this model's precision "
            f"resolves to {precision.effective}; pass objective=, or PrecisionPolicy('fp32')"
        )


def check_trainable(request: FitRequest, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Some parameter of each optimizer must require gradients when NNx or a Trainer steps it."""
    if request.owner.kind in (OwnerKind.OBJECTIVE, OwnerKind.STEP_FUNCTION):
        return  # an objective says so itself; a train_step_fn may train something else
    for name, optimizer in optimizers.items():
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(parameter.requires_grad for parameter in owned):
            raise ValueError(
                f"all parameters of {request.optimizers.subject(name)} are frozen "
                "(requires_grad=False), so nothing would train. Unfreeze what is to train: "
                "nnx.finetune.unfreeze(model.net, pattern)"
            )


def check_optims(request: FitRequest, optims: Mapping[str, Any]) -> None:
    """Each optimizer's own validity, and that its patterns name parameters of the net."""
    for optim in optims.values():
        if not optim.is_valid():
            raise ValueError(f"params.optim is not valid: {optim}")
    for name, optim in optims.items():
        owner = request.optimizers.field(name)
        check_patterns(request.model.net, optim.param_groups or (), owner=owner)


def warn_unowned(net: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> bool:
    """Warn about parameters that require gradients and will never move; say whether it did."""
    names = unowned_parameters(net, optimizers)
    if not names:
        return False
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" * (len(names) > 5))
    warn_caller(
        f"no optimizer owns {shown}, which require gradients: they will not train. Build the "
        "optimizer without param_groups, match them with a group, or freeze them",
        RuntimeWarning,
    )
    return True
