"""In-memory epochs beside a loop by hand, planning a large split, standardizing a large table."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import bench_training as parts
import numpy as np
import torch
from measure import Row, interleaved, seconds
from nnx import Losses, NNModel, NNModelParams, NNOptimParams, NNTrainParams, set_seed
from nnx.data import fast_batches
from nnx.data_splits import plan_split
from nnx.preprocessing import Standardizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, ROWS = 32, 32_000


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


def train_by_hand(
    build: Callable[[], nn.Module],
    adam: bool,
    epochs: int,
    scores: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    net, loss_fn, batches = build(), nn.CrossEntropyLoss(), loader()
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=1e-3)
        if adam
        else torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    )
    set_seed(0)
    records = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            output = net(x)
            loss = loss_fn(output, y)
            loss.backward()
            optimizer.step()
            records.append((loss.item(), scores(output, y)))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return (output.argmax(1) == target).float().mean().item()


def sklearn_scores(output: torch.Tensor, target: torch.Tensor) -> tuple[float, ...]:
    """Accuracy and macro f1, recall and precision, as one would write them by hand."""
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    y, predicted = target.numpy(), output.argmax(1).numpy()
    macro = precision_recall_fscore_support(y, predicted, average="macro", zero_division=0)
    return (accuracy_score(y, predicted), *macro[:3])


def train_with_nnx(build: Callable[[], nn.Module], adam: bool, epochs: int) -> None:
    optim = NNOptimParams.builder()
    params = NNTrainParams(
        n_epochs=epochs,
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
    slow = sklearn_scores
    cases = [
        ("MLP 20-64-64-2, Adam", mlp, True, parts._scores, "the same six scores"),
        ("MLP 20-64-64-2, Adam", mlp, True, slow, "the same six scores by scikit-learn"),
        ("MLP 20-64-64-2, Adam", mlp, True, accuracy, "loss and accuracy alone"),
        ("one linear layer, SGD", linear, False, accuracy, "loss and accuracy alone"),
    ]
    for name, build, adam, scores, what in cases:
        epochs = 1 if scores is slow else 2
        nnx = partial(train_with_nnx, build, adam, epochs)
        hand = partial(train_by_hand, build, adam, epochs, scores)
        with tempfile.TemporaryDirectory() as folder, in_folder(folder):
            ours, by_hand, spread = interleaved(
                nnx, hand, repeats=3 if scores is slow else 5, warmup=0 if scores is slow else 1,
                clock=time.process_time,
            )  # fmt: skip
        yield Row(
            f"epoch of 32,000 rows in memory, batch {BATCH}: {name}",
            ours / epochs * 1e3,
            by_hand / epochs * 1e3,
            against=f"loop by hand, {what}",
            target="<= 0.75x",
            met=ours <= 0.75 * by_hand,
            spread=spread,
        )
    data = loader()
    ours, plain, spread = interleaved(
        lambda: sum(1 for _ in fast_batches(data)),
        lambda: sum(1 for _ in data),
        repeats=5,
        clock=time.process_time,
    )
    batches = ROWS / BATCH
    yield Row(
        f"one batch of {BATCH} rows in memory", ours / batches * 1e6, plain / batches * 1e6,
        unit="us", against="DataLoader", spread=spread,
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
    """A recorded plan beside the index arrays of scikit-learn or of a comparison."""
    from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit

    rows = 5_000_000
    generator = np.random.default_rng(0)
    ids = generator.permutation(rows)
    groups, labels = generator.integers(0, 500_000, rows), generator.integers(0, 10, rows)
    days = np.datetime64("2020-01-01") + generator.integers(0, 1000, rows).astype("m8[D]")
    cutoffs = (np.datetime64("2022-01-01"), np.datetime64("2022-06-01"))

    def twice(splitter: type, name: str, by: np.ndarray) -> None:
        """Train from the rest, then validation from test."""
        first, second = (splitter(1, test_size=size, random_state=1) for size in (0.3, 0.5))
        _, rest = next(first.split(ids, **{name: by}))
        next(second.split(rest, **{name: by[rest]}))

    plans = {
        "500k groups": (
            {"strategy": "group", "groups": groups, "seed": 1},
            lambda: twice(GroupShuffleSplit, "groups", groups), "scikit-learn, twice",
        ),
        "10 classes": (
            {"strategy": "stratified", "labels": labels, "seed": 1},
            lambda: twice(StratifiedShuffleSplit, "y", labels), "scikit-learn, twice",
        ),
        "two cutoffs": (
            {"strategy": "chronological", "times": days, "cutoffs": cutoffs},
            lambda: np.split(np.argsort(days, kind="stable"), np.searchsorted(np.sort(days), cutoffs)),
            "NumPy, sorted",
        ),
    }  # fmt: skip
    for name, (arguments, other, against) in plans.items():
        a, b, spread = interleaved(
            lambda arguments=arguments: plan_split(ids, **arguments), other,
            repeats=3, warmup=0, clock=time.process_time,
        )  # fmt: skip
        yield Row(
            f"plan a split of 5M ids, {name}", a * 1e3, b * 1e3, against=against, spread=spread
        )
    plan = plan_split(ids, **plans["two cutoffs"][0])
    replay, varied = seconds(
        lambda: plan.resolve(ids), repeats=3, warmup=0, clock=time.process_time
    )
    yield Row("replay a split of 5M ids", replay * 1e3, spread=varied)


def bench_standardize() -> Iterator[Row]:
    """Checked and in float64, beside scikit-learn in float32."""
    from sklearn.preprocessing import StandardScaler

    table = np.random.default_rng(0).normal(3, 2, (5_000_000, 50)).astype(np.float32)
    rows = np.arange(len(table))
    ours, theirs = Standardizer.fit(table, rows=rows), StandardScaler().fit(table)
    calls = {
        "fit a Standardizer on": (
            lambda: Standardizer.fit(table, rows=rows), lambda: StandardScaler().fit(table)
        ),
        "standardize": (lambda: ours.transform(table), lambda: theirs.transform(table)),
    }  # fmt: skip
    for name, pair in calls.items():
        a, b, spread = interleaved(*pair, repeats=3, warmup=0, clock=time.process_time)
        yield Row(f"{name} 5M x 50 float32", a, b, "s", "scikit-learn", spread=spread)
