"""Batches of sampled neighbourhoods: equal for any number of workers, dealt out to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from nnx.distributed.partition import RankPartition, ShardedLoader
from nnx.distributed.process import rank_and_world
from nnx.graph.sampling import NeighborSampler, Neighbourhood, PygSampler, data_of
from nnx.utils import validation as check
from torch.utils.data import DataLoader, Dataset, Sampler

_BACKENDS: dict[str, Any] = {"nnx": NeighborSampler, "pyg-lib": PygSampler}


class NeighborBatches(ShardedLoader):
    """Seed nodes of a graph in batches, each with its sampled neighbourhood.

    A batch is a PyG ``Data`` object, its ``batch_size`` seeds first. ``n_id`` and
    ``e_id`` are the global ids of its nodes and edges, ``input_id`` the places of the
    seeds among ``nodes``, ``seed_id`` their node ids.

    ``data`` is one homogeneous graph; ``nodes`` are the seeds, as ids or as a mask
    (all nodes by default). See :class:`~nnx.graph.NeighborSampler` for ``fanouts``,
    ``replace`` and ``subgraph``. With ``shuffle``, the order of the seeds and the draws
    are those of ``seed`` and the epoch, which the training loop announces by
    ``set_epoch``; in a loop of your own, every pass is the next epoch. Without
    ``shuffle`` every pass is the same.

    Under a process group each rank reads its share of the seeds. ``backend="pyg-lib"``
    samples by pyg-lib, where it is installed.
    """

    def __init__(
        self,
        data: Any,
        fanouts: Sequence[int],
        *,
        batch_size: int,
        nodes: Any = None,
        shuffle: bool = True,
        replace: bool = False,
        subgraph: str = "directional",
        seed: int = 0,
        num_workers: int = 0,
        policy: str = "pad",
        backend: str = "nnx",
    ) -> None:
        owner = type(self).__name__
        count = int(data.num_nodes)
        self.nodes = seed_nodes(nodes, count, owner)
        self.batch_size = check.count(owner, "batch_size", batch_size)
        workers = check.count(owner, "num_workers", num_workers, at_least=0)
        made = _BACKENDS[check.choice(owner, "backend", backend, _BACKENDS)]
        self.sampler = made(
            data.edge_index, count, fanouts, replace=replace, subgraph=subgraph, seed=seed
        )
        self.data = data
        rank, world = rank_and_world()
        self.partition = RankPartition(
            len(self.nodes), rank=rank, world_size=world,
            kind="train" if check.flag(owner, "shuffle", shuffle) else "validation",
            policy=policy, seed=self.sampler.seed % (1 << 62),
        )  # fmt: skip
        self.dataset = _Samples(self.nodes, self.sampler)
        self.collate_fn = None
        self._batches = _BatchesOf(self.partition, self.batch_size)
        self._workers = workers
        self._passes: int | None = 0

    def set_epoch(self, epoch: int) -> None:
        """Order and draw for ``epoch``, until the next call."""
        super().set_epoch(epoch)
        self._passes = None

    def descriptor(self) -> dict[str, Any]:
        """The plan of the batches, equal in all processes of a fit."""
        sampler = self.sampler
        return {
            **super().descriptor(),
            "fanouts": list(sampler.fanouts),
            "replace": sampler.replace,
            "subgraph": sampler.subgraph,
        }

    def __iter__(self) -> Iterator[Any]:
        if self._passes is not None and self.partition.shuffle:
            self.partition.set_epoch(self._passes)
            self._passes += 1
        reader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._batches,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(0),  # or it would draw from the global one
        )
        for places, sample in reader:
            seeds = torch.from_numpy(places)
            yield data_of(
                self.data, sample, input_id=seeds, batch_size=len(seeds),
                seed_id=torch.from_numpy(self.nodes[places]),
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._batches)


def seed_nodes(nodes: Any, num_nodes: int, owner: str) -> np.ndarray:
    """Node ids of a mask, of ids, or of all nodes (``None``)."""
    if nodes is None:
        return np.arange(num_nodes)
    ids = torch.as_tensor(nodes).cpu()
    if ids.ndim != 1:
        raise ValueError(f"{owner}: nodes must be one-dimensional, not {tuple(ids.shape)}")
    if ids.dtype == torch.bool:
        if len(ids) != num_nodes:
            raise ValueError(f"{owner}: the mask has {len(ids)} entries for {num_nodes} nodes")
        ids = ids.nonzero().flatten()
    if not len(ids):
        raise ValueError(f"{owner}: there is no seed node")
    if ids.is_floating_point():
        raise ValueError(f"{owner}: nodes must be integer ids or a mask, not {ids.dtype}")
    found = ids.long().numpy()
    if found.min() < 0 or found.max() >= num_nodes:
        raise ValueError(f"{owner}: nodes names a node outside 0 to {num_nodes - 1}")
    if len(np.unique(found)) != len(found):
        raise ValueError(f"{owner}: nodes names a node twice")
    return found


class _BatchesOf(Sampler[Any]):
    """A partition's rows in batches, each with the epoch: a worker cannot miss it."""

    def __init__(self, partition: RankPartition, batch_size: int) -> None:
        self.partition, self.batch_size = partition, batch_size

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        rows = np.asarray(self.partition.indices(), dtype=np.int64)
        for start in range(0, len(rows), self.batch_size):
            yield self.partition.epoch, rows[start : start + self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.partition) // self.batch_size)


class _Samples(Dataset[Any]):
    """The seeds; a batch of them is sampled where it is read."""

    def __init__(self, nodes: np.ndarray, sampler: NeighborSampler | PygSampler) -> None:
        self.nodes, self.sampler = nodes, sampler

    def __getitem__(self, request: Any) -> tuple[np.ndarray, Neighbourhood]:
        epoch, places = request
        return places, self.sampler.sample(self.nodes[places], epoch)

    def __len__(self) -> int:
        return len(self.nodes)


def _as_it_is(sample: Any) -> Any:
    return sample
