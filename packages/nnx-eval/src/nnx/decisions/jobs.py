"""Several questions described before any is asked: an immutable tree, then one run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nnx.utils import validation as check
from nnx.utils.validation import show

from .errors import InvalidJob
from .questions import Boolean, Choice, Question, Score
from .results import DecisionResult


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use.

    ``max_questions`` is of one provider call, ``max_tokens`` of the whole run (by
    the provider's ``count_tokens``), ``max_depth`` of follow-ups inside
    follow-ups, ``max_requests`` of provider calls, ``timeout`` in seconds,
    ``max_concurrency`` of calls at a time.
    """

    max_questions: int | None = None
    max_tokens: int | None = None
    max_depth: int = 8
    max_requests: int | None = None
    timeout: float | None = None
    max_concurrency: int = 1

    def __post_init__(self) -> None:
        for name in ("max_questions", "max_tokens", "max_requests"):
            if getattr(self, name) is not None:
                check.count("Limits", name, getattr(self, name))
        check.count("Limits", "max_depth", self.max_depth)
        check.count("Limits", "max_concurrency", self.max_concurrency)
        if self.timeout is not None:
            check.real("Limits", "timeout", self.timeout, above=0)


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """One row's answer: ``kind`` "answered", or "abstained" by the question's policy."""

    kind: str
    result: DecisionResult
    decision: Any = None

    @property
    def value(self) -> Any:
        """The selective decision where there was a policy, else the result."""
        return self.result if self.decision is None else self.decision


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """What became of one question: "answered", "failed", "skipped" or "cancelled".

    ``sent`` says that a request with it left; what was sent is never rolled back.
    """

    id: str
    kind: str
    rows: tuple[RowOutcome, ...] = ()
    error: BaseException | None = None
    sent: bool = False

    @property
    def abstained(self) -> bool:
        """Whether the policy declined any of its rows."""
        return any(row.kind == "abstained" for row in self.rows)


@dataclass(frozen=True, slots=True)
class JobResult:
    """The value of a completed job, every question's outcome, and the provider calls made.

    A cancelled job has ``status`` "cancelled" and no value.
    """

    value: Any
    outcomes: Mapping[str, QuestionOutcome]
    calls: int
    status: str = "completed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", MappingProxyType(dict(self.outcomes)))

    def __repr__(self) -> str:
        # asyncio.run asks for it twice: not a page for every one of 10,000 questions
        return f"JobResult({self.status}, {len(self.outcomes)} questions, {self.calls} calls)"


@dataclass(frozen=True, slots=True)
class Ask:
    id: str
    question: Question
    policy: Any = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class Collect:
    jobs: tuple[tuple[str, DecisionJob], ...]


@dataclass(frozen=True, slots=True)
class Map:
    job: DecisionJob
    fn: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Then:
    job: DecisionJob
    fn: Callable[[Any], Follow]


Node = Ask | Collect | Map | Then


class DecisionJob:
    """A description of questions; building one calls no provider and no callback.

    The value of a question is the tuple of its rows' results (of the selective
    decisions, with a policy).
    """

    __slots__ = ("node",)
    node: Node

    def __init__(self, node: Node) -> None:
        if not isinstance(node, (Ask, Collect, Map, Then)):
            raise InvalidJob("build a job with DecisionJob.ask, collect, map and then")
        object.__setattr__(self, "node", node)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a DecisionJob cannot change; build another one")

    @staticmethod
    def ask(
        question: Question, *, id: str, policy: Any = None, model_id: str | None = None
    ) -> DecisionJob:
        """Ask one question. An abstention ``policy`` needs the ``model_id`` it was tuned for."""
        if not isinstance(question, (Choice, Boolean, Score)):
            raise InvalidJob(f"ask() takes a Choice, Boolean or Score, not {show(question)}")
        if not isinstance(id, str) or not id:
            raise InvalidJob(f"the id of a question is a non-empty string, not {show(id)}")
        if (policy is None) != (model_id is None):
            raise InvalidJob(f"question {id!r}: policy and model_id are given together")
        if policy is not None and isinstance(question, Boolean):
            raise InvalidJob(f"question {id!r}: a policy reads a distribution, not a Boolean")
        if policy is not None and not hasattr(policy, "apply"):
            raise InvalidJob(f"question {id!r}: policy is an AbstentionPolicy, not {show(policy)}")
        return DecisionJob(Ask(id, question, policy, model_id))

    @staticmethod
    def collect(jobs: Mapping[str, DecisionJob]) -> DecisionJob:
        """Independent jobs by name; the value is a dict of their values."""
        if not isinstance(jobs, Mapping):
            raise InvalidJob(f"collect() takes a mapping of jobs, not {show(jobs)}")
        for name, job in jobs.items():
            if not isinstance(name, str) or not isinstance(job, DecisionJob):
                raise InvalidJob(f"collect() maps names to jobs; {show(name)} is {show(job)}")
        return DecisionJob(Collect(tuple(jobs.items())))

    def map(self, fn: Callable[[Any], Any]) -> DecisionJob:
        """The same with ``fn`` of the value."""
        return DecisionJob(Map(self, _function("map", fn)))

    def then(self, fn: Callable[[Any], Follow]) -> DecisionJob:
        """Go on with the job and state that ``fn`` of the value returns, called once."""
        return DecisionJob(Then(self, _function("then", fn)))

    def question_ids(self) -> tuple[str, ...]:
        """The ids known before running, in order; follow-ups are not among them."""
        return tuple(ask.id for ask in self.asks())

    def asks(self) -> list[Ask]:
        """The questions known before running, in order."""
        found: list[Ask] = []
        waiting = [self]
        while waiting:
            node = waiting.pop().node
            if isinstance(node, Ask):
                found.append(node)
            elif isinstance(node, Collect):
                waiting.extend(job for _, job in reversed(node.jobs))
            else:
                waiting.append(node.job)
        return found

    def state(self) -> dict[str, Any]:
        """The tree as plain data; callbacks by name alone."""
        node = self.node
        if isinstance(node, Ask):
            policy = None if node.policy is None else node.policy.id
            return {
                "kind": "ask", "id": node.id, "question": node.question.state(),
                "policy": policy, "model_id": node.model_id,
            }  # fmt: skip
        if isinstance(node, Collect):
            return {"kind": "collect", "jobs": {name: job.state() for name, job in node.jobs}}
        kind = "map" if isinstance(node, Map) else "then"
        name = getattr(node.fn, "__qualname__", type(node.fn).__name__)
        return {"kind": kind, "job": node.job.state(), "fn": name}

    def run(self, provider: Any, *, state: Any, limits: Limits | None = None) -> JobResult:
        """Ask everything about ``state``, the inputs; the provider is borrowed, never closed.

        With ``max_concurrency`` above 1 the calls of a round run in that many
        threads. Raises ``InvalidJob`` and ``UnsupportedCapability`` before any
        call, ``JobFailed`` when a question fails, ``JobLimitExceeded`` and
        ``JobTimeout``. What a callback raises goes through.
        """
        from .running import Run

        return Run(self, provider, state, limits or Limits()).run()

    async def arun(
        self,
        provider: Any,
        *,
        state: Any,
        limits: Limits | None = None,
        cancel: asyncio.Event | None = None,
    ) -> JobResult:
        """:meth:`run` on the event loop, by the provider's ``adecide_many`` or ``adecide``.

        A provider without them is called in threads. Setting ``cancel`` sends
        nothing more and returns a cancelled result.
        """
        from .running import Run

        return await Run(self, provider, state, limits or Limits()).arun(cancel)


@dataclass(frozen=True, slots=True)
class Follow:
    """What ``then`` goes on with: a job, and the state that it asks about."""

    job: DecisionJob
    state: Any

    def __post_init__(self) -> None:
        if not isinstance(self.job, DecisionJob):
            raise InvalidJob(f"Follow.job is a DecisionJob, not {show(self.job)}")


def _function(method: str, fn: Any) -> Callable[[Any], Any]:
    if not callable(fn):
        raise InvalidJob(f"{method}() takes a function of the value, not {show(fn)}")
    return fn
