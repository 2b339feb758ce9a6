"""From one process to two on this machine: NNx beside plain DDP, Lightning, Hugging Face.

Every rank trains an MLP 256-1024-1024-10 on batches of 1,024 rows of its own, so two
ranks do twice the work per step; rows per second would double if nothing were
exchanged and the cores did not share their memory. One rank is ordinary training.
Run as a script by torchrun it is one rank, which trains with everyone in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import measure
import peers
import torch
from measure import Row, beside, spread, turns
from torch.utils.data import TensorDataset

STEPS, SIZE, WIDTH = 4, 1024, 256


def bench_two_ranks() -> Iterator[Row | str]:
    """One process and two processes in turn; in each, everyone in turn."""
    found: dict[int, dict[str, list[float]]] = {1: {}, 2: {}}
    for _ in range(1 if measure.quick else 2):
        for world, seconds in found.items():
            for name, times in _ranks(world).items():
                seconds.setdefault(name, []).extend(times)
    one, two = found[1], found[2]
    gained = {name: [2 * a / b for a, b in zip(one[name], two[name])] for name in one}
    yield Row(
        "rows per second of two ranks (at best 2x)", 2 * SIZE / median(two["NNx"]),
        SIZE / median(one["NNx"]), "rows/s", "NNx, one rank", spread=spread(gained["NNx"]),
    )  # fmt: skip
    for name in list(one)[1:]:
        a, b, varied = beside(gained["NNx"], gained[name])
        yield Row("times the rows of one rank", a, b, "x", _two(name), spread=varied)
    for name in list(one)[1:]:
        a, b, varied = beside(two["NNx"], two[name])
        yield Row("step of two ranks", a * 1e3, b * 1e3, "ms", _two(name), spread=varied)
    yield from peers.left_out()


def _two(name: str) -> str:
    return f"{name}, plain DDP" if name == "the loop by hand" else name


def _ranks(world: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="nnx-bench-") as folder:
        file = Path(folder) / "seconds.json"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        subprocess.run(
            [sys.executable, *(start if world > 1 else []), __file__, str(file)], check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1"},
        )  # fmt: skip
        return json.loads(file.read_text())


def _rank(file: str) -> None:
    """The seconds of a step with everyone, in turns, written by rank 0."""
    from nnx.distributed import init_process_group

    rank, world = init_process_group() if "RANK" in os.environ else (0, 1)
    x, y = peers.rows(STEPS * SIZE * world, WIDTH)
    task = peers.Task(
        peers.mlp(WIDTH, 1024, 1024, 10), peers.in_batches((x[rank::world], y[rank::world]), SIZE),
        epochs=2, shared=TensorDataset(x, y) if world > 1 else None,
    )  # fmt: skip
    fits: dict[str, peers.Fit] = {}

    def step(name: str) -> float:
        if world > 1:
            torch.distributed.barrier()
        fits[name] = everyone[name](task)
        return min(fits[name].batches) / STEPS

    everyone = {"NNx": peers.with_nnx, **peers.contestants()}
    with peers.elsewhere():
        times = turns([partial(step, name) for name in everyone], repeats=2, clock=None)
    peers.check_equal(fits, tolerance=1e-4)
    if rank == 0:
        Path(file).write_text(json.dumps(dict(zip(everyone, times))))


if __name__ == "__main__":
    _rank(sys.argv[1])
