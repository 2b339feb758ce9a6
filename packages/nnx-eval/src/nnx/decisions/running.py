"""One run of a job: rounds of provider calls, and what they made possible."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Any

from nnx.errors import NNxError

from .cells import PENDING, Call, Cell, leaves, rows_of
from .errors import (
    DecisionError,
    InvalidDecisionResponse,
    InvalidJob,
    JobFailed,
    JobLimitExceeded,
    JobTimeout,
)
from .jobs import (
    Ask,
    Collect,
    DecisionJob,
    Follow,
    JobResult,
    Limits,
    Map,
    QuestionOutcome,
)
from .provider import Capabilities


class Run:
    """The effects of one ``run`` or ``arun``."""

    def __init__(self, job: DecisionJob, provider: Any, state: Any, limits: Limits) -> None:
        for name in ("capabilities", "decide"):
            if not callable(getattr(provider, name, None)):
                raise InvalidJob(f"a provider has {name}(); {type(provider).__name__} does not")
        self._provider, self._limits = provider, limits
        self._outcomes: dict[str, QuestionOutcome] = {}
        self._ids: set[str] = set()
        self._calls = self._tokens = 0
        self._lock = threading.Lock()
        self._deadline = None if limits.timeout is None else time.monotonic() + limits.timeout
        self._capabilities: Capabilities = provider.capabilities()
        if limits.max_tokens is not None and not callable(getattr(provider, "count_tokens", None)):
            raise InvalidJob(
                "max_tokens cannot be enforced: this provider has no count_tokens(questions, inputs)"
            )
        self._admit(job, state)
        self._root = Cell(job, state, 0)

    # -- what may be asked -----------------------------------------------------------

    def _admit(self, job: DecisionJob, state: Any) -> None:
        """Check the questions of a job before any call that it would make."""
        for ask in job.asks():
            if ask.id in self._ids:
                raise InvalidJob(f"two questions have the id {ask.id!r}", outcomes=self._outcomes)
            self._ids.add(ask.id)
            own = getattr(self._provider, "check", None)
            if callable(own):
                own(ask.question, state)
            else:
                size = len(state) if isinstance(state, (list, tuple)) else 1
                for modality in sorted(self._capabilities.modalities)[:1]:
                    self._capabilities.check(ask.question, modality=modality, batch_size=size)

    def _cap(self) -> int | None:
        """How many questions share a call; ``None`` without a bound."""
        many = any(hasattr(self._provider, name) for name in ("decide_many", "adecide_many"))
        own = getattr(self._provider, "max_questions", None) if many else 1
        caps = [cap for cap in (own, self._limits.max_questions) if cap is not None]
        return min(caps, default=None)

    def _round(self) -> deque[Call]:
        """The calls that can be made now, in order."""
        by_state: dict[int, list[Cell]] = {}
        for cell in leaves(self._root):
            by_state.setdefault(id(cell.state), []).append(cell)
        calls: deque[Call] = deque()
        cap = self._cap()
        for cells in by_state.values():
            step = cap or len(cells)
            for start in range(0, len(cells), step):
                part = cells[start : start + step]
                asks = [cell.node for cell in part if isinstance(cell.node, Ask)]
                calls.append(Call(part, asks, part[0].state))
        return calls

    # -- running ---------------------------------------------------------------------

    def run(self) -> JobResult:
        while not self._settle(self._root):
            calls = self._round()
            workers = min(self._limits.max_concurrency, len(calls))
            made = self._in_turn(calls) if workers == 1 else self._in_threads(calls, workers)
            self._finish(made, calls)
        return JobResult(self._root.value, self._outcomes, self._calls)

    def _in_turn(self, calls: deque[Call]) -> list[Call]:
        made: list[Call] = []
        while calls:
            made.append(call := calls.popleft())
            self._make(call)
            if call.error is not None:
                break
        return made

    def _in_threads(self, calls: deque[Call], workers: int) -> list[Call]:
        from concurrent.futures import ThreadPoolExecutor

        made: list[Call] = []
        failed = threading.Event()

        def work() -> None:
            while True:
                with self._lock:
                    if not calls or failed.is_set():
                        return
                    made.append(call := calls.popleft())
                self._make(call)
                if call.error is not None:
                    failed.set()

        with ThreadPoolExecutor(workers, thread_name_prefix="nnx-decide") as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
        return made

    def _make(self, call: Call) -> None:
        """One call, with its answer or its error."""
        try:
            self._before(call)
            questions = [ask.question for ask in call.asks]
            many = getattr(self._provider, "decide_many", None)
            if callable(many):
                call.answer = many(questions, call.state)
            else:
                call.answer = [self._provider.decide(q, call.state) for q in questions]
        except Exception as error:
            call.error = error

    async def arun(self, cancel: asyncio.Event | None) -> JobResult:
        while not self._settle(self._root):
            calls = self._round()
            made, cancelled = await self._concurrently(calls, cancel)
            if cancelled:
                return self._cancelled(made, calls)
            self._finish(made, calls)
        return JobResult(self._root.value, self._outcomes, self._calls)

    async def _concurrently(
        self, calls: deque[Call], cancel: asyncio.Event | None
    ) -> tuple[list[Call], bool]:
        made: list[Call] = []
        failed = False

        async def work() -> None:
            nonlocal failed
            while calls and not failed and not (cancel is not None and cancel.is_set()):
                made.append(call := calls.popleft())
                await self._amake(call)
                failed = failed or call.error is not None

        workers = [
            asyncio.ensure_future(work())
            for _ in range(min(self._limits.max_concurrency, len(calls)))
        ]
        watcher = None if cancel is None else asyncio.ensure_future(cancel.wait())
        waiting: set[asyncio.Future[Any]] = set(workers)
        try:
            while waiting:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                done, _ = await asyncio.wait(
                    waiting | ({watcher} if watcher is not None else set()),
                    timeout=None if left is None else max(0.0, left),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if watcher is not None and watcher in done:
                    return made, True
                if not done:
                    raise self._too_long(made, calls)
                for future in done:
                    future.result()
                waiting -= done
        finally:
            rest = [*waiting, *([watcher] if watcher is not None else [])]
            for future in rest:
                future.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        return made, bool(cancel is not None and cancel.is_set() and calls)

    async def _amake(self, call: Call) -> None:
        many = getattr(self._provider, "adecide_many", None)
        one = getattr(self._provider, "adecide", None)
        try:
            if many is None and one is None:
                await asyncio.to_thread(self._make, call)
                return
            self._before(call)
            questions = [ask.question for ask in call.asks]
            if many is not None:
                call.answer = await many(questions, call.state)
            elif one is not None:
                call.answer = [await one(question, call.state) for question in questions]
        except Exception as error:
            call.error = error

    def _before(self, call: Call) -> None:
        """Hold a call against the limits, and count it."""
        limits = self._limits
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _LateError
        with self._lock:
            if limits.max_requests is not None and self._calls >= limits.max_requests:
                raise JobLimitExceeded(
                    f"the job needs more than max_requests={limits.max_requests} provider calls"
                )
            if limits.max_tokens is not None:
                questions = [ask.question for ask in call.asks]
                tokens = int(self._provider.count_tokens(questions, call.state))
                if self._tokens + tokens > limits.max_tokens:
                    raise JobLimitExceeded(
                        f"the next call of {tokens} tokens would exceed "
                        f"max_tokens={limits.max_tokens} ({self._tokens} used)"
                    )
                self._tokens += tokens
            self._calls += 1
            call.sent = True

    # -- what came back --------------------------------------------------------------

    def _finish(self, made: list[Call], rest: deque[Call]) -> None:
        """Take the answers of a round; raise when any of its calls failed."""
        for call in made:
            if call.error is None:
                self._take(call)
        broken = [call for call in made if call.error is not None]  # a malformed answer, too
        if not broken:
            return
        for error in (call.error for call in broken):
            if isinstance(error, _LateError):
                raise self._too_long(made, rest) from None
            if isinstance(error, JobLimitExceeded):
                self._note(made, rest, "skipped")
                raise JobLimitExceeded(str(error), outcomes=self._outcomes) from None
        failed = [ask.id for call in broken for ask in call.asks]
        for call in broken:
            for ask in call.asks:
                self._outcomes[ask.id] = QuestionOutcome(
                    ask.id, "failed", error=call.error, sent=call.sent
                )
        self._note(made, rest, "skipped")
        skipped = [name for name, outcome in self._outcomes.items() if outcome.kind == "skipped"]
        first = broken[0].error
        raise JobFailed(
            f"question {', '.join(map(repr, failed))} failed: {type(first).__name__}: {first}",
            outcomes=self._outcomes, failed=failed, skipped=skipped,
        ) from first  # fmt: skip

    def _take(self, call: Call) -> None:
        """Give every question of a call its rows."""
        try:
            answers = list(call.answer)
            if len(answers) != len(call.asks):
                raise InvalidDecisionResponse(
                    f"the provider answered {len(answers)} of {len(call.asks)} questions"
                )
            found = [rows_of(ask, rows) for ask, rows in zip(call.asks, answers)]
        except (DecisionError, ValueError, TypeError) as error:
            call.error = error
            return
        for cell, ask, rows in zip(call.cells, call.asks, found):
            cell.value = tuple(row.value for row in rows)
            self._outcomes[ask.id] = QuestionOutcome(ask.id, "answered", rows, sent=True)

    def _note(self, made: list[Call], rest: deque[Call], kind: str) -> None:
        """The outcomes of what was not answered."""
        for call in [*made, *rest]:
            for ask in call.asks:
                self._outcomes.setdefault(ask.id, QuestionOutcome(ask.id, kind, sent=call.sent))

    def _too_long(self, made: list[Call], rest: deque[Call]) -> JobTimeout:
        for call in made:
            if call.error is None and call.answer is not None:
                self._take(call)
        self._note(made, rest, "skipped")
        return JobTimeout(
            f"the job ran longer than timeout={self._limits.timeout:g} s", outcomes=self._outcomes
        )

    def _cancelled(self, made: list[Call], rest: deque[Call]) -> JobResult:
        for call in made:
            if call.error is None and call.answer is not None:
                self._take(call)
        self._note(made, rest, "cancelled")
        return JobResult(None, self._outcomes, self._calls, status="cancelled")

    # -- what follows ----------------------------------------------------------------

    def _settle(self, cell: Cell) -> bool:
        """Whether a job has its value; callbacks whose turn it is are called, once."""
        if cell.value is not PENDING:
            return True
        node = cell.node
        if isinstance(node, Ask):
            return False
        settled = [self._settle(inner) for inner in cell.inner]
        if not all(settled):
            return False
        if isinstance(node, Collect):
            cell.value = {name: c.value for (name, _), c in zip(node.jobs, cell.inner)}
        elif isinstance(node, Map):
            cell.value = node.fn(cell.inner[0].value)
        elif len(cell.inner) == 1:
            cell.inner.append(self._followed(cell, node.fn(cell.inner[0].value)))
            return self._settle(cell)
        else:
            cell.value = cell.inner[1].value
        return True

    def _followed(self, cell: Cell, follow: Any) -> Cell:
        if not isinstance(follow, Follow):
            raise InvalidJob(
                f"a then() callback returns Follow(job, state=...), not {type(follow).__name__}",
                outcomes=self._outcomes,
            )
        if cell.depth + 1 > self._limits.max_depth:
            raise JobLimitExceeded(
                f"follow-ups are nested deeper than max_depth={self._limits.max_depth}",
                outcomes=self._outcomes,
            )
        self._admit(follow.job, follow.state)
        return Cell(follow.job, follow.state, cell.depth + 1)


class _LateError(NNxError):
    """The deadline passed before a call."""
