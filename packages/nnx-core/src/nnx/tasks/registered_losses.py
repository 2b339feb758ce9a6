"""Losses by id and version: registering them, and building what a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nnx.errors import NNxError
from nnx.params.loss import LossSpec
from nnx.plugins.manager import registry
from nnx.plugins.registry import UnknownIdError

LossFactory = Callable[[Mapping[str, Any]], nn.Module]

_KIND = "loss"


class MissingLossError(ValueError, NNxError):
    """No loss is registered under the asked id and version."""


def register_loss(id: str, version: int, factory: LossFactory, *, replace: bool = False) -> None:
    """Register ``factory(config) -> nn.Module`` for this process; ``LossSpec(id)`` names it.

    The module takes raw outputs and targets and returns a scalar: the mean over rows, or
    with an attribute ``reduction = "sum"`` the sum. It has nothing to train. The factory
    raises ``ValueError`` for a config that it does not take.
    """
    if not callable(factory):
        raise ValueError(f"the loss {id}@v{version} must be a callable factory, not {factory!r}")
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    owner = f"{getattr(factory, '__module__', None)}.{name}"
    registry(_KIND).register(id, version, factory, owner=owner, replace=replace)


def unregister_loss(id: str, version: int) -> bool:
    """Forget a loss; says whether it was registered."""
    return registry(_KIND).unregister(id, version)


def registered_losses() -> tuple[tuple[str, int], ...]:
    """The registered ``(id, version)`` pairs, sorted."""
    return registry(_KIND).keys()


def build_loss(spec: LossSpec) -> nn.Module:
    """The module that ``spec`` names.

    Raises :class:`MissingLossError`, which names close matches and what to install, and
    ``ValueError`` or ``TypeError`` for a config that the loss does not take.
    """
    known = registry(_KIND)
    try:
        factory = known.resolve(spec.id, spec.version)
    except UnknownIdError as error:
        raise MissingLossError(
            f"{error}. Register it first: register_loss({spec.id!r}, {spec.version}, factory)"
        ) from None
    module = factory(spec.config)
    where = f"the loss {spec.versioned_id} of {known.owner(spec.id, spec.version)}"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where} must be an nn.Module, not {type(module).__name__}")
    if next(module.parameters(), None) is not None:
        raise ValueError(
            f"{where} has parameters of its own, which no optimizer would train; put them into "
            "the network"
        )
    return module
