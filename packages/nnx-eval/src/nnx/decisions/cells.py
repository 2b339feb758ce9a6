"""A job in progress: its cells, the calls they wait for, and the answers held against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import InvalidDecisionResponse
from .jobs import Ask, Collect, DecisionJob, RowOutcome

PENDING = object()


class Cell:
    """A job in progress: its state, and its value once there is one."""

    __slots__ = ("depth", "inner", "node", "state", "value")

    def __init__(self, job: DecisionJob, state: Any, depth: int) -> None:
        self.node, self.state, self.depth = job.node, state, depth
        self.value: Any = PENDING
        self.inner: list[Cell] = []
        if isinstance(self.node, Collect):
            self.inner = [Cell(child, state, depth) for _, child in self.node.jobs]
        elif not isinstance(self.node, Ask):
            self.inner = [Cell(self.node.job, state, depth)]


@dataclass(slots=True)
class Call:
    """Questions about one state that share a provider call."""

    cells: list[Cell]
    asks: list[Ask]
    state: Any
    sent: bool = False
    answer: Any = None
    error: BaseException | None = None


def leaves(cell: Cell) -> Iterator[Cell]:
    """The questions that wait for an answer, in order."""
    waiting = [cell]
    while waiting:
        found = waiting.pop()
        if found.value is not PENDING:
            continue
        if isinstance(found.node, Ask):
            yield found
        else:
            waiting.extend(reversed(found.inner))


def rows_of(ask: Ask, results: Any) -> tuple[RowOutcome, ...]:
    """One question's answers, held against the question and its policy."""
    digest, found = ask.question.digest(), []
    for result in results:
        if getattr(result, "question_digest", None) != digest:
            raise InvalidDecisionResponse(f"the answer to {ask.id!r} is to another question")
        if ask.policy is None:
            found.append(RowOutcome("answered", result))
            continue
        from nnx.abstention import decide

        decision = decide(result, ask.policy, model_id=str(ask.model_id))
        found.append(
            RowOutcome("abstained" if decision.abstained else "answered", result, decision)
        )
    return tuple(found)
