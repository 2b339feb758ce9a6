"""How raw outputs become probabilities, declared rather than guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from nnx.errors import NNxError

KINDS = ("categorical", "bernoulli")


class PredictionValidationError(ValueError, NNxError):
    """A probability declaration, or outputs that do not fit one."""


@dataclass(frozen=True, kw_only=True, slots=True, init=False)
class ProbabilitySpec:
    """``kind`` "categorical" (softmax over ``class_axis``) or "bernoulli" (element-wise sigmoid).

    ``class_axis`` is the axis of classes or labels, counted from the end when
    negative; axis 0 holds the samples, so no outputs fit ``class_axis=0``.
    ``labels`` names its entries in order.
    """

    kind: str
    class_axis: int = -1
    labels: tuple[str, ...] | None = None

    def __init__(self, kind: str, class_axis: int = -1, labels: Any = None) -> None:
        if kind not in KINDS:
            raise PredictionValidationError(
                f"ProbabilitySpec.kind must be {' or '.join(map(repr, KINDS))}, not {kind!r}"
            )
        if isinstance(class_axis, bool) or not isinstance(class_axis, int):
            raise PredictionValidationError(
                f"ProbabilitySpec.class_axis must be an integer, not {class_axis!r}"
            )
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "class_axis", class_axis)
        object.__setattr__(
            self,
            "labels",
            None if labels is None else ordered_names("ProbabilitySpec.labels", labels),
        )

    def resolve_class_axis(self, ndim: int) -> int:
        """The class axis of an ``ndim``-dimensional output, from the front."""
        axis = self.class_axis + ndim if self.class_axis < 0 else self.class_axis
        if not 0 < axis < ndim:
            raise PredictionValidationError(
                f"class_axis={self.class_axis} is not a class axis of a {ndim}-dimensional output; "
                "axis 0 holds the samples"
            )
        return axis

    def state(self) -> dict[str, Any]:
        """Plain data; ``labels`` only when set."""
        state: dict[str, Any] = {"kind": self.kind, "class_axis": self.class_axis}
        if self.labels is not None:
            state["labels"] = list(self.labels)
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ProbabilitySpec:
        unknown = set(state) - {"kind", "class_axis", "labels"}
        if unknown or "kind" not in state:
            raise PredictionValidationError(
                f"not the state of a ProbabilitySpec: {dict(state)!r} "
                "(keys: kind, class_axis, labels)"
            )
        return ProbabilitySpec(**state)


def ordered_names(what: str, labels: Any) -> tuple[str, ...]:
    """Distinct non-empty names in an order; ``PredictionValidationError`` says what is wrong."""
    ordered = isinstance(labels, Iterable) and not isinstance(labels, (str, bytes, Mapping, Set))
    names = tuple(labels) if ordered else ()
    if not ordered or not all(isinstance(name, str) and name for name in names):
        raise PredictionValidationError(
            f"{what} must be a sequence of non-empty names, not {labels!r}"
        )
    if not names or len(set(names)) != len(names):
        raise PredictionValidationError(f"{what} must be distinct and at least one, not {names!r}")
    return names
