"""A trained classifier as a provider, for exactly what its head justifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from nnx.calibration.arrays import softmax
from nnx.utils.validation import show

from .errors import (
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    ProviderFailure,
    UnsupportedCapability,
)
from .provider import Capabilities
from .questions import Boolean, Choice, Question, Score
from .results import DecisionResult, validate_response

if TYPE_CHECKING:
    from nnx.nn_model import NNModel


@dataclass(slots=True)
class FixedHeadProvider:
    """Answers of a trained ``model``, whose weights, modes and runs are left alone.

    A categorical head answers a ``Choice`` (with ``ordinal`` a ``Score``) over
    exactly its ``labels`` (those of its task unless given), or over options that
    ``option_map`` maps onto them one to one. A head of one logit answers the
    ``Boolean`` ``question`` that it was trained for. ``model_calls`` counts.
    """

    model: NNModel
    labels: Sequence[str] | None = None
    option_map: Mapping[str, str] | None = None
    ordinal: bool = False
    max_batch: int | None = None
    name: str = "nnx.fixed_head"
    question: Boolean | None = None
    model_calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, "predict", None)):
            raise InvalidDecisionRequest(f"model must be an NNModel, not {show(self.model)}")
        if self.question is not None and not isinstance(self.question, Boolean):
            raise InvalidDecisionRequest("question= is the Boolean that a one-logit head answers")
        if self.question is not None and (self.labels or self.option_map or self.ordinal):
            raise InvalidDecisionRequest(
                "a head of one logit has no labels, option_map or order; leave them out"
            )
        task = self.model.task_adapter.spec if self.model.task_adapter is not None else None
        if task is not None and task.kind == "regression":
            raise UnsupportedCapability("a regression has no probabilities to answer with")
        if self.question is None and task is not None and task.kind != "categorical":
            raise UnsupportedCapability(
                f"a {task.kind} head answers no choice; a head of one logit answers the Boolean "
                "that is given as question="
            )
        if self.question is not None and task is not None and (
            task.kind != "multilabel" or task.num_outputs not in (None, 1)
        ):  # fmt: skip
            raise UnsupportedCapability("only a head of one yes/no logit answers a Boolean")
        if self.question is None:
            self.labels = self._labels(None if task is None else task.labels)
            self.option_map = self._option_map()

    def _labels(self, declared: Sequence[str] | None) -> tuple[str, ...]:
        given = declared if self.labels is None else self.labels
        if given is None:
            raise InvalidDecisionRequest(
                "the model's task names no labels; pass labels=[...] in the order of its outputs"
            )
        names = tuple(given)
        if isinstance(given, str) or len(names) < 2 or len(set(names)) != len(names):
            raise InvalidDecisionRequest(f"labels are two or more distinct names, not {given!r}")
        if declared is not None and names != tuple(declared):
            raise InvalidDecisionRequest(
                f"labels={list(names)} are not those of the model's task, {list(declared)}"
            )
        return names

    def _option_map(self) -> dict[str, str] | None:
        if self.option_map is None:
            return None
        found, names = dict(self.option_map), set(self.labels or ())
        if set(found.values()) != names or len(found) != len(names):
            raise InvalidDecisionRequest(
                f"option_map must map one option onto each of the labels {sorted(names)}"
            )
        return found

    def capabilities(self) -> Capabilities:
        kinds = {"boolean"} if self.question is not None else {"choice"}
        if self.ordinal:
            kinds.add("score")
        labels = None if self.labels is None else tuple(self.labels)
        return Capabilities(
            primitives=frozenset(kinds), modalities=frozenset({"tensor"}), labels=labels,
            max_batch=self.max_batch,
        )  # fmt: skip

    def check(self, question: Question, inputs: Any) -> None:
        """Everything that can be refused before the model runs."""
        rows = _rows(inputs)
        if rows is None and self.max_batch is not None:
            raise UnsupportedCapability("a loader has no batch size to hold against max_batch")
        self.capabilities().check(
            question, modality="tensor", batch_size=rows or 1,
            label_ids=None if isinstance(question, Boolean) else self._asked(question),
        )  # fmt: skip
        if isinstance(question, Boolean) and question.digest() != self._own().digest():
            raise UnsupportedCapability(
                f"this head was trained for {self._own().prompt!r}, not for {question.prompt!r}"
            )
        if isinstance(question, Score) and self._asked(question) != self.labels:
            raise UnsupportedCapability(
                f"the levels must be in the order of the labels, {list(self.labels or ())}"
            )

    def _own(self) -> Boolean:
        assert self.question is not None
        return self.question

    def _asked(self, question: Question) -> tuple[str, ...]:
        """The labels that the options stand for, in the question's order."""
        if self.option_map is None:
            return tuple(question.option_ids)
        unknown = [option for option in question.option_ids if option not in self.option_map]
        if unknown:
            raise UnsupportedCapability(f"option_map has no label for the option {unknown[0]!r}")
        return tuple(self.option_map[option] for option in question.option_ids)

    def decide(self, question: Question, inputs: Any) -> list[DecisionResult]:
        """One result for each row of ``inputs`` (what ``NNModel.predict`` takes)."""
        self.check(question, inputs)
        self.model_calls += 1
        try:
            logits = np.asarray(self.model.predict(inputs).logits)
        except Exception as error:
            raise ProviderFailure(f"the model failed: {type(error).__name__}: {error}") from error
        if not np.isfinite(logits).all():
            raise InvalidDecisionResponse("the model's outputs are not all finite")
        if isinstance(question, Boolean):
            return self._booleans(question, logits)
        assert isinstance(question, (Choice, Score))
        return self._choices(question, logits)

    def _booleans(self, question: Boolean, logits: np.ndarray) -> list[DecisionResult]:
        if logits.size != len(logits):
            raise UnsupportedCapability(f"outputs {logits.shape} are not one logit for each row")
        flat = logits.reshape(-1).astype(np.float64)
        odds = np.exp(-np.abs(flat))
        yes = np.where(flat >= 0, 1 / (1 + odds), odds / (1 + odds))
        return [
            validate_response(question, p, provider=self.name, raw={"logit": logit})
            for p, logit in zip(yes.tolist(), flat.tolist())
        ]

    def _choices(self, question: Choice | Score, logits: np.ndarray) -> list[DecisionResult]:
        names = tuple(self.labels or ())
        if logits.ndim != 2 or logits.shape[1] != len(names):
            raise InvalidDecisionResponse(
                f"outputs {logits.shape} do not fit the {len(names)} labels"
            )
        option_of = dict(zip(self._asked(question), question.option_ids))
        ids = [option_of[name] for name in names]
        return [
            validate_response(
                question, list(zip(ids, row)), provider=self.name, raw={"logits": tuple(raw)}
            )
            for row, raw in zip(softmax(logits).tolist(), logits.tolist())
        ]


def _rows(inputs: Any) -> int | None:
    """How many rows ``inputs`` have; ``None`` of a loader."""
    first = inputs
    if isinstance(inputs, Mapping):
        first = next(iter(inputs.values()), None)
    elif isinstance(inputs, (tuple, list)):
        first = inputs[0] if inputs else None
    if first is None:
        raise InvalidDecisionRequest("there are no inputs to decide about")
    if not hasattr(first, "shape"):
        return None
    if not len(first.shape) or not first.shape[0]:
        raise InvalidDecisionRequest(f"inputs of shape {tuple(first.shape)} have no rows")
    return int(first.shape[0])
