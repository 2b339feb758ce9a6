"""NNx beside the loop by hand, Lightning and the Hugging Face Trainer.

All train the same net on the same batches and must end with the same weights; see
``peers``. NNx keeps six scores of every training batch and commits every epoch
durably (flushed to the disk, recoverable at any instant); the others keep or flush
only what a row says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import peers
from measure import Row, beside, children_seconds, turns
from peers import Fit, Task

STEPS = 200


def _fits(
    task: Task, seconds: Callable[[Fit], float], rivals: Mapping[str, Callable[[Task], Fit]],
    *, repeats: int, within: str | None = None,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """NNx beside each rival, all of them in turn; every fit ends with the same weights."""
    fits: dict[str, Fit] = {}

    def timed(name: str, fit: Callable[[Task], Fit]) -> float:
        with peers.elsewhere(within):
            fits[name] = fit(task)
        return seconds(fits[name])

    everyone = {"NNx": peers.with_nnx, **rivals}
    calls = [partial(timed, name, fit) for name, fit in everyone.items()]
    ours, *others = turns(calls, repeats=repeats, clock=None)
    peers.check_equal(fits)
    for name, times in zip(rivals, others):
        yield name, beside(ours, times)


def bench_step() -> Iterator[Row | str]:
    """A training step: MLP 20-64-64-2, batch 32, Adam; processor time of an epoch's batches."""
    from torch.utils.data import DataLoader, TensorDataset

    data, net = peers.rows(32 * STEPS), peers.mlp(20, 64, 64, 2)
    sources = {
        "batches in memory": peers.in_batches(data, 32),
        "DataLoader": DataLoader(TensorDataset(*data), batch_size=32),
    }
    for where, batches in sources.items():
        for record in (False, True):
            task = Task(net, batches, epochs=2, record=record, clock=time.process_time)
            fitted = _fits(
                task, lambda fit: min(fit.batches), peers.contestants(), repeats=7
            )  # fmt: skip
            for name, (ours, other, spread) in fitted:
                yield Row(
                    f"step, {where}", ours / STEPS * 1e6, other / STEPS * 1e6, "us",
                    f"{name}, recording {'the same scores' if record else 'nothing'}",
                    spread=spread,
                )  # fmt: skip
    yield from peers.left_out()


def bench_small_epoch() -> Iterator[Row | str]:
    """Two batches, two of validation, LAST and BEST: from one epoch's start to the next."""
    batches = peers.in_batches(peers.rows(64), 32)
    task = Task(peers.mlp(20, 64, 64, 2), batches, epochs=41, val=batches)
    rivals = peers.contestants()
    yield from _saved("epoch of 2 batches, validation, LAST and BEST", task,
                      lambda fit: median(fit.periods[10:]), rivals, repeats=7)  # fmt: skip
    yield from peers.left_out()


def bench_commit() -> Iterator[Row | str]:
    """LAST and BEST of 19 million parameters with Adam, at the end of an epoch."""
    batches = peers.in_batches(peers.rows(4, 1024), 4)
    net = peers.mlp(1024, 4096, 3072, 512, 1024)
    task = Task(net, batches, epochs=4, lr=1e-6, val=batches)
    rivals = peers.contestants()
    if peers.HAS_LIGHTNING:
        linked = partial(peers.with_lightning, save_last="link")
        rivals[f"{peers.LIGHTNING}, save_last='link'"] = linked
    yield from _saved("commit LAST and BEST, 19M parameters with Adam", task,
                      lambda fit: median(fit.commits[1:]), rivals, repeats=5)  # fmt: skip
    yield from peers.left_out()


def _saved(
    what: str, task: Task, seconds: Callable[[Fit], float],
    rivals: Mapping[str, Callable[[Task], Fit]], *, repeats: int,
) -> Iterator[Row]:  # fmt: skip
    """Rows on the disk and, where there is one, on a memory filesystem: a flush is free there."""
    for within, where in ((None, ""), ("/dev/shm", ", in memory")):
        if within is not None and not os.path.isdir(within):
            continue
        for name, found in _fits(task, seconds, rivals, repeats=repeats, within=within):
            flushed = "flushed" if name == "the loop by hand" else "not flushed"
            yield Row(
                what + where, found.ours * 1e3, found.other * 1e3, spread=found.spread,
                against=name if where else f"{name}, {flushed}",
            )  # fmt: skip


_IMPORTS = {
    "alone": {
        "NNx": "import nnx",
        "the loop by hand": "import torch",
        peers.LIGHTNING: "import lightning",
        peers.HUGGING_FACE: "import transformers",
    },
    "until a trainer can be built": {
        "NNx": "from nnx import NNModel, NNTrainParams; import nnx.engine.fit",
        "the loop by hand": "import torch",
        peers.LIGHTNING: "from lightning import LightningModule, Trainer",
        peers.HUGGING_FACE: "from transformers import Trainer, TrainingArguments",
    },
    "and train one small epoch": {
        "NNx": "import peers; peers.smallest(peers.with_nnx)",
        "the loop by hand": "import peers; peers.smallest(peers.by_hand)",
        peers.LIGHTNING: "import peers; peers.smallest(peers.with_lightning)",
        peers.HUGGING_FACE: "import peers; peers.smallest(peers.with_hugging_face)",
    },
}


def bench_import() -> Iterator[Row | str]:
    """Processor time of whole processes: importing, and importing to train."""
    here = os.path.dirname(os.path.abspath(__file__))

    def process(code: str) -> None:
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=here,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    installed = ["NNx", *peers.contestants()]
    for what, codes in _IMPORTS.items():
        calls = [partial(process, codes[name]) for name in installed]
        ours, *others = turns(calls, repeats=3, warmup=0, clock=children_seconds)
        for name, times in zip(installed[1:], others):
            a, b, spread = beside(ours, times)
            yield Row(f"import {what}", a * 1e3, b * 1e3, against=name, spread=spread)
    yield from peers.left_out()


def bench_predict() -> Iterator[Row | str]:
    """Raw outputs and classes of 100,000 rows, on the host."""
    from torch.utils.data import DataLoader, TensorDataset

    data, net = peers.rows(100_000, 32), peers.mlp(32, 64, 10)()
    for size in (256, 4096):
        sources = {
            "in memory": peers.in_batches(data, size),
            "through a DataLoader": DataLoader(TensorDataset(*data), batch_size=size),
        }
        for where, loader in sources.items():
            for name, (ours, other, spread) in _predictions(net, loader):
                yield Row(
                    f"predict 100,000 x 32, batches of {size:,} {where}", ours * 1e3, other * 1e3,
                    against=name, spread=spread,
                )  # fmt: skip
    yield from peers.left_out()


def _predictions(net: Any, loader: Any) -> Iterator[tuple[str, Any]]:
    """NNx beside each rival; everyone returns the same outputs and classes."""
    with peers.elsewhere():
        everyone = peers.predictors(net, loader)
        found = {name: call() for name, call in everyone.items()}
        for name, results in found.items():
            for one, reference in zip(results, found["NNx"]):
                assert (one == reference).all(), name
        ours, *others = turns(list(everyone.values()), repeats=7, clock=time.process_time)
    for name, times in zip(list(everyone)[1:], others):
        yield name, beside(ours, times)
