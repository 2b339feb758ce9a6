"""Batches of candidate links, each pass of training with negatives of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nnx.link_tasks.split import LinkSplit
from nnx.utils.draws import mixed
from torch_geometric.data import Data


@dataclass(frozen=True, slots=True)
class Candidates:
    """Pairs to score, ``(K, 2)``, with their targets and ids, ``(K,)``."""

    pairs: np.ndarray
    targets: np.ndarray
    ids: np.ndarray


def fixed_candidates(split: LinkSplit, name: str) -> Candidates:
    """The positives of a split and its fixed negatives, in the order of their ids."""
    positive = split.arrays[name]
    negative = split.arrays.get(f"{name}_negatives", np.empty((0, 2), dtype=np.int64))
    ids = np.array([*split.ids_of(name), *split.ids_of(f"{name}_negatives")], dtype=np.int64)
    if split.categories is None:
        targets = np.repeat([1, 0], [len(positive), len(negative)])
    else:
        labels = split.labels()
        targets = np.array([labels[edge] for edge in split.positives(name)], dtype=np.int64)
    return Candidates(np.concatenate([positive, negative]), targets, ids)


class LinkLoader:
    """The candidates of one split in batches: PyG ``Data`` with the training topology.

    Training draws its negatives and the order of its rows from ``seed`` and the epoch: the
    one that ``set_epoch`` announced, or else the number of passes so far. The other splits
    are the same in every pass.
    """

    def __init__(
        self,
        split: LinkSplit,
        name: str,
        x: torch.Tensor,
        batch_size: int,
        *,
        topology: torch.Tensor,
        negatives: int,
        excluded: np.ndarray,
        seed: int,
    ) -> None:
        self.split, self.name, self.x = split, name, x
        self.batch_size, self.seed = batch_size, seed
        self._topology, self._excluded = topology, excluded
        self._fixed = fixed_candidates(split, name)
        self._negatives = negatives * len(self._fixed.ids) if name == "train" else 0
        self._epoch: int | None = None
        self._passes = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw for ``epoch``, until the next call."""
        self._epoch = int(epoch)

    def __len__(self) -> int:
        return -(-(len(self._fixed.ids) + self._negatives) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._passes if self._epoch is None else self._epoch
        self._passes += 1
        rows = self.candidates(epoch)
        binary = self.split.categories is None
        for start in range(0, len(rows.ids), self.batch_size):
            part = slice(start, start + self.batch_size)
            targets = torch.from_numpy(rows.targets[part])
            yield Data(
                x=self.x,
                edge_index=self._topology,
                edge_label_index=torch.from_numpy(rows.pairs[part].T.copy()),
                edge_label=targets.float() if binary else targets,
                candidate_id=torch.from_numpy(rows.ids[part]),
                link_split=self.name,
                negatives_seed=self.seed,
            )

    def candidates(self, epoch: int) -> Candidates:
        """All rows of a pass, in their order."""
        fixed = self._fixed
        if self.name != "train":
            return fixed
        generator = np.random.default_rng(mixed(self.seed, epoch))
        pairs, split = self.split.pairs, self.split
        free = pairs.count - len(self._excluded)
        chosen = generator.choice(free, size=self._negatives, replace=False)
        codes = pairs.absent(chosen, self._excluded)
        order = generator.permutation(len(fixed.ids) + len(codes))
        return Candidates(
            np.concatenate([fixed.pairs, pairs.edges(codes)])[order],
            np.concatenate([fixed.targets, np.zeros(len(codes), dtype=np.int64)])[order],
            np.concatenate([fixed.ids, split.n_fixed + codes])[order],
        )
