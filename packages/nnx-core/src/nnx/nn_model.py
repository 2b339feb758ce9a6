"""The model facade: a network with its loss, device and task; trained, scored, asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nnx.engine.contexts import EvalStepContext, EvalStepFn, TrainStepContext, TrainStepFn
from nnx.engine.fit import fit
from nnx.engine.owner import UpdateOwner
from nnx.engine.request import FitRequest
from nnx.engine.step import default_train_step
from nnx.enums import Devices, Nets
from nnx.models import (
    BatchAdapter,
    MissingModelFactoryError,
    adapter_for,
    build_module,
    check_exportable,
    module_topology,
    state_topology,
)
from nnx.params import (
    AnySchedulerParams,
    LossSpec,
    ModelSpec,
    NNModelParams,
    NNParams,
    NNTrainParams,
    PrecisionPolicy,
    RuntimeModule,
)
from nnx.params.net import check_net_params
from nnx.plugins import manager, siblings
from nnx.plugins.registry import UnknownIdError
from nnx.prediction import PredictionResult, PredictResult, ProbabilitySpec, inference
from nnx.tasks import TaskAdapter, task_adapter
from nnx.utils.files import atomic_write
from nnx.utils.validation import WrongTypeError

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

    from nnx.compilation.forward import CompiledForward
    from nnx.history import HistoryJournal
    from nnx.params import CompileSpec, MetricSpec, NNCheckpointTransform
    from nnx.precision import ResolvedPrecision
    from nnx.provenance import ExperimentManifest
    from nnx.records import NNEvaluationDataPoint
    from nnx.store import NNCheckpoint, NNRun
    from nnx.streaming import PredictionStream

__all__ = [
    "EvalStepContext",
    "EvalStepFn",
    "NNModel",
    "PredictResult",
    "TrainStepContext",
    "TrainStepFn",
    "default_train_step",
]


class NNModel:
    """A network, its loss, its device and, when declared, its task.

    The network comes from one of three descriptors in ``params.net``: a built-in
    (:class:`Nets`, with ``net_params``), a registered factory (:class:`ModelSpec`), or
    ``module=``, the caller's own instance, which is used as it is.

    ``batch_adapter`` says how a module reads a batch; built-in nets know it themselves.
    """

    artifact_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        net_params: NNParams | None = None,
        params: NNModelParams | None = None,
        *,
        module: torch.nn.Module | None = None,
        batch_adapter: BatchAdapter | None = None,
    ) -> None:
        params = _checked_params(net_params, params, module)
        if not params.device.is_available:
            raise RuntimeError(
                f"this machine has no device {params.device.value!r}, where the model is to live; "
                "the best that it has is Devices.get(), for NNModelParams(device=...) or "
                "NNModel.from_checkpoint(..., device=...)"
            )
        adapter = None if params.task is None else task_adapter(params.task)
        if adapter is not None:
            width = getattr(net_params, "output_dim", None)
            adapter.check_model(net=params.net, loss=params.loss, output_dim=width)
        self.params = params
        self.net_params = net_params
        self.transforms: tuple[NNCheckpointTransform, ...] = ()
        self.device = params.device()
        self.net: torch.nn.Module = (_build(net_params, params) if module is None else module).to(
            self.device
        )
        self.loss_fn: torch.nn.Module = _loss(params, net_params, adapter).to(self.device)
        adapter_for(self.net, batch_adapter)  # refuses what is no adapter
        self.batch_adapter = batch_adapter
        self._task_adapter = adapter
        self.compiled: CompiledForward | None = None  # set for the time of a compiled fit
        self.in_training = False  # set for the time of a fit
        self.recorded_topology = state_topology(self.net)

    @property
    def components(self) -> Sequence[Any]:
        """State of the model's own that every checkpoint of it carries; a subclass may have some."""
        return ()

    @property
    def artifacts(self) -> Mapping[str, bytes]:
        """Small files that travel beside the weights, by name; a subclass may have some.

        The names are among :attr:`artifact_names`. A component of the model that puts the
        same files into its state, as tensors of bytes under ``"artifacts"``, takes them
        into bundles too.
        """
        return {}

    @classmethod
    def arguments_of(cls, artifacts: Mapping[str, bytes]) -> dict[str, Any]:
        """What the constructor takes of :attr:`artifacts` that came with weights."""
        return {}

    @property
    def task_adapter(self) -> TaskAdapter | None:
        """What checks, scores and decodes for the declared task; ``None`` without one."""
        return self._task_adapter

    @property
    def resolved_precision(self) -> ResolvedPrecision:
        """The precision that training runs in on this model's device."""
        from nnx.precision import resolve_precision

        return resolve_precision(self.params, self.device)

    def split_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``(args, kwargs, target)`` of a batch, as the model's adapter reads it."""
        return adapter_for(self.net, self.batch_adapter).split(batch)

    # Training ----------------------------------------------------------------------------

    def train(
        self,
        params: NNTrainParams,
        callbacks: Sequence[Any] | None = None,
        train_step_fn: TrainStepFn | None = None,
        eval_step_fn: EvalStepFn | None = None,
        salt: str | None = None,
        components: Sequence[Any] | None = None,
        objective: Callable[[Any], Any] | None = None,
        provenance: ExperimentManifest | None = None,
        history: HistoryJournal | None = None,
        compile: CompileSpec | None = None,
        distributed: Any | None = None,
    ) -> NNRun:
        """Train and return the run, which is on disk under ``runs/<run.id>/``.

        One of three owns a batch's update: the supervised step (the default), a
        ``train_step_fn``, or the update engine with an ``objective``. ``eval_step_fn``
        replaces the built-in validation. ``salt`` tells apart runs of one
        configuration. ``components`` carry further state across a resume.

        Raises ``ValueError`` or ``TypeError`` for a request that cannot be trained,
        ``FileExistsError`` for a run that exists (unless ``overwrite_existing``), all
        before a callback runs or a loader is read; ``FloatingPointError`` when the loss
        stops being finite.
        """
        return fit(
            FitRequest(
                model=self, params=params, owner=UpdateOwner.of(train_step_fn, objective),
                callbacks=callbacks, eval_step_fn=eval_step_fn, salt=salt,
                components=components, provenance=provenance, history=history,
                compile=compile, distributed=distributed,
            )
        )  # fmt: skip

    def _build_scheduler(
        self,
        optimizer: torch.optim.Optimizer,
        params: AnySchedulerParams,
        horizon: Any,
        monitor: Any = None,
    ) -> Any:
        """The learning-rate scheduler of an optimizer. Override it for one of your own.

        An override may leave out ``monitor``, or ``horizon`` and ``monitor``.
        """
        from nnx.schedulers import build_scheduler

        return build_scheduler(optimizer, params, horizon, monitor=monitor)

    # Inference ---------------------------------------------------------------------------

    def evaluate(
        self,
        loader: Iterable[Any],
        extra_metrics: Mapping[str, Callable[..., Any]] | None = None,
        metrics: Sequence[MetricSpec] = (),
    ) -> NNEvaluationDataPoint:
        """Scores over every sample of ``loader`` at once, not a mean of batch scores."""
        return inference.evaluate(self, loader, extra_metrics=extra_metrics, metrics=metrics)

    def predict(self, X: Any) -> PredictResult:
        """Raw outputs and decoded classes of arrays, tensors, tuples, mappings or a loader."""
        return inference.predict(self, X)

    def predict_proba(self, X: Any, spec: ProbabilitySpec | None = None) -> PredictionResult:
        """Probabilities and decoded values; ``spec`` may be omitted when a task is declared."""
        return inference.predict_proba(self, X, spec)

    def iter_predict(
        self, X: Iterable[Any], spec: ProbabilitySpec | None = None, *, rich: bool = False
    ) -> PredictionStream:
        """Predictions batch by batch, in bounded memory."""
        from nnx.streaming import iter_predict

        return iter_predict(self, X, spec, rich=rich)

    # Weights -----------------------------------------------------------------------------

    def freeze(self, *patterns: str) -> int:
        """Freeze the parameters whose names match a glob; how many were newly frozen."""
        from nnx.finetune import freeze

        return freeze(self.net, *patterns)

    def unfreeze(self, *patterns: str) -> int:
        """Let the parameters whose names match a glob train; how many were frozen."""
        from nnx.finetune import unfreeze

        return unfreeze(self.net, *patterns)

    def export_state_dict(self, path: str) -> str:
        """Write ``net.state_dict()`` to ``path`` for any torch program, and return ``path``."""
        with atomic_write(path, "wb") as stream:
            torch.save(self.net.state_dict(), stream)
        return path

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: NNCheckpoint,
        device: Devices | str | None = None,
        *,
        module: torch.nn.Module | None = None,
        batch_adapter: BatchAdapter | None = None,
        precision: PrecisionPolicy | None = None,
        exclude_submodules: Sequence[str] = (),
        **model_kwargs: Any,
    ) -> Self:
        """Rebuild the model of a checkpoint, with its recorded topology changes and weights.

        ``device`` replaces the recorded device and ``precision`` the recorded policy.
        A runtime-only module cannot be rebuilt: pass a fresh instance as ``module``.
        ``exclude_submodules`` names top-level submodules of the saved net to leave out.
        The ambient random streams do not move.
        """
        from nnx.engine.rebuild import rebuild

        return rebuild(
            cls, checkpoint, device=device, module=module, batch_adapter=batch_adapter,
            precision=precision, exclude=exclude_submodules, model_kwargs=model_kwargs,
        )  # fmt: skip

    # Exchange ----------------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str], format: str, **options: Any) -> str:
        """Write the model with a registered exporter, say ``"acme.npz"``, and return the path.

        ``options`` are the exporter's own. An unknown ``format`` raises
        ``UnknownIdError``, which names the registered ones; a ``TypeError`` says that
        the exporter returned something other than the path of what it wrote.
        """
        exporter = manager.registry("exporter").resolve(format)
        written = exporter(self, os.fspath(path), **options)
        if not isinstance(written, (str, os.PathLike)) or not os.path.exists(written):
            owner = manager.registry("exporter").owner(format)
            raise TypeError(
                f"the exporter {format!r} of {owner} must return the path that it wrote, "
                f"not {written!r}"
            )
        return os.fspath(written)

    def to_onnx(
        self,
        path: str,
        example_input: torch.Tensor | tuple[Any, ...] | np.ndarray,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_batch: bool = True,
        opset_version: int = 17,
        dynamo: bool = False,
    ) -> str:
        """Export the network to ONNX (needs nnx-hub) and return ``path``."""
        check_exportable(self.net)
        export = _exporter("onnx", "to_onnx", extra="onnx")
        return export(
            self, path, example_input=example_input, input_names=input_names,
            output_names=output_names, dynamic_batch=dynamic_batch,
            opset_version=opset_version, dynamo=dynamo,
        )  # fmt: skip

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write weights and configuration in the Hub's layout (needs nnx-hub)."""
        return _exporter("hub.save_pretrained", "save_pretrained")(
            self, save_directory, *args, **kwargs
        )

    def push_to_hub(self, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Publish the model on the Hugging Face Hub (needs nnx-hub)."""
        return _exporter("hub.push_to_hub", "push_to_hub")(self, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a model from a directory or a Hub repository (needs nnx-hub)."""
        load = _exporter("hub.from_pretrained", "from_pretrained")
        return load(cls, pretrained, *args, **kwargs)


def _checked_params(
    net_params: NNParams | None, params: NNModelParams | None, module: torch.nn.Module | None
) -> NNModelParams:
    if not isinstance(params, NNModelParams):
        raise WrongTypeError(f"NNModel needs params, an NNModelParams, not {type(params).__name__}")
    if module is not None:
        return _runtime_params(net_params, params, module)
    if params.net is None:
        raise ValueError(
            "NNModelParams.net is not set: name one of the Nets, a ModelSpec, or pass "
            "NNModel(module=...)"
        )
    if isinstance(params.net, RuntimeModule):
        raise MissingModelFactoryError(
            f"{params.net.module} is a runtime-only module, which nothing here can build; "
            "pass an instance as module="
        )
    if isinstance(params.net, ModelSpec):
        if net_params is not None:
            raise ValueError("a model built from a ModelSpec takes no net_params")
    elif not isinstance(net_params, NNParams):
        raise WrongTypeError(
            f"Nets.{params.net.name} needs net_params, an NNParams, not {type(net_params).__name__}"
        )
    else:
        check_net_params(params.net, net_params)
    return params


def _runtime_params(
    net_params: NNParams | None, params: NNModelParams, module: torch.nn.Module
) -> NNModelParams:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if net_params is not None:
        raise ValueError("NNModel(module=...) takes no net_params: the module is built already")
    if params.net is None:
        return dataclasses.replace(params, net=RuntimeModule.of(module))
    if not isinstance(params.net, RuntimeModule):
        raise ValueError(
            "NNModel(module=...) needs params without a net: the module is the net, and "
            f"params.net names {params.net}"
        )
    if not params.net.describes(module):
        raise ValueError(
            f"module= has another topology than params.net describes ({params.net.module}, "
            f"{params.net.topology[:12]}; this module: {module_topology(module)[:12]})"
        )
    return params


def _loss(
    params: NNModelParams, net_params: NNParams | None, adapter: TaskAdapter | None
) -> torch.nn.Module:
    """The loss, when it can score the task and the width of the network."""
    loss_fn = params.loss()
    if adapter is not None and isinstance(params.loss, LossSpec):
        adapter.check_loss_fn(loss_fn)
    width, weight = getattr(net_params, "output_dim", None), getattr(loss_fn, "weight", None)
    if width is not None and isinstance(weight, torch.Tensor) and weight.numel() not in (1, width):
        raise ValueError(
            f"the loss {params.loss} has {weight.numel()} weights and the net output_dim={width}; "
            "give one for each output"
        )
    return loss_fn


def _build(net_params: NNParams | None, params: NNModelParams) -> torch.nn.Module:
    if isinstance(params.net, ModelSpec):
        return build_module(params.net)
    assert isinstance(params.net, Nets)
    assert net_params is not None
    return params.net(params=net_params)


def _exporter(id: str, method: str, *, extra: str | None = None) -> Callable[..., Any]:
    try:
        return manager.registry("exporter").resolve(id)
    except UnknownIdError:
        what = f"NNModel.{method} needs the exporter {id!r}. That"
        raise ImportError(siblings.how_to_get(what, "nnx-hub", extra)) from None
