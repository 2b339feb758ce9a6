"""Which rows a process reads: the same plan in every process, a share for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from nnx.data.loading import fast_batches
from nnx.distributed.process import rank_and_world
from nnx.utils import validation as check

KINDS = ("train", "validation")
POLICIES = ("pad", "drop")


class RankPartition(Sampler):
    """The rows of one process, by a plan that all processes agree on.

    The rows ``0 .. n - 1`` are ordered (shuffled by ``seed`` and the epoch, for
    ``kind="train"``) and dealt out one by one, so that the k-th batches of all
    processes together are the k-th batch of one process reading ``world_size``
    times as many rows. Rows that do not fill a round are repeated from the start
    (``policy="pad"``) or left out (``"drop"``), so that every process trains on
    equally many. ``kind="validation"`` deals every row exactly once, unshuffled; a
    process may get one row fewer than another.

    No global random stream is read or advanced.
    """

    def __init__(
        self,
        n: int,
        *,
        rank: int,
        world_size: int,
        kind: str = "train",
        policy: str = "pad",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        owner = "RankPartition"
        self.n = check.count(owner, "n", n)
        self.world_size = check.count(owner, "world_size", world_size)
        self.rank = check.count(owner, "rank", rank, at_least=0)
        if self.rank >= self.world_size:
            raise ValueError(f"{owner}.rank must be below world_size {world_size}, not {rank}")
        self.kind = check.choice(owner, "kind", kind, KINDS)
        self.policy = check.choice(owner, "policy", policy, POLICIES)
        self.shuffle = bool(shuffle) and kind == "train"
        self.seed = check.count(owner, "seed", seed, at_least=0)
        self.epoch = 0
        if kind == "train" and policy == "drop" and self.n < self.world_size:
            raise ValueError(
                f"{n} rows cannot be dealt to {world_size} processes without padding; "
                'use policy="pad"'
            )

    def set_epoch(self, epoch: int) -> None:
        """Order the rows for ``epoch``."""
        self.epoch = check.count("RankPartition", "epoch", epoch, at_least=0)

    def global_order(self) -> list[int]:
        """All rows in the order they are dealt, repeats included."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
            order = torch.randperm(self.n, generator=generator).tolist()
        else:
            order = list(range(self.n))
        if self.kind == "validation":
            return order
        if self.policy == "drop":
            return order[: self.n - self.n % self.world_size]
        missing = -self.n % self.world_size
        repeats = -(-missing // self.n)
        return order + (order * repeats)[:missing]

    def indices(self) -> list[int]:
        """This process's rows, in order."""
        return self.global_order()[self.rank :: self.world_size]

    def descriptor(self) -> dict[str, Any]:
        """The plan without the rank: equal in all processes of a fit, kept with its state."""
        return {
            "n": self.n,
            "world_size": self.world_size,
            "kind": self.kind,
            "policy": self.policy,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices())

    def __len__(self) -> int:
        full, rest = divmod(self.n, self.world_size)
        if self.kind == "validation":
            return full + (self.rank < rest)
        return full + bool(rest and self.policy == "pad")


class ShardedLoader:
    """The batches of one process's rows: ``batch_size`` rows each, the last one shorter.

    Batches are those of a ``DataLoader`` over the same rows (``collate_fn`` as
    there), fetched at once where the data is in memory. ``set_epoch`` is called by
    the training loop.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        partition: RankPartition,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = check.count("ShardedLoader", "batch_size", batch_size)
        self.partition = partition
        if partition.n != len(dataset):
            raise ValueError(
                f"the partition deals {partition.n} rows, and the dataset has {len(dataset)}"
            )
        self.collate_fn = collate_fn
        self._loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=partition,
            collate_fn=collate_fn,
            generator=torch.Generator().manual_seed(partition.seed),
        )

    def set_epoch(self, epoch: int) -> None:
        """Order the rows for ``epoch``."""
        self.partition.set_epoch(epoch)

    def ids(self) -> list[int]:
        """The dataset rows of this process, in the order of the current epoch."""
        return self.partition.indices()

    def descriptor(self) -> dict[str, Any]:
        """The plan of the batches, equal in all processes of a fit."""
        return {**self.partition.descriptor(), "batch_size": self.batch_size}

    def __iter__(self) -> Iterator[Any]:
        return fast_batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def train_loader(
    dataset: Any,
    batch_size: int,
    *,
    policy: str = "pad",
    seed: int = 0,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> ShardedLoader:
    """This process's training batches of ``dataset``, ``batch_size`` rows per process.

    Without a process group it is all of them. See :class:`RankPartition` for
    ``policy``, ``seed`` and ``shuffle``.
    """
    rank, world = rank_and_world()
    partition = RankPartition(
        len(dataset), rank=rank, world_size=world, policy=policy, shuffle=shuffle, seed=seed
    )
    return ShardedLoader(dataset, batch_size, partition, collate_fn=collate_fn)


def validation_loader(
    dataset: Any, batch_size: int, *, collate_fn: Callable[[list[Any]], Any] | None = None
) -> ShardedLoader:
    """This process's validation batches: every row of ``dataset`` in exactly one process."""
    rank, world = rank_and_world()
    partition = RankPartition(len(dataset), rank=rank, world_size=world, kind="validation")
    return ShardedLoader(dataset, batch_size, partition, collate_fn=collate_fn)


def _mixed(seed: int, epoch: int) -> int:
    """One generator seed from two numbers; epoch 0 of seed 1 is not epoch 1 of seed 0."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)
