"""In-memory epochs beside a loop by hand, planning a large split, standardizing a large table."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from measure import Row, interleaved
from nnx import Losses, NNModel, NNModelParams, NNOptimParams, NNTrainParams, set_seed
from nnx.data import fast_batches
from nnx.data_splits import plan_split
from nnx.preprocessing import Standardizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, ROWS, EPOCHS = 32, 32_000, 2


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 20, generator=generator)
    y = torch.randint(0, 2, (ROWS,), generator=generator)
    return DataLoader(TensorDataset(X, y), batch_size=BATCH, shuffle=True)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def linear() -> nn.Module:
    return nn.Linear(20, 2)


def train_by_hand(build: Callable[[], nn.Module], adam: bool, scored: bool = False) -> None:
    net, loss_fn, batches = build(), nn.CrossEntropyLoss(), loader()
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=1e-3)
        if adam
        else torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    )
    set_seed(0)
    records = []
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            output = net(x)
            loss = loss_fn(output, y)
            loss.backward()
            optimizer.step()
            if scored:
                records.append((loss.item(), scores(y.numpy(), output.argmax(1).numpy())))
            else:
                records.append((loss.item(), (output.argmax(1) == y).float().mean().item()))


def scores(y: np.ndarray, predicted: np.ndarray) -> tuple[float, ...]:
    """Accuracy and macro f1, recall and precision, as one would write them by hand."""
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    macro = precision_recall_fscore_support(y, predicted, average="macro", zero_division=0)
    return (accuracy_score(y, predicted), *macro[:3])


def train_with_nnx(build: Callable[[], nn.Module], adam: bool) -> None:
    optim = NNOptimParams.builder()
    params = NNTrainParams(
        n_epochs=EPOCHS,
        train_loader=loader(),
        optim=(optim.adam(max_lr=1e-3) if adam else optim.sgd(max_lr=1e-3)).build(),
        seed=0,
        overwrite_existing=True,
        save_phase_checkpoints=False,
    )
    NNModel(module=build(), params=NNModelParams(loss=Losses.CROSS_ENTROPY)).train(params)


def bench_epoch_in_memory() -> Iterator[Row]:
    torch.set_num_threads(1)
    os.environ["NNX_TQDM_DISABLE"] = "1"
    cases = [
        ("MLP 20-64-64-2, Adam", mlp, True, False),
        ("MLP 20-64-64-2, Adam, six scores per batch", mlp, True, True),
        ("one linear layer, SGD", linear, False, False),
    ]
    for name, build, adam, scored in cases:
        with tempfile.TemporaryDirectory() as folder, in_folder(folder):
            ours, by_hand = interleaved(
                lambda build=build, adam=adam: train_with_nnx(build, adam),
                lambda build=build, adam=adam, scored=scored: train_by_hand(build, adam, scored),
                repeats=1 if scored else 5,
                warmup=0 if scored else 1,
            )
        yield Row(
            f"epoch of 32,000 rows in memory, batch {BATCH}: {name}",
            ours / EPOCHS * 1e3,
            by_hand / EPOCHS * 1e3,
            against="loop by hand, " + ("scikit-learn scores" if scored else "loss and accuracy"),
            target="<= 0.75x",
            met=ours <= 0.75 * by_hand,
        )
    data = loader()
    ours, plain = interleaved(
        lambda: sum(1 for _ in fast_batches(data)), lambda: sum(1 for _ in data), repeats=5
    )
    batches = ROWS / BATCH
    yield Row(
        f"one batch of {BATCH} rows in memory", ours / batches * 1e6, plain / batches * 1e6,
        unit="us", against="DataLoader",
    )  # fmt: skip


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    held = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(held)


def bench_plan_split() -> Iterator[Row]:
    rows = 5_000_000
    generator = np.random.default_rng(0)
    ids = generator.permutation(rows)
    days = np.datetime64("2020-01-01") + generator.integers(0, 1000, rows).astype("m8[D]")
    cutoffs = (np.datetime64("2022-01-01"), np.datetime64("2022-06-01"))
    plans = {
        "500k groups": {"strategy": "group", "groups": generator.integers(0, 500_000, rows), "seed": 1},
        "10 classes": {"strategy": "stratified", "labels": generator.integers(0, 10, rows), "seed": 1},
        "two cutoffs": {"strategy": "chronological", "times": days, "cutoffs": cutoffs},
    }  # fmt: skip
    for name, arguments in plans.items():
        start = time.perf_counter()
        plan = plan_split(ids, **arguments)
        yield Row(f"plan a split of 5M ids, {name}", time.perf_counter() - start, unit="s")
    start = time.perf_counter()
    plan.resolve(ids)
    yield Row("replay a split of 5M ids", time.perf_counter() - start, unit="s")


def bench_standardize() -> Iterator[Row]:
    table = np.random.default_rng(0).normal(3, 2, (5_000_000, 50)).astype(np.float32)
    rows = np.arange(len(table))

    def timed(call):
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result

    fit, fitted = timed(lambda: Standardizer.fit(table, rows=rows))
    apply, result = timed(lambda: fitted.transform(table))
    del result
    other_fit = other_apply = None
    with contextlib.suppress(ImportError):
        from sklearn.preprocessing import StandardScaler

        other_fit, scaler = timed(lambda: StandardScaler().fit(table))
        other_apply, _ = timed(lambda: scaler.transform(table))
    yield Row("fit a Standardizer on 5M x 50 float32", fit, other_fit, "s", "scikit-learn")
    yield Row("standardize 5M x 50 float32", apply, other_apply, "s", "scikit-learn")
