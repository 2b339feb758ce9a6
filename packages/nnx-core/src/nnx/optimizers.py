"""Building optimizers: torch's own, and those that a registered factory makes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nnx.enums import Optims
from nnx.errors import NNxError
from nnx.finetune.param_groups import build_param_groups
from nnx.params.optim import (
    AnyOptimParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    check_momentum,
    optim_params_from_state,
)
from nnx.params.registered import OptimizerFactorySpec
from nnx.plugins import manager
from nnx.plugins.registry import UnknownIdError
from nnx.utils import validation as check

__all__ = [
    "AnyOptimParams",
    "MissingOptimizerFactoryError",
    "NNOptimFactoryParams",
    "OptimizerFactory",
    "OptimizerFactorySpec",
    "build_optimizer",
    "optim_params_from_state",
    "register_optimizer_factory",
    "registered_optimizer_factories",
    "resolve_optimizer_factory",
    "unregister_optimizer_factory",
]

# Takes the resolved parameter groups and the spec's read-only config.
OptimizerFactory = Callable[[list[dict[str, Any]], Mapping[str, Any]], torch.optim.Optimizer]

_KIND = "optimizer factory"


class MissingOptimizerFactoryError(ValueError, NNxError):
    """No optimizer factory is registered under the asked id and version."""


def register_optimizer_factory(
    id: str, version: int, factory: OptimizerFactory, *, replace: bool = False
) -> None:
    """Register ``factory(param_groups, config) -> torch.optim.Optimizer`` for this process.

    The groups carry explicit ``params``, ``lr`` and ``weight_decay``; the config
    is read-only. The factory must return an optimizer over exactly those
    parameters, and should do nothing else: it may be called for a run that is
    then refused. Give a changed factory a new ``version``.
    """
    if not callable(factory):
        raise ValueError(
            f"the optimizer factory {id}@v{version} must be callable, not {check.show(factory)}"
        )
    owner = getattr(factory, "__qualname__", type(factory).__qualname__)
    owner = f"{getattr(factory, '__module__', None) or type(factory).__module__}.{owner}"
    manager.registry(_KIND).register(id, version, factory, owner=owner, replace=replace)


def unregister_optimizer_factory(id: str, version: int) -> bool:
    """Forget a factory; says whether it was registered."""
    return manager.registry(_KIND).unregister(id, version)


def registered_optimizer_factories() -> tuple[tuple[str, int], ...]:
    """The registered ``(id, version)`` pairs, sorted."""
    return manager.registry(_KIND).keys()


def resolve_optimizer_factory(spec: OptimizerFactorySpec) -> OptimizerFactory:
    """The factory that ``spec`` names.

    Raises :class:`MissingOptimizerFactoryError`, naming the registered versions,
    close matches and the distribution to install.
    """
    try:
        factory = manager.registry(_KIND).resolve(spec.id, spec.version)
    except UnknownIdError as error:
        raise MissingOptimizerFactoryError(
            f"{error}. Register it before training: register_optimizer_factory"
            f"({spec.id!r}, {spec.version}, factory)"
        ) from None
    if not callable(factory):
        raise ValueError(f"the optimizer factory {spec.versioned_id} is not callable")
    return factory


def build_optimizer(
    net: nn.Module, params: AnyOptimParams, *, strict_param_groups: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that ``params`` describes, over ``net``'s parameters.

    Without ``param_groups`` one group holds every parameter, frozen ones too, so
    that they train once they are unfrozen. With them, see
    :func:`nnx.finetune.build_param_groups`; ``strict_param_groups`` is its
    ``strict``.
    """
    _import_dynamo()
    if isinstance(params, NNOptimParams):
        return params.name(
            net,
            lr_start=params.max_lr,
            weight_decay=params.weight_decay,
            momentum=params.momentum,
            param_groups=params.param_groups,
            strict_param_groups=strict_param_groups,
            eps=params.eps,
        )
    if not isinstance(params, NNOptimFactoryParams):
        raise ValueError(
            f"an optimizer is built from NNOptimParams or NNOptimFactoryParams, not {check.show(params)}"
        )
    factory = resolve_optimizer_factory(params.factory)
    groups = _groups(
        net, params.max_lr, params.weight_decay, params.param_groups, strict_param_groups
    )
    expected = [parameter for group in groups for parameter in group["params"]]
    optimizer = factory(groups, params.factory.config)
    _check_made(optimizer, params.factory, net, expected)
    return optimizer


def _import_dynamo() -> None:
    """Import what torch imports with its first optimizer, from a stack that holds nothing.

    The import leaves the frames below it in a reference cycle. Those of a fit would
    keep its loaders, and their workers, until the next garbage collection.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=_attempt_import, args=("torch._dynamo",))
        thread.start()
        thread.join()


def _attempt_import(name: str) -> None:
    with contextlib.suppress(Exception):  # torch says so itself where it needs it
        importlib.import_module(name)


def build_named(
    name: Optims,
    net: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    momentum: float | tuple[float, float],
    param_groups: Sequence[NNParamGroupSpec] | None,
    strict: bool,
    eps: float,
) -> torch.optim.Optimizer:
    """What calling an :class:`Optims` member does."""
    owner = repr(name)
    checked: Any = check_momentum(owner, name, momentum)
    lr = check.real(owner, "lr_start", lr, at_least=0)
    weight_decay = check.real(owner, "weight_decay", weight_decay, at_least=0)
    eps = check.real(owner, "eps", eps, above=0)
    groups = _groups(net, lr, weight_decay, param_groups, strict)
    if name.is_adam:
        cls = torch.optim.AdamW if name is Optims.ADAMW else torch.optim.Adam
        return cls(
            groups,
            lr=lr,
            betas=checked,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=name is Optims.ADAM_AMSGRAD,
        )
    return torch.optim.SGD(
        groups,
        lr=lr,
        momentum=checked,
        weight_decay=weight_decay,
        nesterov=name is Optims.SGD_NESTEROV,
    )


def _groups(
    net: nn.Module,
    lr: float,
    weight_decay: float,
    specs: Sequence[NNParamGroupSpec] | None,
    strict: bool,
) -> list[dict[str, Any]]:
    if specs is None:
        groups = [{"params": list(net.parameters()), "lr": lr, "weight_decay": weight_decay}]
    else:
        groups = build_param_groups(
            net, specs, default_lr=lr, default_weight_decay=weight_decay, strict=strict
        )
    if not any(group["params"] for group in groups):
        raise ValueError(
            f"{type(net).__name__} has no parameter to optimize: it has none, or all of them are "
            "frozen (nnx.finetune.unfreeze)"
        )
    return groups


def _check_made(
    optimizer: Any, spec: OptimizerFactorySpec, net: nn.Module, expected: list[nn.Parameter]
) -> None:
    """A factory's optimizer holds exactly the parameters it was given, each once."""
    where = f"the optimizer factory {spec.versioned_id}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where} must return a torch.optim.Optimizer, not {check.show(optimizer)}")
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    given = {id(parameter) for parameter in expected}
    problems = []
    missing = [names[key] for key in (id(p) for p in expected) if key not in held]
    twice = [names.get(key, "a foreign one") for key, times in held.items() if times > 1]
    foreign = [names.get(key, "one that the net does not have") for key in held if key not in given]
    for problem, found in (("lacks", missing), ("repeats", twice), ("adds", foreign)):
        if found:
            problems.append(f"{problem} {', '.join(found)}")
    if problems:
        raise ValueError(
            f"{where} must return an optimizer over exactly the parameters it was given; "
            f"the one it returned {'; '.join(problems)}"
        )
