"""Model factories: code under an id, which builds the module that a ``ModelSpec`` names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from nnx.errors import NNxError
from nnx.params import ModelSpec
from nnx.plugins.manager import registry
from nnx.plugins.registry import UnknownIdError
from nnx.seeding import isolated_rng

__all__ = [
    "MissingModelFactoryError",
    "ModelFactory",
    "ModelSpec",
    "build_module",
    "only_factories",
    "register_model_factory",
    "registered_model_factories",
    "resolve_model_factory",
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
