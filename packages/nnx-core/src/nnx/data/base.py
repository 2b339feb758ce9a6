"""What every dataset wrapper publishes: its dimensions and one loader per split."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split

from nnx.seeding import dataloader_worker_init_fn
from nnx.utils import validation as check

BatchSizes: TypeAlias = tuple[int | None, int | None, int | None]


@dataclass
class NNDatasetBase(ABC):  # noqa: B024 - a subclass may fill the fields in any way
    """A dataset as loaders. Subclasses fill the fields in ``__post_init__``.

    ``input_dim`` is the number of values per sample, ``output_dim`` the number
    of classes (of values, for a regression). A loader is ``None`` where its
    split is empty.
    """

    name: str = field(init=False)
    input_dim: int = field(init=False)
    output_dim: int = field(init=False)
    train_loader: DataLoader[Any] = field(init=False)
    val_loader: DataLoader[Any] | None = field(init=False)
    test_loader: DataLoader[Any] | None = field(init=False)

    def state(self) -> dict[str, Any]:
        """What the dataset is, as plain data."""
        return {"name": self.name, "input_dim": self.input_dim, "output_dim": self.output_dim}

    def _publish(
        self,
        splits: Sequence[Dataset[Any]],
        batch_sizes: BatchSizes,
        *,
        n_workers: int = 0,
    ) -> None:
        """Set the three loaders; only the training one shuffles."""
        loaders = [
            loader_of(split, size, shuffle=position == 0, n_workers=n_workers)
            for position, (split, size) in enumerate(zip(splits, batch_sizes))
        ]
        if loaders[0] is None:
            raise ValueError(f"{type(self).__name__}: the training split is empty")
        self.train_loader, self.val_loader, self.test_loader = loaders[0], loaders[1], loaders[2]


def checked_batch_sizes(owner: str, batch_sizes: Any) -> BatchSizes:
    """Three counts or ``None`` (the whole split); anything else is refused."""
    if not isinstance(batch_sizes, (tuple, list)) or len(batch_sizes) != 3:
        check.refuse(owner, "batch_sizes", batch_sizes, "a tuple of three (train, val, test)")
    sizes = [
        None if size is None else check.count(owner, f"batch_sizes[{i}]", size)
        for i, size in enumerate(batch_sizes)
    ]
    return sizes[0], sizes[1], sizes[2]


def checked_proportions(owner: str, **proportions: Any) -> list[float]:
    """Shares in [0, 1) that leave something to train on."""
    values = [
        float(check.real(owner, name, value, at_least=0, below=1))
        for name, value in proportions.items()
    ]
    if sum(values) >= 1:
        check.refuse(owner, " + ".join(proportions), sum(values), "below 1")
    return values


def random_parts(
    dataset: Dataset[Any], proportions: Iterable[float], seed: int | None
) -> list[Dataset[Any]]:
    """The rest, then one part per proportion, drawn by ``torch``'s ``random_split``.

    From ``seed``, or from the global stream when it is ``None``.
    """
    total = len(dataset)  # type: ignore[arg-type]
    parts = [int(total * share) for share in proportions]
    lengths = [total - sum(parts), *parts]
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    # random_split warns of empty parts; they are none of its draw.
    drawn = iter(random_split(dataset, [n for n in lengths if n], generator=generator))
    return [next(drawn) if n else Subset(dataset, []) for n in lengths]


def loader_of(
    dataset: Dataset[Any], batch_size: int | None, *, shuffle: bool, n_workers: int = 0
) -> DataLoader[Any] | None:
    """A loader of one split; ``None`` for an empty one."""
    size = len(dataset)  # type: ignore[arg-type]
    if not size:
        return None
    return DataLoader(
        dataset,
        batch_size=size if batch_size is None else batch_size,
        shuffle=shuffle,
        num_workers=n_workers,
        worker_init_fn=dataloader_worker_init_fn if n_workers else None,
    )
