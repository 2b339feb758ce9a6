"""A dataset of one graph, its nodes split by masks, as three loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from nnx.data.base import BatchSizes, NNDatasetBase, checked_batch_sizes
from nnx.graph.edges import checked_edges
from nnx.graph.loading import NeighborBatches
from nnx.graph.sampling import checked_fanouts
from nnx.utils import validation as check

_OWNER = "NNGraphDataset"
_SPLITS = ("train", "val", "test")


@dataclass
class NNGraphDataset(NNDatasetBase):
    """The nodes of one graph as training, validation and test loaders.

    ``ds_class`` is called like PyG's datasets, with those of ``root`` and
    ``transform`` that it takes (bind others with ``functools.partial``), and holds one
    graph with ``x``, ``edge_index``, ``y`` and boolean masks ``train_mask``,
    ``val_mask``, ``test_mask``; a split without a mask, or with an empty one, is ``None``.

    ``sampler="neighbor"`` makes batches of ``batch_sizes`` seeds (``None``: the whole
    split) with ``n_neighbors[i]`` sampled neighbours per node and hop, -1 for all; the
    training seeds are shuffled. ``sampler="full"`` makes loaders of one batch: the
    whole graph, the nodes of the split first (``n_neighbors`` and ``batch_sizes`` are
    not read). Loss and scores are of the split's nodes alone in both.

    ``seed`` decides the order of seeds and all draws; ``None`` takes one number from
    torch's global stream. The graph itself is ``data``.
    """

    ds_class: Callable[..., Any]
    n_neighbors: list[int] | None = None
    root_dir: str = "./data"
    transform: Callable[..., Any] | None = None
    n_workers: int = 4
    batch_sizes: BatchSizes = (None, None, None)
    seed: int | None = None
    sampler: Literal["neighbor", "full"] = "neighbor"

    def __post_init__(self) -> None:
        self.batch_sizes = checked_batch_sizes(_OWNER, self.batch_sizes)
        self.n_workers = check.count(_OWNER, "n_workers", self.n_workers, at_least=0)
        check.choice(_OWNER, "sampler", self.sampler, ("neighbor", "full"))
        if self.seed is not None:
            self.seed = check.integer(_OWNER, "seed", self.seed)
        self._check_sampling()
        dataset = self._open()
        self.data = one_graph(dataset)
        masks = split_masks(self.data)
        self.name = _name(self.ds_class)
        self.input_dim = int(self.data.x.shape[1])
        self.output_dim = _n_outputs(dataset, self.data.y)
        if self.sampler == "full":
            loaders: list[Any] = [
                None if mask is None else [seeds_first(self.data, mask)] for mask in masks
            ]
        else:
            loaders = self._sampled(masks)
        self.train_loader, self.val_loader, self.test_loader = loaders

    def _check_sampling(self) -> None:
        if self.n_neighbors is not None:
            self.n_neighbors = list(checked_fanouts(_OWNER, "n_neighbors", self.n_neighbors))
        elif self.sampler == "neighbor":
            raise ValueError(
                f'{_OWNER}: sampler="neighbor" needs n_neighbors, the neighbours to sample per '
                'layer (for example [10, 10]); sampler="full" needs none'
            )

    def _sampled(self, masks: list[torch.Tensor | None]) -> list[Any]:
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(1 << 31, ()))
        return [
            None if mask is None else NeighborBatches(
                self.data, self.n_neighbors or (), nodes=mask, shuffle=split == "train",
                batch_size=int(mask.sum()) if size is None else size,
                seed=seed, num_workers=self.n_workers,
            )
            for split, mask, size in zip(_SPLITS, masks, self.batch_sizes)
        ]  # fmt: skip

    def _open(self) -> Any:
        if not callable(self.ds_class):
            check.refuse(_OWNER, "ds_class", self.ds_class, "a dataset class")
        parameters = inspect.signature(self.ds_class).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {"root": self.root_dir, "transform": self.transform}
        accepted = {k: v for k, v in given.items() if takes_all or k in parameters}
        if self.transform is not None and "transform" not in accepted:
            raise ValueError(f"{_name(self.ds_class)} takes no transform=")
        return self.ds_class(**accepted)


def one_graph(dataset: Any) -> Any:
    """The graph of a dataset that holds exactly one, checked.

    Raises ``ValueError`` for a dataset of several graphs and for a graph without
    features, edges or targets, or with an edge to a node that does not exist.
    """
    if len(dataset) != 1:
        raise ValueError(
            f"{_OWNER} classifies the nodes of one graph, but this dataset has {len(dataset)} "
            "graphs; classify whole graphs with nnx.graph_tasks.GraphCollection"
        )
    data = dataset[0]
    for name in ("x", "edge_index", "y"):
        if not isinstance(getattr(data, name, None), torch.Tensor):
            raise ValueError(f"{_OWNER}: the graph has no tensor {name}")
    if data.x.ndim != 2 or not len(data.x):
        raise ValueError(f"{_OWNER}: x must be (nodes, features), not {tuple(data.x.shape)}")
    if len(data.y) != len(data.x):
        raise ValueError(f"{_OWNER}: {len(data.y)} targets do not fit {len(data.x)} nodes")
    edges = checked_edges(data.edge_index, len(data.x), owner=_OWNER)
    if edges is not data.edge_index:
        data = data.clone()
        data.edge_index = edges
    return data


def split_masks(data: Any) -> list[torch.Tensor | None]:
    """The three masks of a graph; ``None`` where a split is empty."""
    masks: list[torch.Tensor | None] = []
    for split in _SPLITS:
        mask = getattr(data, f"{split}_mask", None)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(data.x),)):
            raise ValueError(
                f"{_OWNER}: {split}_mask must be boolean of shape ({len(data.x)},), not "
                f"{mask.dtype} of shape {tuple(mask.shape)}; of several splits choose one "
                "column in a transform"
            )
        masks.append(mask if mask is not None and bool(mask.any()) else None)
    if masks[0] is None:
        raise ValueError(
            f"{_OWNER}: the graph has no training node; set train_mask in a transform, for "
            "example torch_geometric.transforms.RandomNodeSplit()"
        )
    for i, j in ((0, 1), (0, 2), (1, 2)):
        first, second = masks[i], masks[j]
        if first is not None and second is not None and bool((first & second).any()):
            node = int((first & second).nonzero()[0])
            raise ValueError(f"{_OWNER}: node {node} is in both {_SPLITS[i]} and {_SPLITS[j]}")
    return masks


def seeds_first(data: Any, mask: torch.Tensor) -> Any:
    """The whole graph with the nodes of ``mask`` in front, as one batch of a loader.

    ``n_id`` holds the nodes' former numbers; edges keep their order.
    """
    order = torch.cat([mask.nonzero().flatten(), (~mask).nonzero().flatten()])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    batch = data.clone()
    for name, value in data.to_dict().items():
        if name == "edge_index":
            batch.edge_index = place[value]
        elif isinstance(value, torch.Tensor) and data.is_node_attr(name):
            batch[name] = value[order]
    seeds = int(mask.sum())
    batch.n_id = order
    batch.input_id = torch.arange(seeds)
    batch.seed_id = order[:seeds]
    batch.batch_size = seeds
    return batch


def _name(ds_class: Any) -> str:
    inner = getattr(ds_class, "func", ds_class)  # of a functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def _n_outputs(dataset: Any, y: torch.Tensor) -> int:
    if y.is_floating_point():
        return 1 if y.ndim == 1 else int(y.shape[1])
    classes = getattr(dataset, "num_classes", None)
    return int(classes) if classes else int(y.max()) + 1
