"""What every batch of a link task is checked for, before anything is computed from it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from nnx.graph.batches import is_link_batch
from nnx.link_tasks.codes import contains
from nnx.link_tasks.loading import fixed_candidates
from nnx.link_tasks.split import SPLITS, LinkSplit, LinkTaskError


class BatchCheck:
    """Compares batches with a split: topology, role, candidates, targets and ids."""

    def __init__(self, split: LinkSplit, topology: torch.Tensor) -> None:
        self.split = split
        edges = topology.numpy()
        self._messages = np.sort(edges[0] * split.num_nodes + edges[1])
        self._known = {name: self._table(name) for name in SPLITS}
        codes = [split.pairs.codes(edges) for edges in split.arrays.values()]
        self._taken = np.sort(np.concatenate(codes))
        self._seen: tuple[Any, int] | None = (weakref.ref(topology), topology._version)

    def __call__(self, batch: Any) -> None:
        if not is_link_batch(batch) or getattr(batch, "link_split", None) not in SPLITS:
            raise LinkTaskError(
                "this is no batch of a link task; make loaders with task.loader(name, x, ...)"
            )
        for name in ("x", "edge_index", "edge_label_index", "edge_label", "candidate_id"):
            if not isinstance(getattr(batch, name, None), torch.Tensor):
                raise LinkTaskError(f"the batch has no tensor {name!r}")
        if len(batch.x) != self.split.num_nodes:
            raise LinkTaskError(
                f"the batch has {len(batch.x)} nodes, but the split {self.split.num_nodes}"
            )
        self._check_messages(batch.edge_index)
        self._check_candidates(batch)

    def _check_messages(self, edge_index: torch.Tensor) -> None:
        if self._seen is not None:
            tensor, version = self._seen
            if tensor() is edge_index and edge_index._version == version:
                return  # the same tensor, unchanged since it was looked at
        edges = edge_index.cpu().numpy()
        if edges.ndim != 2 or edges.shape[0] != 2:
            raise LinkTaskError(f"edge_index must be (2, edges), not {edges.shape}")
        n = self.split.num_nodes
        inside = (edges >= 0).all(0) & (edges < n).all(0)
        allowed = inside & contains(self._messages, edges[0] * n + edges[1])
        if not allowed.all():
            u, v = edges[:, ~allowed][:, 0].tolist()
            held_out = self._held_out(u, v)
            raise LinkTaskError(
                f"the message edge {u} -> {v} is not in the training topology"
                + (f": it is a held-out positive of {held_out}" if held_out else "")
            )
        self._seen = (weakref.ref(edge_index), edge_index._version)

    def _held_out(self, u: int, v: int) -> str | None:
        edge = (u, v) if self.split.directed or u <= v else (v, u)
        return next((name for name in SPLITS if edge in self.split.positives(name)), None)

    def _check_candidates(self, batch: Any) -> None:
        split, name = self.split, batch.link_split
        pairs = batch.edge_label_index.cpu().numpy()
        targets, ids = batch.edge_label.cpu().numpy(), batch.candidate_id.cpu().numpy()
        count = len(ids)
        if pairs.shape != (2, count) or targets.shape != (count,) or ids.shape != (count,):
            raise LinkTaskError(
                f"candidates {pairs.shape}, targets {targets.shape} and ids {ids.shape} do not fit"
            )
        edges = split.pairs.canonical(pairs.T)
        if len(edges) and (edges.min() < 0 or edges.max() >= split.num_nodes):
            raise LinkTaskError(f"a candidate names a node outside 0 to {split.num_nodes - 1}")
        if not split.pairs.loops and (edges[:, 0] == edges[:, 1]).any():
            node = int(edges[edges[:, 0] == edges[:, 1]][0, 0])
            raise LinkTaskError(f"the candidate ({node}, {node}) is a barred self-loop")
        codes = split.pairs.codes(edges)
        known_codes, known_targets, known_ids = self._known[name]
        known = contains(known_codes, codes)
        place = np.searchsorted(known_codes, codes[known])
        if (wrong := known_targets[place] != targets[known]).any():
            edge = _first(edges[known][wrong])
            raise LinkTaskError(f"the candidate {edge} of {name} has the wrong target")
        if (wrong := known_ids[place] != ids[known]).any():
            edge = _first(edges[known][wrong])
            raise LinkTaskError(f"the candidate {edge} of {name} has the wrong id")
        if not known.all():
            self._check_drawn(name, edges[~known], codes[~known], targets[~known], ids[~known])

    def _check_drawn(
        self, name: str, edges: np.ndarray, codes: np.ndarray, targets: np.ndarray, ids: np.ndarray
    ) -> None:
        """Candidates that the split does not list: only training has them, as negatives."""
        elsewhere = contains(self._taken, codes)
        if elsewhere.any():
            edge = _first(edges[elsewhere])
            where = next(
                part for part, array in self.split.arrays.items()
                if (array == np.array(edge)).all(1).any()
            )  # fmt: skip
            what = f"a fixed negative of {where[:-10]}" if "neg" in where else f"an edge of {where}"
            raise LinkTaskError(f"the candidate {edge} of a {name} batch is {what}")
        if name != "train" or self.split.categories is not None:
            raise LinkTaskError(f"{_first(edges)} is no candidate of {name}")
        if (targets != 0).any():
            raise LinkTaskError(
                f"the candidate {_first(edges[targets != 0])} of train has the wrong target"
            )
        if (wrong := ids != self.split.n_fixed + codes).any():
            raise LinkTaskError(f"the candidate {_first(edges[wrong])} of train has the wrong id")

    def _table(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes in order, with the target and id of each, of a split's listed candidates."""
        rows = fixed_candidates(self.split, name)
        codes = self.split.pairs.codes(rows.pairs)
        order = np.argsort(codes)
        return codes[order], rows.targets[order], rows.ids[order]


def _first(edges: np.ndarray) -> tuple[int, ...]:
    return tuple(edges[0].tolist())
