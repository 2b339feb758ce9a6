"""What a training step costs beside the same loop written by hand, and what a resume costs.

MLP 20-64-64-2, batch 32, Adam, one thread. Every batch is recorded with loss,
error, accuracy, f1, recall and precision; the hand-written loop does the same
with a confusion matrix in NumPy. The time is the thread's own (a busy machine
stretches the clock, not the work), of an epoch's batches without its commit.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measure import Row, interleaved

os.environ.setdefault("NNX_TQDM_DISABLE", "1")

BATCHES, REPEATS, EPOCHS = 400, 9, 2


def _data() -> Any:
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32 * BATCHES, 20, generator=generator)
    return x, (x[:, 0] + 2 * torch.randn(len(x), generator=generator) > 0).long()


def _in_memory() -> Any:
    x, y = _data()
    return [(x[i : i + 32], y[i : i + 32]) for i in range(0, len(x), 32)]


def _loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*_data()), batch_size=32, shuffle=True)


def _model() -> Any:
    import torch
    from nnx import Losses, Nets, NNModel, NNModelParams, NNParams

    torch.manual_seed(0)
    return NNModel(
        net_params=NNParams(input_dim=20, output_dim=2, hidden_dims=[64, 64], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def _adam(**fields: Any) -> Any:
    from nnx import NNOptimParams, Optims

    return NNOptimParams(
        name=Optims.ADAM, max_lr=1e-3, weight_decay=0.0, momentum=(0.9, 0.999), **fields
    )


def _scores(output: Any, target: Any) -> tuple[float, float, float, float, float]:
    """Accuracy, error, and macro f1, recall and precision, as one would by hand."""
    import numpy as np

    table = np.bincount(target.numpy() * 2 + output.argmax(1).numpy(), minlength=4).reshape(2, 2)
    hits, claimed, real = np.diag(table), table.sum(0), table.sum(1)
    accuracy = hits.sum() / len(target)
    recall, precision = hits / np.maximum(real, 1), hits / np.maximum(claimed, 1)
    f1 = 2 * hits / np.maximum(claimed + real, 1)
    return accuracy, 1 - accuracy, f1.mean(), recall.mean(), precision.mean()


class _Epochs:
    """A callback that keeps the seconds of every epoch's batches."""

    def __new__(cls) -> Any:
        from nnx import Callback

        class Epochs(Callback):
            def __init__(self) -> None:
                self.seconds: list[float] = []

            def on_epoch_begin(self, ctx: Any) -> None:
                self.start = time.thread_time()

            def on_epoch_end(self, ctx: Any) -> None:
                self.seconds.append(time.thread_time() - self.start)

        return Epochs()


def _fit(loader: Any, accumulate: int = 1, **arguments: Any) -> float:
    """Seconds of one epoch of a fit, the better of its epochs."""
    from nnx import NNTrainParams

    epochs = _Epochs()
    params = NNTrainParams(
        n_epochs=EPOCHS, train_loader=loader, seed=0, save_phase_checkpoints=False,
        optim=_adam(accumulate_grad_batches=accumulate), overwrite_existing=True,
    )  # fmt: skip
    with _elsewhere():
        _model().train(params, callbacks=[epochs], **arguments)
    return min(epochs.seconds)


def _by_hand(loader: Any, accumulate: int = 1, *, record: bool = True) -> float:
    import torch

    net, loss_fn = _model().net, torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    seconds = []
    for _ in range(EPOCHS):
        start, records = time.thread_time(), []
        for index, (x, y) in enumerate(loader):
            if index % accumulate == 0:
                optimizer.zero_grad()
            output = net(x)
            loss = loss_fn(output, y)
            (loss / accumulate if accumulate > 1 else loss).backward()
            if index % accumulate == accumulate - 1:
                optimizer.step()
            records.append((loss.item(), *(_scores(output.detach(), y) if record else ())))
        seconds.append(time.thread_time() - start)
    return min(seconds)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """A folder of its own, in silence."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def _row(
    name: str, against: str, ours: Callable[[], float], other: Callable[[], float],
    target: float | None = None,
) -> Row:  # fmt: skip
    """The median of several turns each, in microseconds per batch."""
    a, b, spread = interleaved(ours, other, repeats=REPEATS, warmup=0, clock=None)
    promise = "" if target is None else f"<= {target:.2f}x"
    met = None if target is None else a / b <= target
    return Row(name, a / BATCHES * 1e6, b / BATCHES * 1e6, "us", against, promise, met, spread)


def bench_step() -> Iterator[Row]:
    """The default step."""
    batches = _in_memory()
    yield _row(
        "step, batches in memory", "the loop by hand, recording",
        lambda: _fit(batches), lambda: _by_hand(batches), target=1.10,
    )  # fmt: skip
    yield _row(
        "step, batches in memory", "the loop by hand, recording nothing",
        lambda: _fit(batches), lambda: _by_hand(batches, record=False),
    )  # fmt: skip
    yield _row(
        "step, DataLoader", "the loop by hand, recording",
        lambda: _fit(_loader()), lambda: _by_hand(_loader()), target=1.10,
    )  # fmt: skip


def bench_accumulation() -> Iterator[Row]:
    """Windows of four microbatches, which stay exact when microbatches are uneven."""
    from nnx import supervised_objective

    batches = _in_memory()
    yield _row(
        "default step, accumulation 4", "the loop by hand, loss / 4",
        lambda: _fit(batches, 4), lambda: _by_hand(batches, 4), target=1.10,
    )  # fmt: skip
    yield _row(
        "objective, accumulation 4", "the loop by hand, loss / 4",
        lambda: _fit(batches, 4, objective=supervised_objective()),
        lambda: _by_hand(batches, 4), target=1.10,
    )  # fmt: skip
    yield _row(
        "objective, accumulation 4, DataLoader", "the loop by hand, loss / 4",
        lambda: _fit(_loader(), 4, objective=supervised_objective()),
        lambda: _by_hand(_loader(), 4), target=1.10,
    )  # fmt: skip


def bench_trainer() -> Iterator[Row]:
    """Two named optimizers, stepped by a step function and by an objective."""
    import torch
    from nnx import (
        NNEvaluationDataPoint,
        NNParamGroupSpec,
        NNTrainerParams,
        Trainer,
        supervised_objective,
    )

    batches, loss_fn = _in_memory(), torch.nn.CrossEntropyLoss()
    patterns = {"body": "layers.[01].*", "head": "layers.2.*"}

    def step(ctx: Any) -> Any:
        x, y = ctx.batch
        for optimizer in ctx.optimizers.values():
            optimizer.zero_grad()
        output = ctx.model.net(x)
        loss = loss_fn(output, y)
        loss.backward()
        for optimizer in ctx.optimizers.values():
            optimizer.step()
        accuracy, error, f1, recall, precision = _scores(output.detach(), y)
        return NNEvaluationDataPoint(
            loss=loss.item(), accuracy=accuracy, error=error, f1=f1, recall=recall,
            precision=precision,
        )  # fmt: skip

    def fit(**owner: Any) -> float:
        epochs = _Epochs()
        params = NNTrainerParams(
            n_epochs=EPOCHS, train_loader=batches, seed=0, save_phase_checkpoints=False,
            overwrite_existing=True,
            optims={
                name: _adam(param_groups=[NNParamGroupSpec(name_pattern=pattern)])
                for name, pattern in patterns.items()
            },
        )  # fmt: skip
        with _elsewhere():
            Trainer(_model()).train(params, callbacks=[epochs], **owner)
        return min(epochs.seconds)

    def by_hand() -> float:
        net = _model().net
        owned = [[*net.layers[0].parameters(), *net.layers[1].parameters()],
                 [*net.layers[2].parameters()]]  # fmt: skip
        optimizers = [torch.optim.Adam(parameters, lr=1e-3) for parameters in owned]
        seconds = []
        for _ in range(EPOCHS):
            start, records = time.thread_time(), []
            for x, y in batches:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                output = net(x)
                loss = loss_fn(output, y)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                records.append((loss.item(), *_scores(output.detach(), y)))
            seconds.append(time.thread_time() - start)
        return min(seconds)

    against = "the loop by hand, two optimizers"
    yield _row("Trainer, step function", against, lambda: fit(trainer_step_fn=step), by_hand, 1.10)
    yield _row(
        "Trainer, objective", against, lambda: fit(objective=supervised_objective()), by_hand, 1.10
    )


def bench_resume() -> Iterator[Row]:
    """Bytes of a resume point and the time from ``train()`` to the first resumed batch."""
    from nnx import Callback, NNTrainParams

    batches = _in_memory()[:20]

    class FirstBatch(Callback):
        def on_epoch_begin(self, ctx: Any) -> None:
            self.seconds = time.perf_counter() - self.start

    def first_batch(counter: Iterator[int], **resumed: Any) -> float:
        first, model = FirstBatch(), _model()
        params = NNTrainParams(
            n_epochs=1, train_loader=batches, seed=0, optim=_adam(), **resumed
        )  # fmt: skip
        first.start = time.perf_counter()
        model.train(params, callbacks=[first], salt=str(next(counter)))
        return first.seconds

    with _elsewhere():
        params = NNTrainParams(n_epochs=1, train_loader=batches, seed=0, optim=_adam())
        model = _model()
        run = model.train(params)
        resume_from = {"resume_from_run_id": run.id, "resume_mode": "stateful"}
        tensors = sum(p.numel() * p.element_size() for p in model.net.parameters())
        folder = Path("runs") / run.id / "checkpoints"
        files = [f for f in folder.glob("last.pt*") if f.suffix != ".lock"]
        point = [f for f in files if f.name.count(".opt") == 0 or f.name.count(".") > 3]
        size = sum(f.stat().st_size for f in point)
        fresh, again = (
            partial(first_batch, counter=itertools.count(start), **resumed)
            for start, resumed in ((0, {}), (10**6, resume_from))
        )
        resumed, started, spread = interleaved(again, fresh, repeats=REPEATS, clock=None)
    yield Row("resume point", size / 1e3, 3 * tensors / 1e3, "kB", "weights and Adam's two moments")
    yield Row(
        "resume, to the first batch", resumed * 1e3, started * 1e3,
        against="a fresh run, to the first batch", spread=spread,
    )  # fmt: skip
