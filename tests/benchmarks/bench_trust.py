"""What calibration costs beside NumPy's softmax, and a job beside the sleeps of its provider."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from measure import Row, interleaved

ROWS, CLASSES = 100_000, 100  # ten times fewer rows than of interest: the passes are linear


def bench_calibration() -> Iterator[Row]:
    """A temperature's fit by passes over the logits, and a block-wise softmax, beside NumPy's."""
    import numpy as np
    from nnx.calibration.arrays import softmax
    from nnx.calibration.temperature import slope

    random = np.random.default_rng(0)
    logits = random.normal(size=(ROWS, CLASSES)).astype(np.float32) * 3
    targets = logits.argmax(1)

    def numpy_pass() -> Any:
        values = logits.astype(np.float64)
        values -= values.max(1, keepdims=True)
        values = np.exp(values)
        return values / values.sum(1, keepdims=True)

    for name, ours in (
        ("one pass of a temperature's fit", lambda: slope(logits, targets, 0.5)),
        ("softmax by blocks", lambda: softmax(logits)),
    ):
        a, b, spread = interleaved(ours, numpy_pass, repeats=3)
        yield Row(
            f"{name}, 100k x 100", 1e3 * a, 1e3 * b, "ms", "NumPy softmax", "<= 1.2x",
            a <= 1.2 * b, spread,
        )  # fmt: skip


def bench_job() -> Iterator[Row]:
    """2,000 questions at 5 ms and 8 at a time, beside asyncio sleeping as often."""
    from nnx.decisions import Boolean, Capabilities, DecisionJob, Limits, validate_response

    class Provider:
        def capabilities(self) -> Capabilities:
            return Capabilities({"boolean"}, {"text"}, dynamic_labels=True)

        def decide(self, question: Any, inputs: Any) -> Any:
            raise NotImplementedError

        async def adecide(self, question: Any, inputs: Any) -> Any:
            await asyncio.sleep(0.005)
            return [validate_response(question, 0.5)]

    job = DecisionJob.collect(
        {str(i): DecisionJob.ask(Boolean(f"Is it {i}?"), id=str(i)) for i in range(2000)}
    )

    def ours() -> None:
        asyncio.run(job.arun(Provider(), state="x", limits=Limits(max_concurrency=8)))

    def sleeps() -> None:
        async def all_of_them() -> None:
            left = iter(range(2000))

            async def some() -> None:
                for _ in left:
                    await asyncio.sleep(0.005)

            await asyncio.gather(*[some() for _ in range(8)])

        asyncio.run(all_of_them())

    a, b, spread = interleaved(ours, sleeps, repeats=3)
    yield Row(
        "2,000 questions, 8 at a time", a, b, "s", "asyncio.sleep", "<= 1.1x", a <= 1.1 * b, spread
    )
