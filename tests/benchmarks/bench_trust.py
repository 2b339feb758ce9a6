"""What calibration costs beside NumPy's softmax, and a job beside the sleeps of its provider.

Run as a script it fits and applies a temperature alone, and prints how far its memory rose
above its input and output.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import Row, interleaved, peak_mebibytes, seconds

ROWS, CLASSES = 1_000_000, 100
BOUND: dict[str, Any] = {
    "model_id": "m",
    "split_id": "c",
    "labels": [str(c) for c in range(CLASSES)],
}


def _made(rows: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    logits = random.standard_normal((rows, CLASSES), dtype=np.float32)
    logits *= 3
    chances = logits / 2 + random.gumbel(size=logits.shape).astype(np.float32)
    return logits, chances.argmax(1)


def bench_calibration() -> Iterator[Row]:
    """A whole fit beside as many NumPy softmax passes as it makes, a transform beside one."""
    import numpy as np
    from nnx.calibration import fit_temperature, temperature

    logits, targets = _made(ROWS)
    passes, slope = 0, temperature.slope

    def counted(*arguments: Any) -> float:
        nonlocal passes
        passes += 1
        return slope(*arguments)

    def numpy_pass() -> Any:
        values = logits.astype(np.float64)
        values -= values.max(1, keepdims=True)
        values = np.exp(values)
        return values / values.sum(1, keepdims=True)

    temperature.slope = counted
    try:
        start = time.perf_counter()
        calibrator = fit_temperature(logits, targets, **BOUND).require()
        fit = time.perf_counter() - start
    finally:
        temperature.slope = slope
    passes += 2  # the likelihood before and after
    one, spread = seconds(numpy_pass, repeats=3)
    yield Row(
        f"fit_temperature, 1M x 100, {passes} passes", fit, passes * one, "s",
        "as many NumPy softmax", "<= 1.2x", fit <= 1.2 * passes * one, spread,
    )  # fmt: skip

    def transform() -> Any:
        return calibrator.transform(logits, model_id="m", labels=BOUND["labels"])

    def both() -> Any:  # raw and calibrated: a transform gives the two
        return numpy_pass(), numpy_pass()

    a, b, spread = interleaved(transform, both, repeats=3)
    yield Row(
        "transform, 1M x 100", a, b, "s", "two NumPy softmax", "<= 1.2x", a <= 1.2 * b, spread
    )
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    mebibytes = float(child.stdout)
    yield Row(
        "memory above input and output, fit and transform 1M x 100", mebibytes, None, "MiB", "",
        "<= 64 MiB", mebibytes <= 64,
    )  # fmt: skip


def bench_job() -> Iterator[Row]:
    """10,000 questions at 5 ms and 16 at a time, beside asyncio sleeping as often."""
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
        {str(i): DecisionJob.ask(Boolean(f"Is it {i}?"), id=str(i)) for i in range(10_000)}
    )

    def ours() -> None:
        asyncio.run(job.arun(Provider(), state="x", limits=Limits(max_concurrency=16)))

    def sleeps() -> None:
        async def all_of_them() -> None:
            left = iter(range(10_000))

            async def some() -> None:
                for _ in left:
                    await asyncio.sleep(0.005)

            await asyncio.gather(*[some() for _ in range(16)])

        asyncio.run(all_of_them())

    a, b, spread = interleaved(ours, sleeps, repeats=3)
    yield Row(
        "10,000 questions, 16 at a time",
        a,
        b,
        "s",
        "asyncio.sleep",
        "<= 1.1x",
        a <= 1.1 * b,
        spread,
    )


if __name__ == "__main__":
    from nnx.calibration import fit_temperature

    logits, targets = _made(ROWS)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making them
    before = peak_mebibytes()
    calibrator = fit_temperature(
        logits, targets, max_iterations=500, tolerance=0.01, **BOUND
    ).require()
    result = calibrator.transform(logits, model_id="m", labels=BOUND["labels"])
    own = (result.probabilities.nbytes + result.calibrated_probabilities.nbytes) / 2**20
    print(max(0.0, peak_mebibytes() - before - own))
