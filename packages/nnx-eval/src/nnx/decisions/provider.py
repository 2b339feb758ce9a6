"""What answers questions, and what it says that it can answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .errors import InvalidDecisionRequest, UnsupportedCapability
from .questions import Boolean, Choice, Question, Score
from .results import DecisionResult

PRIMITIVES = ("choice", "boolean", "score")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider answers: kinds of questions, of inputs, and over which labels.

    A provider without ``dynamic_labels`` answers over its own ``labels`` alone.
    ``max_batch`` is the number of rows of one call.
    """

    primitives: frozenset[str]
    modalities: frozenset[str]
    dynamic_labels: bool = False
    labels: tuple[str, ...] | None = None
    max_batch: int | None = None
    inference: bool = True
    training: bool = False
    export: bool = False

    def __post_init__(self) -> None:
        for name in ("primitives", "modalities"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(self.labels))
        unknown = sorted(self.primitives - set(PRIMITIVES))
        if unknown:
            raise ValueError(f"Capabilities.primitives has the unknown {unknown[0]!r}")

    def check(
        self,
        question: Question,
        *,
        modality: str,
        batch_size: int,
        label_ids: Sequence[str] | None = None,
    ) -> None:
        """Raise ``UnsupportedCapability`` for what this provider does not answer.

        ``label_ids`` are the provider's labels that the question's options stand
        for, where those are not the option ids themselves.
        """
        if not isinstance(question, (Choice, Boolean, Score)):
            raise InvalidDecisionRequest(f"{type(question).__name__} is no question")
        if not self.inference:
            raise UnsupportedCapability("this provider does not answer questions")
        if question.kind not in self.primitives:
            has = ", ".join(sorted(self.primitives)) or "none"
            raise UnsupportedCapability(
                f"this provider answers no {question.kind} questions (it answers: {has})"
            )
        if modality not in self.modalities:
            has = ", ".join(sorted(self.modalities))
            raise UnsupportedCapability(f"this provider reads {has}, not {modality}")
        if self.max_batch is not None and batch_size > self.max_batch:
            raise UnsupportedCapability(
                f"this provider takes {self.max_batch} rows at a time, not {batch_size}; "
                "ask in smaller batches"
            )
        if self.dynamic_labels or self.labels is None or isinstance(question, Boolean):
            return
        asked = tuple(question.option_ids if label_ids is None else label_ids)
        if len(set(asked)) != len(asked) or set(asked) != set(self.labels):
            raise UnsupportedCapability(
                f"this provider answers over exactly {list(self.labels)}, not {list(asked)}"
            )


@runtime_checkable
class DecisionProvider(Protocol):
    """Whoever answers typed questions about a batch of inputs."""

    def capabilities(self) -> Capabilities:
        """What can be asked."""
        ...

    def decide(self, question: Question, inputs: Any) -> list[DecisionResult]:
        """One result for each row of ``inputs``; raises ``DecisionError`` s alone."""
        ...
