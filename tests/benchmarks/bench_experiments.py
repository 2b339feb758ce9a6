"""What a search adds to its fits, what more workers save, and figures over a million ranked rows."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import Row, beside, interleaved, turns

TRIALS = 8


def _plan(epochs: int = 3) -> Any:
    import torch
    from nnx import MetricSpec, MonitorSpec, Nets, NNModelParams, NNParams, NNTrainParams
    from nnx.plans import ExperimentPlan

    draw = torch.Generator().manual_seed(0)
    X = torch.randn(2048, 16, generator=draw)
    Y = (X[:, 0] * X[:, 1] > 0).long()

    def batches(rows: slice, shuffle: bool) -> Any:
        data = torch.utils.data.TensorDataset(X[rows], Y[rows])
        return torch.utils.data.DataLoader(data, batch_size=64, shuffle=shuffle)

    return ExperimentPlan(
        net=NNParams(input_dim=16, output_dim=2, hidden_dims=[64], dropout_prob=0.0),
        model=NNModelParams(net=Nets.FEED_FWD),
        train=NNTrainParams(
            n_epochs=epochs, metrics=[MetricSpec("nll")], monitor=MonitorSpec("nll")
        ),
        train_data=lambda: batches(slice(0, 1536), True),
        val_data=lambda: batches(slice(1536, None), False), seed=0,
    )  # fmt: skip


def _apply(base: Any, params: Any) -> Any:
    return base.with_optim(dataclasses.replace(base.train.optim, max_lr=params["lr"]))


def bench_trials() -> Iterator[Row]:
    """Trials of a study in memory, beside the same fits alone and in plain Optuna."""
    import optuna
    import torch
    from nnx import MonitorSpec
    from nnx.search import FloatParam, SearchBudget, SearchSpace, search

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore")
    plan, made = _plan(), 0
    space = SearchSpace((FloatParam("lr", 1e-4, 1e-1, log=True),))

    def sampler() -> Any:
        return optuna.samplers.RandomSampler(seed=0)

    def ours() -> None:
        nonlocal made
        made += 1
        search(
            plan, space, apply=_apply, monitor=MonitorSpec("nll"), sampler=sampler(),
            budget=SearchBudget(TRIALS), study_name=f"s{made}",
        )  # fmt: skip

    def bare() -> None:
        rates = optuna.create_study(sampler=sampler())
        for _ in range(TRIALS):
            lr = rates.ask().suggest_float("lr", 1e-4, 1e-1, log=True)
            _apply(plan, {"lr": lr}).fit()

    def plain() -> None:
        def objective(trial: Any) -> float:
            lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
            run = _apply(plan, {"lr": lr}).fit()
            run = _apply(plan, {"lr": lr}).fit().run
            return float(run.idps[-1].val_edp.metrics["nll"])

        optuna.create_study(sampler=sampler()).optimize(objective, n_trials=TRIALS)

    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            times = turns([ours, bare, plain], repeats=5, clock=time.process_time)
        finally:
            os.chdir(before)
    a, b, spread = beside(times[0], times[1])
    more = 1e3 * (a - b) / TRIALS
    yield Row("a trial more than its fit", more, None, "ms", "", "<= 20 ms", more <= 20, spread)
    a, c, spread = beside(times[0], times[2])
    yield Row(
        f"search of {TRIALS} trials", a, c, "s", "plain Optuna", "<= 1.2x", a <= 1.2 * c, spread
    )


SWEEP = """
import sys
sys.path.insert(0, {here!r})
import optuna, torch
from bench_experiments import _apply, _plan
from nnx import MonitorSpec
from nnx.search import FloatParam, SearchBudget, SearchSpace, Sweep

torch.set_num_threads(1)
sweep = Sweep(
    plan=_plan(epochs=60), space=SearchSpace((FloatParam("lr", 1e-4, 1e-1, log=True),)),
    apply=_apply, monitor=MonitorSpec("nll"), budget=SearchBudget(16),
    sampler=lambda: optuna.samplers.RandomSampler(seed=0),
)
"""


def bench_workers() -> Iterator[Row]:
    """16 trials by `nnx sweep`, in four workers and in one."""

    def swept(workers: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "plan.py")
            file.write_text(SWEEP.format(here=str(Path(__file__).parent)), encoding="utf-8")
            subprocess.run(
                [sys.executable, "-m", "nnx", "sweep", str(file), "--trials", "16",
                 "--workers", str(workers)],
                cwd=folder, check=True, capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    a, b, spread = interleaved(lambda: swept(4), lambda: swept(1), repeats=3, warmup=0)
    yield Row(
        "sweep of 16 trials, 4 workers, 2 cores", a, b, "s", "1 worker", "<= 0.59x", a <= b / 1.7,
        spread,
    )  # fmt: skip


def bench_ranking() -> Iterator[Row]:
    """Five figures over 1 M rows of 10,000 queries, as they stream and as rows in any order."""
    import numpy as np
    from nnx.ranking import RankingTask
    from nnx.ranking.evaluation import Rows

    draw, queries, candidates = np.random.default_rng(0), 10_000, 100
    scores = draw.random((queries, candidates))
    grades = (draw.random(scores.shape) < 0.1).astype(int)
    grades[:, 0] = 1
    names = ("mrr", "recall", "ndcg", "map", "precision")
    task = RankingTask(k=(10,), metrics=names, grouped=True)
    q = np.repeat(np.arange(queries), candidates)
    c = np.tile(np.arange(candidates), queries)

    def streamed() -> Any:
        rows = Rows(task)
        for start in range(0, len(q), 8192):
            part = slice(start, start + 8192)
            rows.add(q[part].tolist(), c[part].tolist(), scores.ravel()[part], grades.ravel()[part])
        return rows.finish().values()

    def loop() -> Any:
        """The definitions, a query at a time in Python."""
        import math

        sums = dict.fromkeys(names, 0.0)
        for score, grade in zip(scores.tolist(), grades.tolist()):
            order = sorted(range(candidates), key=lambda i: (-score[i], i))
            hits = [grade[i] for i in order]
            top, relevant = hits[:10], sum(hits)
            sums["mrr"] += next((1 / (r + 1) for r, h in enumerate(top) if h), 0.0)
            sums["recall"] += sum(top) / relevant
            sums["precision"] += sum(top) / 10
            sums["map"] += (
                sum(sum(hits[: r + 1]) / (r + 1) for r in range(10) if hits[r]) / relevant
            )
            best = sum(1 / math.log2(r + 2) for r in range(min(10, relevant)))
            sums["ndcg"] += sum(h / math.log2(r + 2) for r, h in enumerate(top)) / best
        return {name: value / queries for name, value in sums.items()}

    assert all(abs(streamed()[f"{name}_at_10"] - value) < 1e-9 for name, value in loop().items())
    a, b, spread = interleaved(streamed, loop, repeats=3)
    yield Row(
        "ranking figures, 1M rows, 10k queries", a, b, "s", "Python loop, no checks", "", None,
        spread,
    )  # fmt: skip
    if importlib.util.find_spec("ranx") is None:
        return
    import ranx

    warnings.filterwarnings("ignore")
    keys = [f"d{i}" for i in range(candidates)]
    qrels = ranx.Qrels({
        f"q{i}": {k: g for k, g in zip(keys, row) if g} for i, row in enumerate(grades.tolist())
    })  # fmt: skip
    run = ranx.Run({f"q{i}": dict(zip(keys, row)) for i, row in enumerate(scores.tolist())})
    wanted = ["mrr@10", "recall@10", "ndcg_burges@10", "map@10", "precision@10"]
    a, b, spread = interleaved(streamed, lambda: ranx.evaluate(qrels, run, wanted))
    yield Row(
        "ranking figures, 1M rows, 10k queries", a, b, "s", "ranx, compiled", "<= 1.2x",
        a <= 1.2 * b, spread,
    )  # fmt: skip
