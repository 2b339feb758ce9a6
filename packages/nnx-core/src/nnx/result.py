"""Errors as values: an opt-in alternative to exceptions.

NNx raises. Code that would rather branch on a value wraps a call at its
boundary and gets ``Ok(value)`` or ``Err(error)``; ``Result[T, E]`` is their
union, so ``isinstance(result, Ok)`` and ``match`` narrow it for a type checker.
Nothing is caught here but what a wrapper says that it converts: an exception in
a callback propagates.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from nnx.errors import NNxError

T = TypeVar("T")
U = TypeVar("U")
E = TypeVar("E")
F = TypeVar("F")

__all__ = [
    "BoundaryError", "Err", "Ok", "Result", "UnwrapError", "decide_result",
    "inspect_bundle_result", "validate_decision_request_result",
]  # fmt: skip


class UnwrapError(RuntimeError, NNxError):
    """``Err.unwrap()``: carries the typed error as ``.error``."""

    def __init__(self, error: Any) -> None:
        super().__init__(f"unwrapped an Err: {error!r}")
        self.error = error


class _NoTruth:
    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no truth value, since Ok(0) is a success; "
            "use .is_ok or isinstance(result, Ok)"
        )


def _result(value: Any, method: str) -> Any:
    if not isinstance(value, (Ok, Err)):
        raise TypeError(
            f"the callback of {method}() must return Ok(...) or Err(...), "
            f"not {type(value).__name__}"
        )
    return value


@dataclass(frozen=True, slots=True)
class Ok(_NoTruth, Generic[T]):
    """A success."""

    value: T

    @property
    def is_ok(self) -> bool:
        return True

    @property
    def is_err(self) -> bool:
        return False

    def map(self, fn: Callable[[T], U]) -> Ok[U]:
        """``Ok`` of ``fn(value)``."""
        return Ok(fn(self.value))

    def map_error(self, fn: Callable[[Any], Any]) -> Ok[T]:
        """Unchanged: there is no error to map."""
        return self

    def bind(self, fn: Callable[[T], Result[U, E]]) -> Result[U, E]:
        """What ``fn(value)`` returns, itself a result."""
        bound: Result[U, E] = _result(fn(self.value), "bind")
        return bound

    def recover(self, fn: Callable[[Any], Any]) -> Ok[T]:
        """Unchanged: there is nothing to recover from."""
        return self

    def unwrap(self) -> T:
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Err(_NoTruth, Generic[E]):
    """A failure, as a value."""

    error: E

    @property
    def is_ok(self) -> bool:
        return False

    @property
    def is_err(self) -> bool:
        return True

    def map(self, fn: Callable[[Any], Any]) -> Err[E]:
        """Unchanged: there is no value to map."""
        return self

    def map_error(self, fn: Callable[[E], F]) -> Err[F]:
        """``Err`` of ``fn(error)``."""
        return Err(fn(self.error))

    def bind(self, fn: Callable[[Any], Any]) -> Err[E]:
        """Unchanged: the failure passes through."""
        return self

    def recover(self, fn: Callable[[E], Result[T, F]]) -> Result[T, F]:
        """What ``fn(error)`` returns, itself a result."""
        recovered: Result[T, F] = _result(fn(self.error), "recover")
        return recovered

    def unwrap(self) -> NoReturn:
        """Raise :class:`UnwrapError`, chained to the error when that is an exception."""
        error: Any = self.error
        cause = error.cause if isinstance(error, BoundaryError) else error
        raise UnwrapError(error) from (cause if isinstance(cause, BaseException) else None)


Result = Ok[T] | Err[E]


@dataclass(frozen=True, slots=True)
class BoundaryError:
    """What a boundary that returns results says about a failure.

    ``code`` is stable and meant for branching; ``where`` names the boundary;
    ``context`` is read-only detail; ``cause`` is the converted exception.
    """

    code: str
    where: str
    context: Mapping[str, Any] = field(default_factory=dict)
    cause: BaseException | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", MappingProxyType(dict(self.context)))


def validate_decision_request_result(
    kind: str, prompt: str, options: Sequence[Any] | None = None
) -> Result[Any, BoundaryError]:
    """The typed question of plain data, or ``Err`` with code "invalid_decision_request".

    ``kind`` is "choice", "boolean" or "score"; ``options`` are pairs of id and
    description (the levels of a score), or ``None`` of a boolean.
    """
    decisions = importlib.import_module("nnx.decisions")
    state: dict[str, Any] = {"kind": kind, "prompt": prompt}
    if options is not None:
        state["levels" if kind == "score" else "options"] = options
    try:
        return Ok(decisions.question_from_state(state))
    except decisions.InvalidDecisionRequest as error:
        where = "validate_decision_request"
        return Err(BoundaryError("invalid_decision_request", where, {"kind": kind}, error))


def decide_result(
    provider: Any,
    question: Any,
    inputs: Any,
    *,
    policy: Any = None,
    model_id: str | None = None,
) -> Result[tuple[Any, ...], BoundaryError]:
    """A provider's results, or with a ``policy`` (for ``model_id``) selective decisions.

    An abstention is an ``Ok``. The codes of an ``Err`` are
    "invalid_decision_response", "provider_failure" and "unsupported_capability";
    every other exception propagates.
    """
    decisions = importlib.import_module("nnx.decisions")
    if (policy is None) != (model_id is None):
        raise ValueError("decide_result takes policy and model_id together")
    codes = (
        (decisions.InvalidDecisionResponse, "invalid_decision_response"),
        (decisions.ProviderFailure, "provider_failure"),
        (decisions.UnsupportedCapability, "unsupported_capability"),
    )
    try:
        results = tuple(provider.decide(question, inputs))
    except tuple(kind for kind, _ in codes) as error:
        code = next(code for kind, code in codes if isinstance(error, kind))
        context = {"provider": getattr(provider, "name", type(provider).__name__)}
        return Err(BoundaryError(code, "decide", context, error))
    if policy is None:
        return Ok(results)
    decide = importlib.import_module("nnx.abstention").decide
    return Ok(tuple(decide(result, policy, model_id=model_id) for result in results))


def inspect_bundle_result(path: str | os.PathLike[str]) -> Result[Any, BoundaryError]:
    """What a bundle holds (``nnx.bundles.inspect_bundle``), or why it cannot be told.

    The codes of an ``Err`` are "artifact_missing" where there is nothing at ``path`` and
    "bundle_invalid"; every other exception propagates.
    """
    bundles = importlib.import_module("nnx.bundles")
    try:
        return Ok(bundles.inspect_bundle(path))
    except bundles.BundleError as error:
        code = "bundle_invalid" if os.path.lexists(path) else "artifact_missing"
        return Err(BoundaryError(code, "inspect_bundle", {"path": os.fspath(path)}, error))
