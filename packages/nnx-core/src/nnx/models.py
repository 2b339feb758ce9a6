"""Any ``nn.Module`` as a model: registered factories, borrowed instances, batch layouts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nnx.enums import Nets
from nnx.errors import NNxError
from nnx.params import (
    ModelSpec,
    NNCheckpointTransform,
    NNModelParams,
    NNParams,
    NNSchedulerParams,
    RuntimeModule,
)
from nnx.plugins.manager import registry
from nnx.plugins.registry import UnknownIdError
from nnx.seeding import isolated_rng
from nnx.utils.topology import module_topology, tensor_shape

__all__ = [
    "BatchAdapter",
    "KeywordInputs",
    "MissingModelFactoryError",
    "Model",
    "ModelFactory",
    "ModelSpec",
    "ModuleInputs",
    "PositionalInputs",
    "RuntimeModule",
    "adapter_for",
    "build_module",
    "check_recorded",
    "check_exportable",
    "check_state_topology",
    "check_topology",
    "check_wrapped_weights",
    "current_net_params",
    "describe_borrowed",
    "described_params",
    "module_topology",
    "only_factories",
    "register_model_factory",
    "registered_model_factories",
    "resolve_model_factory",
    "same_topology",
    "state_topology",
    "unregister_model_factory",
]

_KIND = "model factory"
_supplied: ContextVar[Mapping[tuple[str, int], ModelFactory] | None] = ContextVar(
    "supplied model factories", default=None
)


class MissingModelFactoryError(ValueError, NNxError):
    """A module cannot be rebuilt here: no factory for it is registered."""


class ModelFactory(Protocol):
    """Builds the module of a :class:`ModelSpec` from its read-only config."""

    def __call__(self, config: Mapping[str, Any], /) -> nn.Module: ...


def register_model_factory(
    id: str, version: int, factory: ModelFactory, *, replace: bool = False
) -> None:
    """Register ``factory`` for this process under ``(id, version)``.

    ``factory(config)`` returns an ``nn.Module``. Bump ``version`` when what it
    builds changes. A taken key is refused unless ``replace`` is set.
    """
    if not callable(factory):
        raise TypeError(
            f"a model factory must be a callable of one config mapping, "
            f"not {type(factory).__name__}"
        )
    owner = getattr(factory, "__qualname__", type(factory).__qualname__)
    owner = f"{getattr(factory, '__module__', None) or type(factory).__module__}.{owner}"
    registry(_KIND).register(id, version, factory, owner=owner, replace=replace)


def unregister_model_factory(id: str, version: int) -> bool:
    """Remove a factory; say whether one was registered."""
    return registry(_KIND).unregister(id, version)


def registered_model_factories() -> tuple[tuple[str, int], ...]:
    """The registered ``(id, version)`` pairs, sorted."""
    return registry(_KIND).keys()


def resolve_model_factory(spec: ModelSpec) -> ModelFactory:
    """The factory that ``spec`` names.

    Raises :class:`MissingModelFactoryError`, naming the registered versions,
    when there is none in this process.
    """
    supplied = _supplied.get()
    if supplied is not None:
        if (spec.id, spec.version) not in supplied:
            raise MissingModelFactoryError(
                f"no factory {spec.id}@v{spec.version} was supplied (supplied: "
                f"{', '.join(f'{id}@v{version}' for id, version in sorted(supplied)) or 'none'})"
            )
        return supplied[spec.id, spec.version]
    try:
        return registry(_KIND).resolve(spec.id, spec.version)
    except UnknownIdError as error:
        raise MissingModelFactoryError(
            f"{error}. Register it with nnx.register_model_factory("
            f"{spec.id!r}, {spec.version}, factory) before the model is built"
        ) from None


@contextlib.contextmanager
def only_factories(factories: Mapping[tuple[str, int], ModelFactory]) -> Iterator[None]:
    """Build from these factories alone within the block; the registry is not asked."""
    token = _supplied.set(dict(factories))
    try:
        yield
    finally:
        _supplied.reset(token)


def build_module(spec: ModelSpec) -> nn.Module:
    """The module of ``spec``: its factory, called with all random streams seeded.

    The same spec gives the same weights, and the caller's Python, NumPy and
    torch streams stay where they were.
    """
    factory = resolve_model_factory(spec)
    with isolated_rng(spec.seed):
        module = factory(spec.config)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"the model factory {spec.id}@v{spec.version} must return a torch.nn.Module, "
            f"not {type(module).__name__}"
        )
    return module


def check_exportable(module: nn.Module) -> None:
    """Refuse ONNX for a module that says ``exportable = False``, before anything is written."""
    if getattr(module, "exportable", True) is False:
        raise TypeError(
            f"{type(module).__name__} cannot be exported to ONNX; export_state_dict() keeps "
            "its weights"
        )


# -- topology ------------------------------------------------------------------------


def state_topology(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Names and shapes of all that ``module`` saves; ``None`` where a lazy layer waits."""
    return _shapes(module.state_dict())


def check_state_topology(
    module: nn.Module, state: Mapping[str, Any], *, what: str = "the module"
) -> None:
    """Compare ``module`` with saved weights by names and shapes; load nothing.

    Raises ``ValueError`` that names what is missing, unexpected or shaped
    otherwise. An uninitialized lazy tensor fits any shape.
    """
    built, saved = state_topology(module), _shapes(state)
    problems = [f"{name} is not in the checkpoint" for name in built if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in built]
    problems += [
        f"{name} is {shape} but {saved[name]} in the checkpoint"
        for name, shape in built.items()
        if name in saved and None not in (shape, saved[name]) and shape != saved[name]
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" * (len(problems) > 5))
        raise ValueError(f"{what} has another topology than the saved weights: {shown}")


def same_topology(
    before: Mapping[str, Any], now: Mapping[str, Any], *, attached: bool = False
) -> bool:
    """Whether two :func:`state_topology` agree; a lazy tensor agrees with any shape.

    With ``attached``, submodules that ``now`` has under names of their own are left out.
    """
    now = _without_attached(now, before) if attached else now
    return before.keys() == now.keys() and all(
        None in (shape, now[name]) or shape == now[name] for name, shape in before.items()
    )


def current_net_params(model: Model) -> Any:
    """The parameters that rebuild the net: its own, which surgery keeps true."""
    own = getattr(model.net, "params", None)
    return own if model.params.builtin and isinstance(own, NNParams) else model.net_params


def described_params(model: Model) -> NNModelParams:
    """``model.params``, with a borrowed module described as it is now.

    Its tensors may have changed since (adapters were put in). A run, its id and its
    checkpoints then name the module that loads them.
    """
    if isinstance(model.params.net, RuntimeModule) and not same_topology(
        model.recorded_topology, state_topology(model.net)
    ):
        return dataclasses.replace(model.params, net=RuntimeModule.of(model.net))
    return model.params


def describe_borrowed(model: Model) -> None:
    """Give a model its :func:`described_params`."""
    params = described_params(model)
    if params is not model.params:
        model.params, model.recorded_topology = params, state_topology(model.net)


def check_recorded(model: Model) -> None:
    """Refuse a net whose recorded transforms are not as they were recorded any more.

    A transform's replay may have ``changes(net, options)``, which yields
    ``(submodule, what)`` for each setting that a rebuild would not bring back.
    """
    found = []
    for transform in model.transforms:
        replay = registry("transform").resolve(transform.name, transform.version)
        changes = getattr(replay, "changes", None)
        if changes is not None:
            found += [f"{where!r}: {what}" for where, what in changes(model.net, transform.options)]
    if found:
        raise ValueError(
            "a checkpoint would rebuild another net than this one, which was changed after it was "
            f"recorded ({'; '.join(found)}). Set it back, or materialize a recipe with the new "
            "values on a fresh model"
        )


def check_topology(model: Model) -> None:
    """Refuse a model whose weights could not be loaded into what its run rebuilds.

    A borrowed module is never rebuilt, so it passes. A built-in net whose own
    ``params`` were kept true by surgery passes, and so does a submodule attached to
    the net under a name of its own, which a reload leaves out by
    ``exclude_submodules``.
    """
    descriptor, recorded = model.params.net, model.recorded_topology
    if isinstance(descriptor, RuntimeModule):
        return
    check_wrapped_weights(model)
    topology = _without_attached(state_topology(model.net), recorded)
    if topology == recorded:
        check_recorded(model)
        return
    params = getattr(model.net, "params", None)
    if isinstance(descriptor, Nets) and isinstance(params, NNParams) and not model.transforms:
        with torch.device("meta"):
            if topology == state_topology(descriptor(params=params)):
                return
    changed = [
        name
        for name in {**recorded, **topology}
        if topology.get(name, "") != recorded.get(name, "")
    ]
    raise ValueError(
        f"the net's topology was changed without a record ({', '.join(changed[:5])}), so a "
        f"checkpoint of it could not be loaded again. Record the change with a "
        f"nnx.transforms.TransformRecipe, or train the net as NNModel(module=net, ...)"
    )


def _without_attached(
    topology: Mapping[str, Any], recorded: Mapping[str, Any]
) -> Mapping[str, Any]:
    """``topology`` without named top-level submodules that the recorded net did not have."""
    known = {name.partition(".")[0] for name in recorded}
    return {
        name: shape
        for name, shape in topology.items()
        if (top := name.partition("."))[0] in known or not top[1] or top[0].isdigit()
    }


def check_wrapped_weights(model: Model) -> None:
    """Refuse pruning masks and parametrizations on a net that checkpoints must rebuild."""
    if isinstance(model.params.net, RuntimeModule):
        return
    for name, module in model.net.named_modules():
        where = f"{name or 'the net'} ({type(module).__name__})"
        for parameter in module._parameters.values():
            kind = type(parameter).__module__
            if kind.startswith(("torchao.", "torch.sparse.")):
                raise ValueError(
                    f"{where} holds a {type(parameter).__name__} weight (quantized or 2:4 sparse), "
                    f"which is for inference: train and save the model it was made from"
                )
        if parametrize.is_parametrized(module):
            problem, remove = "a parametrization", "parametrize.remove_parametrizations"
        else:
            hooks = module._forward_pre_hooks.values()
            found = [
                (what, how) for kind, what, how in _WRAPPERS for h in hooks if isinstance(h, kind)
            ]
            if not found:
                continue
            problem, remove = found[0]
        raise ValueError(
            f"{where} carries {problem}, which a checkpoint cannot rebuild. Remove it with "
            f"torch.nn.utils.{remove}, or train the net as NNModel(module=net, ...)"
        )


_WRAPPERS = (
    (prune.BasePruningMethod, "pruning masks", "prune.remove"),
    (WeightNorm, "weight_norm", "remove_weight_norm"),
    (SpectralNorm, "spectral_norm", "remove_spectral_norm"),
)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {
        name: tensor_shape(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)  # extra state may be anything
    }


# -- models ----------------------------------------------------------------------------


class Model(Protocol):
    """What trains, scores and predicts: all that the rooms below the facades know of a model.

    :class:`nnx.NNModel` is one. ``task_adapter`` is the declared task's
    :class:`~nnx.tasks.TaskAdapter`, ``None`` without one. ``transforms`` are the recorded
    changes of the net's topology, and ``recorded_topology`` is its :func:`state_topology`
    after the last of them (of a borrowed module, when it was described).
    """

    net: nn.Module
    params: NNModelParams
    net_params: NNParams | None
    loss_fn: nn.Module
    device: torch.device
    batch_adapter: BatchAdapter | None
    transforms: tuple[NNCheckpointTransform, ...]
    recorded_topology: dict[str, tuple[int, ...] | None]
    compiled: Any  # the compiled forward of a fit in progress
    in_training: bool  # whether a fit is in progress

    @property
    def task_adapter(self) -> Any: ...

    @property
    def resolved_precision(self) -> Any: ...

    @property
    def components(self) -> Sequence[Any]: ...

    def split_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]: ...

    def _build_scheduler(
        self,
        optimizer: torch.optim.Optimizer,
        params: NNSchedulerParams,
        horizon: Any,
        monitor: Any = None,
    ) -> Any: ...


# -- batches -------------------------------------------------------------------------


class BatchAdapter:
    """How a module sees a batch. Subclass it for a layout that is not here.

    Runtime only: an adapter is never stored and never part of a run id.
    """

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``(args, kwargs, target)`` of one batch: ``module(*args, **kwargs)``.

        ``target`` is ``None`` for a batch that has none.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement split(batch)")

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of inputs given without a target, as to ``predict``."""
        if isinstance(X, Mapping):
            return (), dict(X)
        return (tuple(X), {}) if isinstance(X, (tuple, list)) else ((X,), {})

    def output(self, raw: Any) -> torch.Tensor:
        """The tensor in what the module returned. The default takes a tensor only."""
        if isinstance(raw, torch.Tensor):
            return raw
        raise ValueError(
            f"the module returned {type(raw).__name__}, not a tensor; pass a batch_adapter "
            f"whose output(raw) extracts one, for example raw.logits"
        )


class PositionalInputs(BatchAdapter):
    """``(x1, ..., xn, y)`` batches: ``module(x1, ..., xn)``; without ``y`` to predict."""

    def __init__(self, n_inputs: int = 1) -> None:
        if isinstance(n_inputs, bool) or not isinstance(n_inputs, int) or n_inputs < 1:
            raise ValueError(f"PositionalInputs.n_inputs must be an integer >= 1, not {n_inputs!r}")
        self.n_inputs = n_inputs

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        n = self.n_inputs
        if n == 1 and isinstance(batch, torch.Tensor):
            return (batch,), {}, None
        if not isinstance(batch, (tuple, list)) or len(batch) not in (n, n + 1):
            raise ValueError(
                f"{self!r} expects a batch of {n} input(s) and a target, got {_layout(batch)}; "
                f"pass a batch_adapter that fits the loader"
            )
        return tuple(batch[:n]), {}, batch[n] if len(batch) > n else None

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().inputs(X)
        if kwargs or len(args) != self.n_inputs:
            raise ValueError(f"{self!r} expects {self.n_inputs} input(s), got {_layout(X)}")
        return args, kwargs

    def __repr__(self) -> str:
        return f"PositionalInputs({self.n_inputs})"


class KeywordInputs(BatchAdapter):
    """Mapping batches: ``module(**{name: batch[name] for name in inputs})``.

    ``target`` is the entry to learn; a batch without it (or ``target=None``) is
    one to predict. Other entries of the batch are ignored.
    """

    def __init__(self, inputs: Sequence[str], target: str | None = "labels") -> None:
        names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"KeywordInputs.inputs must name at least one entry, got {inputs!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"KeywordInputs.inputs repeats a name: {list(names)}")
        if target is not None and (not isinstance(target, str) or target in names):
            raise ValueError(
                f"KeywordInputs.target must be a string that is not an input, not {target!r}"
            )
        self.names = names
        self.target = target

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        _, kwargs = self.inputs(batch)
        return (), kwargs, batch.get(self.target)

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(X, Mapping):
            raise ValueError(f"{self!r} expects a mapping, got {_layout(X)}")
        missing = [name for name in self.names if name not in X]
        if missing:
            raise ValueError(f"the batch lacks the input(s) {missing}: {_layout(X)}")
        return (), {name: X[name] for name in self.names}

    def __repr__(self) -> str:
        return f"KeywordInputs({list(self.names)}, target={self.target!r})"


class ModuleInputs(BatchAdapter):
    """The layout that a module declares itself: ``unpack_batch(batch) -> (X, target)``."""

    def __init__(self, module: nn.Module) -> None:
        self._unpack = module.unpack_batch

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        X, target = self._unpack(batch)  # type: ignore[operator]
        return (*self.inputs(X), target)


def adapter_for(module: nn.Module, batch_adapter: BatchAdapter | None = None) -> BatchAdapter:
    """The adapter in force: the given one, the module's own layout, or one input."""
    if batch_adapter is not None:
        if not isinstance(batch_adapter, BatchAdapter):
            raise TypeError(
                f"batch_adapter must be a nnx.models.BatchAdapter, "
                f"not {type(batch_adapter).__name__}"
            )
        return batch_adapter
    return ModuleInputs(module) if _declares_layout(module) else _ONE_INPUT


def _declares_layout(module: nn.Module) -> bool:
    kind = type(module)
    if hasattr(kind, "unpack_batch") or "unpack_batch" in vars(module):
        return True
    # A wrapper may forward attributes. For a plain module, hasattr() would raise and
    # format an error on every batch.
    return kind.__getattr__ is not nn.Module.__getattr__ and hasattr(module, "unpack_batch")


_ONE_INPUT = PositionalInputs()


def _layout(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with {sorted(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return type(batch).__name__
