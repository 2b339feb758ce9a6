"""What a model predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

from nnx.params.base import check_keys, put
from nnx.params.probability import ProbabilitySpec
from nnx.plugins.registry import load_reference
from nnx.utils import validation as check

TASK_KINDS = ("categorical", "multilabel", "regression")
_KEYS = ("version", "kind", "num_outputs", "ignore_index", "threshold", "labels")


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A categorical, multilabel or regression task.

    ``num_outputs`` is the width of the output, ``ignore_index`` the categorical
    target that marks a row to leave out, ``threshold`` the probability at which
    a multilabel output counts as on, ``labels`` the names of the outputs. The
    labels of a multilabel or regression task tell its ``num_outputs``.
    """

    kind: str
    num_outputs: int | None = None
    ignore_index: int | None = None
    threshold: float = 0.5
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        owner = "TaskSpec"
        put(self, kind=check.choice(owner, "kind", self.kind, TASK_KINDS))
        if self.num_outputs is not None:
            put(self, num_outputs=check.count(owner, "num_outputs", self.num_outputs))
        if self.ignore_index is not None:
            if self.kind != "categorical":
                check.refuse(owner, "ignore_index", self.ignore_index, f"None for {self.kind}")
            put(self, ignore_index=check.integer(owner, "ignore_index", self.ignore_index))
        put(self, threshold=check.real(owner, "threshold", self.threshold, at_least=0, at_most=1))
        if self.threshold != 0.5 and self.kind != "multilabel":
            check.refuse(owner, "threshold", self.threshold, f"left at 0.5 for {self.kind}")
        if self.labels is not None:
            labels = self._checked_labels()
            put(self, labels=labels)
            if self.num_outputs is None and self.kind != "categorical":
                put(self, num_outputs=len(labels))

    def _checked_labels(self) -> tuple[str, ...]:
        names: Any = self.labels
        if isinstance(names, str) or not isinstance(names, Sequence):
            check.refuse("TaskSpec", "labels", names, "a sequence of names")
        labels = tuple(check.text("TaskSpec", f"labels[{i}]", name) for i, name in enumerate(names))
        if len(set(labels)) != len(labels):
            check.refuse("TaskSpec", "labels", labels, "without duplicates")
        if self.num_outputs is not None and len(labels) != self.num_outputs:
            check.refuse("TaskSpec", "labels", labels, f"{self.num_outputs} names")
        return labels

    @classmethod
    def categorical(
        cls,
        num_classes: int | None = None,
        *,
        ignore_index: int | None = None,
        labels: Sequence[str] | None = None,
    ) -> TaskSpec:
        """One class out of ``num_classes`` for each row."""
        return cls(
            kind="categorical",
            num_outputs=num_classes,
            ignore_index=ignore_index,
            labels=_names(labels),
        )

    @classmethod
    def multilabel(
        cls,
        num_labels: int | None = None,
        *,
        threshold: float = 0.5,
        labels: Sequence[str] | None = None,
    ) -> TaskSpec:
        """``num_labels`` independent yes/no outputs for each row."""
        return cls(
            kind="multilabel", num_outputs=num_labels, threshold=threshold, labels=_names(labels)
        )

    @classmethod
    def regression(
        cls, num_targets: int | None = None, *, labels: Sequence[str] | None = None
    ) -> TaskSpec:
        """``num_targets`` real values for each row."""
        return cls(kind="regression", num_outputs=num_targets, labels=_names(labels))

    def probability_spec(self) -> ProbabilitySpec | None:
        """How outputs become probabilities; ``None`` for a regression."""
        spec = load_reference("nnx.tasks.semantics:probability_spec")(self)
        return cast("ProbabilitySpec | None", spec)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"version": 1, "kind": self.kind}
        if self.num_outputs is not None:
            state["num_outputs"] = self.num_outputs
        if self.ignore_index is not None:
            state["ignore_index"] = self.ignore_index
        if self.threshold != 0.5:
            state["threshold"] = self.threshold
        if self.labels is not None:
            state["labels"] = list(self.labels)
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> TaskSpec:
        check_keys("TaskSpec", state, _KEYS)
        if state.get("version", 1) != 1:
            check.refuse("TaskSpec", "version", state["version"], "1")
        if "kind" not in state:
            raise ValueError("TaskSpec lacks 'kind'")
        return TaskSpec(**{key: state[key] for key in _KEYS[1:] if key in state})


def _names(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    # A lone string, and what has no order, are left for the constructor to refuse.
    ordered = isinstance(labels, Iterable) and not isinstance(labels, (str, bytes, Mapping, Set))
    return tuple(labels) if ordered else labels  # type: ignore[arg-type, return-value]
