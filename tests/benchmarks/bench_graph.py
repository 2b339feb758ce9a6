"""What graphs cost: an epoch beside a PyG loop, sampling, splitting links, scoring them.

Run as a script with the word "split", it splits a million links alone and prints its
seconds and how far its memory rose above what imports and edges need.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from measure import Row, beside, interleaved, peak_mebibytes, turns

os.environ.setdefault("NNX_TQDM_DISABLE", "1")

NODES, EDGES, FEATURES, CLASSES, EPOCHS = 10_000, 100_000, 64, 8, 3


def _edges(nodes: int, edges: int, seed: int = 0) -> Any:
    import torch

    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def _graph() -> Any:
    import torch
    from torch_geometric.data import Data

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    return Data(
        x=torch.randn(NODES, FEATURES, generator=generator),
        edge_index=_edges(NODES, EDGES),
        y=torch.randint(0, CLASSES, (NODES,), generator=generator),
        train_mask=torch.rand(NODES, generator=generator) < 0.7,
    )


def _model(net: Any) -> Any:
    import torch
    from nnx import Activations, Losses, NNModel, NNModelParams, NNParams

    torch.manual_seed(0)
    shape = NNParams(input_dim=FEATURES, output_dim=CLASSES, hidden_dims=[64], dropout_prob=0.5,
                     activation=Activations.RELU)  # fmt: skip
    return NNModel(net_params=shape, params=NNModelParams(net=net, loss=Losses.CROSS_ENTROPY))


def _fit(net: Any, loader: Any) -> float:
    """Seconds of one epoch of a fit without its commit, the best of its epochs."""
    from nnx import Callback, NNOptimParams, NNTrainParams

    seconds: list[float] = []

    class Epochs(Callback):
        def on_epoch_begin(self, ctx: Any) -> None:
            self.start = time.thread_time()

        def on_epoch_end(self, ctx: Any) -> None:
            seconds.append(time.thread_time() - self.start)

    params = NNTrainParams(
        n_epochs=EPOCHS, train_loader=loader, seed=0, save_phase_checkpoints=False,
        optim=NNOptimParams.builder().adam(max_lr=1e-3).build(), overwrite_existing=True,
    )  # fmt: skip
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            _model(net).train(params, callbacks=[Epochs()])
        finally:
            os.chdir(here)
    return min(seconds)


def _by_hand(net: Any, graph: Any) -> float:
    import torch

    module = _model(net).net
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    seconds = []
    module.train()
    for _ in range(EPOCHS):
        start = time.thread_time()
        optimizer.zero_grad()
        out = module(graph.x, graph.edge_index)
        loss = torch.nn.functional.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def bench_full_batch() -> Iterator[Row]:
    """An epoch over 10,000 nodes and 100,000 edges at once, one thread."""
    from nnx import Nets
    from nnx.graph.dataset import seeds_first

    graph = _graph()
    loader = [seeds_first(graph, graph.train_mask)]
    for net in (Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT):
        times = turns([partial(_fit, net, loader), partial(_by_hand, net, graph)], clock=None)
        a, b, spread = beside(*times)
        yield Row(
            f"epoch of {net.value}, full batch", a * 1e3, b * 1e3, "ms", "PyG loop", "<= 1.05x",
            a <= 1.05 * b, spread,
        )  # fmt: skip


def bench_sampling() -> Iterator[Row | str]:
    """Batches of 1,024 seeds with 10 and 10 neighbours, of 100,000 nodes and 1M edges."""
    import torch
    from nnx.graph import NeighborSampler

    torch.set_num_threads(1)
    nodes, batch = 100_000, 1024
    edges = _edges(nodes, 1_000_000)
    sampler = NeighborSampler(edges, nodes, [10, 10], seed=0)
    neighbours: dict[int, list[int]] = {}
    for source, target in edges.T.tolist():
        neighbours.setdefault(target, []).append(source)
    seeds = torch.randperm(nodes)[:batch].tolist()

    def in_python() -> None:
        seen, frontier, found = dict.fromkeys(seeds), list(seeds), []
        for _ in range(2):
            reached: dict[int, None] = {}
            for node in frontier:
                known = neighbours.get(node, ())
                drawn = known if len(known) <= 10 else random.sample(known, 10)
                for other in drawn:
                    found.append((other, node))
                    if other not in seen:
                        reached[other] = None
            seen.update(reached)
            frontier = list(reached)

    a, b, spread = interleaved(lambda: sampler.sample(seeds), in_python, clock=time.thread_time)
    yield Row(
        "sampled batch, 1024 seeds x [10, 10]", a * 1e3, b * 1e3, "ms", "plain Python",
        "<= 0.1x", a <= 0.1 * b, spread,
    )  # fmt: skip
    yield from _beside_pyg(sampler, edges, nodes, seeds)


def _beside_pyg(sampler: Any, edges: Any, nodes: int, seeds: list[int]) -> Iterator[Row | str]:
    import torch
    from torch_geometric import typing
    from torch_geometric.data import Data

    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        yield "PyG's NeighborLoader is not measured: neither pyg-lib nor torch-sparse is installed"
        return
    from torch_geometric.loader import NeighborLoader

    loader = NeighborLoader(Data(edge_index=edges, num_nodes=nodes), num_neighbors=[10, 10])
    index = torch.tensor(seeds)
    a, b, spread = interleaved(
        lambda: sampler.sample(seeds), lambda: loader.collate_fn(index), clock=time.thread_time
    )
    yield Row(
        "sampled batch, 1024 seeds x [10, 10]", a * 1e3, b * 1e3, "ms", "NeighborLoader",
        "<= 1x", a <= b, spread,
    )  # fmt: skip


def bench_sampling_growth() -> Iterator[Row]:
    """The same sample of graphs of 1e5, 1e6 and 1e7 edges, ten to a node."""
    import torch
    from nnx.graph import NeighborSampler

    torch.set_num_threads(1)
    calls = []
    for edges in (100_000, 1_000_000, 10_000_000):
        nodes = edges // 10
        sampler = NeighborSampler(_edges(nodes, edges), nodes, [5, 5], seed=0)
        seeds = torch.randperm(nodes)[:256].tolist()
        calls.append(partial(sampler.sample, seeds))
    small, middle, large = turns(calls, clock=time.thread_time)
    for name, times in (("1M", middle), ("10M", large)):
        a, b, spread = beside(times, small)
        yield Row(
            f"sampling of {name} edges, 256 seeds x [5, 5]", a * 1e3, b * 1e3, "ms",
            "of 0.1M edges", "<= 3x", a <= 3 * b, spread,
        )  # fmt: skip


def bench_link_split() -> Iterator[Row]:
    """A million edges among 200,000 nodes, made distinct, split, with negatives."""
    done = subprocess.run(
        [sys.executable, __file__, "split"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    yield Row("link split of 1M edges", found["seconds"], None, "s", "", "<= 10 s",
              found["seconds"] <= 10)  # fmt: skip
    yield Row("memory of a link split of 1M edges", found["mebibytes"], None, "MiB", "",
              "<= 800 MiB", found["mebibytes"] <= 800)  # fmt: skip


def bench_link_metrics() -> Iterator[Row]:
    """AUROC and average precision of a million candidates, from their logits."""
    import numpy as np
    from nnx.link_tasks.metrics import ranked
    from sklearn.metrics import average_precision_score, roc_auc_score

    generator = np.random.default_rng(0)
    targets = generator.random(1_000_000) < 0.5
    logits = generator.normal(size=1_000_000) + targets

    def theirs() -> None:
        roc_auc_score(targets, logits)
        average_precision_score(targets, logits)

    a, b, spread = interleaved(
        lambda: ranked(logits, targets), theirs, clock=time.thread_time, repeats=5
    )
    yield Row(
        "AUROC and AP of 1M candidates", a, b, "s", "scikit-learn", "<= 1.2x", a <= 1.2 * b, spread
    )


def _split() -> None:
    """The child of :func:`bench_link_split`."""
    from nnx.link_tasks import split_links

    edges = _edges(200_000, 1_000_000)
    split_links(edges[:, :100], 200_000, seed=0)
    before, start = peak_mebibytes(), time.perf_counter()
    split_links(edges, 200_000, seed=0)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "mebibytes": peak_mebibytes() - before}))


if __name__ == "__main__" and sys.argv[1:] == ["split"]:
    _split()
