"""Jobs: how many calls, in which order, and what is left when one fails or is stopped."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from nnx.abstention import AbstentionPolicy
from nnx.decisions import (
    Boolean,
    Capabilities,
    Choice,
    DecisionJob,
    Follow,
    InvalidJob,
    JobFailed,
    JobLimitExceeded,
    JobTimeout,
    Limits,
    Option,
    ProviderFailure,
    UnsupportedCapability,
    validate_response,
)

ask, collect = DecisionJob.ask, DecisionJob.collect


def yes_no(name: str) -> Boolean:
    return Boolean(f"Is it {name}?")


class Provider:
    """Answers each Boolean with the share that its prompt's length decides."""

    def __init__(self, *, fails: str | None = None, wait: float = 0.0) -> None:
        self.calls: list[tuple[list[str], object]] = []
        self.fails, self.wait = fails, wait
        self.closed = False

    def capabilities(self) -> Capabilities:
        return Capabilities({"boolean", "choice"}, {"text"}, dynamic_labels=True)

    def _answer(self, question, inputs):
        rows = inputs if isinstance(inputs, list) else [inputs]
        if isinstance(question, Choice):
            p = {o: 1 / len(question.options) for o in question.option_ids}
            return [validate_response(question, p) for _ in rows]
        return [validate_response(question, len(question.prompt) / 100) for _ in rows]

    def decide(self, question, inputs):
        self.calls.append(([question.prompt], inputs))
        time.sleep(self.wait)
        if self.fails and self.fails in question.prompt:
            raise ProviderFailure("no answer")
        return self._answer(question, inputs)

    def close(self) -> None:
        self.closed = True


class Many(Provider):
    max_questions = 3

    def decide_many(self, questions, inputs):
        self.calls.append(([q.prompt for q in questions], inputs))
        if self.fails and any(self.fails in q.prompt for q in questions):
            raise ProviderFailure("no answer")
        return [self._answer(q, inputs) for q in questions]


class Awaited(Provider):
    async def adecide(self, question, inputs):
        self.calls.append(([question.prompt], inputs))
        await asyncio.sleep(self.wait)
        if self.fails and self.fails in question.prompt:
            raise ProviderFailure("no answer")
        return self._answer(question, inputs)


def five() -> DecisionJob:
    return collect({str(i): ask(yes_no("x" * i), id=f"q{i}") for i in range(1, 6)})


def p_true(value) -> float:
    return value[0].p_true


def run(job, provider=None, *, awaited=False, state="text", **limits):
    provider = provider or Provider()
    if awaited:
        return asyncio.run(job.arun(provider, state=state, limits=Limits(**limits)))
    return job.run(provider, state=state, limits=Limits(**limits))


def test_building_a_job_has_no_effect() -> None:
    called: list[object] = []
    job = five().map(called.append).then(called.append)
    assert called == []
    assert job.question_ids() == ("q1", "q2", "q3", "q4", "q5")
    assert job.state()["kind"] == "then"
    with pytest.raises(AttributeError, match="cannot change"):
        job.node = None


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize(("cap", "calls"), [(None, [3, 2]), (2, [2, 2, 1]), (9, [3, 2])])
def test_questions_about_one_state_share_calls(awaited, cap, calls) -> None:
    provider = Many()
    result = run(five(), provider, awaited=awaited, max_questions=cap)
    assert [len(prompts) for prompts, _ in provider.calls] == calls
    assert result.calls == len(calls)
    assert [p for prompts, _ in provider.calls for p in prompts] == [
        yes_no("x" * i).prompt for i in range(1, 6)
    ]
    assert {k: p_true(v) for k, v in result.value.items()} == {
        str(i): len(yes_no("x" * i).prompt) / 100 for i in range(1, 6)
    }
    assert {o.kind for o in result.outcomes.values()} == {"answered"}
    assert result.status == "completed"
    assert not provider.closed


@pytest.mark.parametrize("awaited", [False, True])
def test_a_follow_up_asks_about_its_own_state_in_the_next_round(awaited) -> None:
    seen: list[float] = []

    def follow(answer):
        seen.append(p_true(answer))
        return Follow(ask(yes_no("later"), id="c"), state=f"after {p_true(answer):.2f}")

    job = collect(
        {"a": ask(yes_no("one"), id="a"), "b": ask(yes_no("two"), id="b").then(follow)}
    ).map(lambda value: sorted(value))
    provider = Many()
    result = run(job, provider, awaited=awaited)
    assert [state for _, state in provider.calls] == ["text", "after 0.10"]
    assert (result.value, result.calls, len(seen)) == (["a", "b"], 2, 1)
    assert set(result.outcomes) == {"a", "b", "c"}


def test_map_has_its_laws_for_a_deterministic_provider() -> None:
    job = ask(yes_no("one"), id="a").map(p_true)
    assert run(job.map(lambda v: v)).value == run(job).value
    f, g = (lambda v: v + 1), (lambda v: v * 2)
    assert run(job.map(f).map(g)).value == run(job.map(lambda v: g(f(v)))).value


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failed_question_fails_the_job_with_what_is_known(awaited) -> None:
    provider = Provider(fails="xxx?")
    with pytest.raises(JobFailed, match="'q3' failed: ProviderFailure: no answer") as caught:
        run(five(), provider, awaited=awaited)
    error = caught.value
    assert (error.failed, error.skipped) == (("q3",), ("q4", "q5"))
    assert {k: o.kind for k, o in error.outcomes.items()} == {
        "q1": "answered", "q2": "answered", "q3": "failed", "q4": "skipped", "q5": "skipped",
    }  # fmt: skip
    assert error.outcomes["q3"].sent
    assert not error.outcomes["q4"].sent
    assert isinstance(error.__cause__, ProviderFailure)
    assert len(provider.calls) == 3


def test_what_cannot_be_run_is_refused_before_any_call() -> None:
    provider = Provider()
    twice = collect({"a": ask(yes_no("one"), id="a"), "b": ask(yes_no("two"), id="a")})
    with pytest.raises(InvalidJob, match="two questions have the id 'a'"):
        run(twice, provider)
    with pytest.raises(InvalidJob, match="max_tokens cannot be enforced"):
        run(five(), provider, max_tokens=10)
    from nnx.decisions import Score

    score = Score("How?", (Option("a", "a"), Option("b", "b")))
    with pytest.raises(UnsupportedCapability):
        run(collect({"a": ask(yes_no("one"), id="a"), "b": ask(score, id="b")}), provider)
    with pytest.raises(InvalidJob, match="capabilities"):
        run(five(), object())
    assert provider.calls == []


def test_limits_hold() -> None:
    with pytest.raises(JobLimitExceeded, match="max_requests=3") as caught:
        run(five(), max_requests=3)
    assert [o.kind for o in caught.value.outcomes.values()].count("answered") == 3

    def again(depth):
        return lambda _: Follow(
            ask(yes_no("more"), id=f"d{depth}").then(again(depth + 1)), state="text"
        )

    with pytest.raises(JobLimitExceeded, match="max_depth=3"):
        run(ask(yes_no("one"), id="d0").then(again(1)), max_depth=3)

    class Counted(Provider):
        def count_tokens(self, questions, inputs):
            return 10

    with pytest.raises(JobLimitExceeded, match="max_tokens=35"):
        run(five(), Counted(), max_tokens=35)
    with pytest.raises(ValueError, match="max_concurrency"):
        Limits(max_concurrency=0)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_job_that_takes_too_long_ends(awaited) -> None:
    kind = Awaited if awaited else Provider
    with pytest.raises(JobTimeout) as caught:
        run(five(), kind(wait=0.08), awaited=awaited, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.outcomes["q1"].kind == "answered"
    assert caught.value.outcomes["q5"].kind == "skipped"


def test_cancelling_sends_nothing_more_and_says_what_was_sent() -> None:
    async def stopped():
        cancel, provider = asyncio.Event(), Awaited(wait=0.05)
        asyncio.get_running_loop().call_later(0.12, cancel.set)
        limits = Limits(max_concurrency=2)
        return provider, await five().arun(provider, state="text", limits=limits, cancel=cancel)

    provider, result = asyncio.run(stopped())
    assert (result.status, result.value) == ("cancelled", None)
    kinds = {k: (o.kind, o.sent) for k, o in result.outcomes.items()}
    assert kinds["q1"] == kinds["q4"] == ("answered", True)
    assert kinds["q5"] == ("cancelled", True)
    assert len(provider.calls) == 5

    async def before():
        cancel = asyncio.Event()
        cancel.set()
        return await five().arun(Awaited(), state="text", cancel=cancel)

    result = asyncio.run(before())
    assert {(o.kind, o.sent) for o in result.outcomes.values()} == {("cancelled", False)}


def test_concurrent_calls_overlap_as_far_as_allowed() -> None:
    lock, active, most = threading.Lock(), [0], [0]

    class Watching(Provider):
        def decide(self, question, inputs):
            with lock:
                active[0] += 1
                most[0] = max(most[0], active[0])
            time.sleep(0.02)
            with lock:
                active[0] -= 1
            return self._answer(question, inputs)

    run(five(), Watching(), max_concurrency=3)
    assert most[0] == 3
    most[0] = 0
    run(five(), Watching(), awaited=True, max_concurrency=2)  # in threads
    assert most[0] == 2


def test_a_policy_makes_selective_decisions() -> None:
    question = Choice("Which?", (Option("a", "A"), Option("b", "B")))
    policy = AbstentionPolicy("max_probability", 0.9, ("a", "b"), "m:1", "val")
    result = run(ask(question, id="q", policy=policy, model_id="m:1"), state=["one", "two"])
    assert [decision.abstained for decision in result.value] == [True, True]
    assert result.outcomes["q"].abstained
    assert [row.kind for row in result.outcomes["q"].rows] == ["abstained", "abstained"]
    for wrong in ({"policy": policy}, {"model_id": "m:1"}):
        with pytest.raises(InvalidJob, match="together"):
            ask(question, id="q", **wrong)
    with pytest.raises(InvalidJob, match="not a Boolean"):
        ask(yes_no("x"), id="q", policy=policy, model_id="m:1")


def test_answers_to_other_questions_or_too_few_fail_the_job() -> None:
    class Wrong(Many):
        def decide_many(self, questions, inputs):
            return [self._answer(questions[0], inputs)] * len(questions)

    class Few(Many):
        def decide_many(self, questions, inputs):
            return []

    with pytest.raises(JobFailed, match="to another question"):
        run(five(), Wrong())
    with pytest.raises(JobFailed, match="answered 0 of 3"):
        run(five(), Few())


def test_what_a_callback_raises_goes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ask(yes_no("one"), id="a").map(lambda _: 1 / 0))
    with pytest.raises(InvalidJob, match="returns Follow"):
        run(ask(yes_no("one"), id="a").then(lambda _: 3))
