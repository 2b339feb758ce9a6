"""What scoring costs: the record of a training batch, long evaluations, long predictions.

Run as a script with the name of a child, it does that child's work alone and
prints its CPU seconds and how far its memory rose above what imports need.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from measure import Row, beside, interleaved, peak_mebibytes, turns

EVALUATED_ROWS, CLASSES, BATCH = 2_000_000, 100, 8192
PREDICTED_ROWS = 10_000_000


def _model(net: Any) -> Any:
    import torch
    from nnx import NNModelParams

    return SimpleNamespace(
        net=net, device=torch.device("cpu"), loss_fn=torch.nn.CrossEntropyLoss(),
        batch_adapter=None, task_adapter=None, params=NNModelParams(),
    )  # fmt: skip


def bench_batch_record() -> Iterator[Row]:
    """All six fields of one batch's record, beside scikit-learn called on the batch."""
    import torch
    from nnx import NNEvaluationDataPoint
    from nnx.tasks.recorder import EpochRecorder
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    torch.set_num_threads(1)
    model, n = _model(torch.nn.Identity()), 500
    for rows, classes in ((16, 3), (64, 10), (256, 10), (64, 1000)):
        output, target = torch.randn(rows, classes), torch.randint(0, classes, (rows,))

        def ours(output=output, target=target) -> None:
            recorder = EpochRecorder(model)
            for _ in range(n):
                recorder.add(output, target, loss=0.5)
            assert len(recorder.take()) == n

        def sklearn(output=output, target=target) -> None:
            truth, guess = target.numpy(), output.argmax(1).numpy()
            precision, recall, f1, _ = precision_recall_fscore_support(
                truth, guess, average="macro", zero_division=0
            )
            accuracy = accuracy_score(truth, guess)
            NNEvaluationDataPoint(
                f1=f1, recall=recall, accuracy=accuracy, precision=precision, loss=0.5,
                error=1 - accuracy,
            )  # fmt: skip

        a, b, spread = interleaved(ours, sklearn, clock=time.thread_time)
        yield Row(
            f"record of a batch, {rows} x {classes}", a / n * 1e6, b * 1e6, "us",
            "scikit-learn per batch", "<= 0.02x", a / n <= 0.02 * b, spread,
        )  # fmt: skip


def bench_evaluation() -> Iterator[Row]:
    """Accuracy and macro F1, recall and precision of 2M rows x 100 classes, and the loss."""
    names = ("nnx", "torchmetrics", "sklearn")
    found: dict[str, dict[str, float]] = {}

    def seconds(name: str) -> float:
        found[name] = _child(name)
        return found[name]["seconds"]

    times = turns([partial(seconds, name) for name in names], repeats=3, warmup=0, clock=None)
    ours = found["nnx"]
    for name, others in zip(names[1:], times[1:]):
        other = found[name]
        assert abs(ours["f1"] - other["f1"]) < 1e-6, (ours, other)
        a, b, spread = beside(times[0], others)
        yield Row("evaluate 2M x 100", a, b, "CPU s", name, "<= 1.0x", a <= b, spread)
        yield Row("memory above imports, evaluate 2M x 100", ours["mib"], other["mib"], "MiB", name)
    short = _child("nnx", "200000")["mib"]
    yield Row(
        "memory, evaluate 2M x 100", ours["mib"], short, "MiB", "evaluate 200k x 100",
        "<= 8 MiB more", ours["mib"] - short <= 8,
    )  # fmt: skip


def bench_iter_predict() -> Iterator[Row]:
    """A stream of predictions holds one batch, however long it is."""
    short, long = _child("stream", "1000000"), _child("stream", str(PREDICTED_ROWS))
    grown = long["mib"] - short["mib"]
    yield Row(
        "iter_predict memory, 10M beside 1M rows", long["mib"], short["mib"], "MiB",
        "iter_predict of 1M rows", "<= 8 MiB more", grown <= 8,
    )  # fmt: skip
    ours, plain, spread = interleaved(
        lambda: _stream(1_000_000), lambda: _plain(1_000_000), clock=time.thread_time
    )
    yield Row(
        "iter_predict 1M rows", ours, plain, "CPU s", "plain loop to NumPy", "<= 1.25x",
        ours <= 1.25 * plain, spread,
    )  # fmt: skip


def _batches(rows: int) -> Iterator[tuple[Any, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    pool = [
        (
            torch.randn(BATCH, CLASSES, generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(4)
    ]
    for start in range(0, rows, BATCH):
        logits, target = pool[start // BATCH % 4]
        yield logits[: rows - start], target[: rows - start]


def _evaluate_nnx(rows: int) -> float:
    import torch
    from nnx.prediction.inference import evaluate

    return float(evaluate(_model(torch.nn.Identity()), _batches(rows)).f1 or 0)


def _evaluate_torchmetrics(rows: int) -> float:
    import torch
    from torch.nn import functional
    from torchmetrics import MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
    )

    metrics = MetricCollection(
        [MulticlassAccuracy(CLASSES, average="micro")]
        + [kind(CLASSES) for kind in (MulticlassF1Score, MulticlassPrecision, MulticlassRecall)]
    )
    total = 0.0
    with torch.no_grad():
        for logits, target in _batches(rows):
            total += float(functional.cross_entropy(logits, target)) * len(target)
            metrics.update(logits, target)
    return float(metrics.compute()["MulticlassF1Score"])


def _evaluate_sklearn(rows: int) -> float:
    import numpy as np
    import torch
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support
    from torch.nn import functional

    truth, guess, total = [], [], 0.0
    with torch.no_grad():
        for logits, target in _batches(rows):
            total += float(functional.cross_entropy(logits, target)) * len(target)
            truth.append(target.numpy())
            guess.append(logits.argmax(1).numpy())
    y_true, y_pred = np.concatenate(truth), np.concatenate(guess)
    accuracy_score(y_true, y_pred)
    scores = precision_recall_fscore_support(y_true, y_pred, average="macro", zero_division=0)
    return float(scores[2])


def _stream(rows: int) -> float:
    import torch
    from nnx.streaming import iter_predict

    torch.set_num_threads(1)
    inputs = torch.randn(10_000, 32)
    seen = 0
    batches = (inputs for _ in range(rows // len(inputs)))
    with iter_predict(_model(torch.nn.Linear(32, 10)), batches) as stream:
        for batch in stream:
            seen += len(batch.classes)
    return seen


def _plain(rows: int) -> float:
    import torch

    inputs, net, seen = torch.randn(10_000, 32), torch.nn.Linear(32, 10).eval(), 0
    with torch.no_grad():
        for _ in range(rows // len(inputs)):
            logits = net(inputs).numpy()
            seen += len(logits.argmax(1))
    return seen


_CHILDREN: dict[str, Callable[[int], float]] = {
    "nnx": _evaluate_nnx,
    "torchmetrics": _evaluate_torchmetrics,
    "sklearn": _evaluate_sklearn,
    "stream": _stream,
}


def _child(name: str, rows: str = str(EVALUATED_ROWS)) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, name, rows], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _work(name: str, rows: int) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    work = _CHILDREN[name]
    work(10_000)  # imports and first calls
    before, start = peak_mebibytes(), time.process_time()
    value = work(rows)
    print(json.dumps({
        "seconds": time.process_time() - start, "mib": peak_mebibytes() - before, "f1": value,
    }))  # fmt: skip


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]))
