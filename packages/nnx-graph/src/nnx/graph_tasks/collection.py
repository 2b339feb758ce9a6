"""Graphs with ids and targets, checked once, and batches of them, checked before every forward."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from nnx.errors import NNxError
from nnx.graph.batches import is_graph_collection_batch, is_link_batch
from nnx.graph.edges import checked_edges
from nnx.graph_tasks.leakage import graph_hash
from nnx.utils import validation as check
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data

__all__ = [
    "IGNORE", "GraphCollection", "GraphTaskError", "check_graph_batch",
    "is_graph_collection_batch",
]  # fmt: skip

IGNORE = -100
"""The target of a graph without a label; a task ignores it with ``ignore_index=IGNORE``."""


class GraphTaskError(ValueError, NNxError):
    """A collection or a batch of graphs that cannot be classified as it is."""


class GraphCollection(Dataset[Any]):
    """Graphs named by ids, one target each.

    ``graphs`` are PyG ``Data`` objects with ``x`` and ``edge_index`` (an ``edge_attr`` is
    kept). ``ids`` are unique integers from 0 on. ``targets`` are class indices, in the
    order of ``graphs``; without them each graph's ``y`` is read. A graph whose id is in
    ``unlabeled`` has the target :data:`IGNORE`; its entry of ``targets`` is ``None``.

    The collection never splits itself: choose by graph id, with :meth:`subset`. Graphs of
    one origin leak from one split into another whatever their ids; :meth:`overlap` finds
    those that are equal.
    """

    def __init__(
        self,
        graphs: Sequence[Any],
        ids: Sequence[int],
        *,
        targets: Sequence[int | None] | None = None,
        unlabeled: Sequence[int] = (),
        num_classes: int | None = None,
    ) -> None:
        graphs, ids = list(graphs), [_graph_id(i) for i in ids]
        if not graphs:
            raise GraphTaskError("a collection needs at least one graph")
        if len(ids) != len(graphs):
            raise GraphTaskError(f"{len(ids)} ids do not fit {len(graphs)} graphs")
        if len(set(ids)) != len(ids):
            repeated = next(i for i in ids if ids.count(i) > 1)
            raise GraphTaskError(f"graph id {repeated} is there twice; ids must be unique")
        if targets is not None and len(targets) != len(graphs):
            raise GraphTaskError(f"{len(targets)} targets do not fit {len(graphs)} graphs")
        without = {_graph_id(i) for i in unlabeled}
        if unknown := without - set(ids):
            raise GraphTaskError(f"unlabeled names graph {min(unknown)}, which is not here")
        if num_classes is not None:
            num_classes = check.count("GraphCollection", "num_classes", num_classes)
        self.ids = tuple(ids)
        self.num_classes = num_classes
        self._unlabeled = without
        self._where = {graph_id: row for row, graph_id in enumerate(ids)}
        self._graphs: list[Any] = []
        for row, (graph, graph_id) in enumerate(zip(graphs, ids)):
            given = getattr(graph, "y", None) if targets is None else targets[row]
            target = _target(given, graph_id, graph_id in without, num_classes)
            self._graphs.append(_checked(graph, graph_id, target))
        if len(widths := {graph.x.shape[1] for graph in self._graphs}) > 1:
            raise GraphTaskError(f"the graphs have different feature widths: {sorted(widths)}")

    @property
    def labeled(self) -> tuple[int, ...]:
        """The ids of the graphs that have a target."""
        return tuple(i for i in self.ids if i not in self._unlabeled)

    @property
    def input_dim(self) -> int:
        """The number of features of a node."""
        return int(self._graphs[0].x.shape[1])

    def __len__(self) -> int:
        return len(self._graphs)

    def __getitem__(self, row: int) -> Any:
        return self._graphs[row]

    def subset(self, ids: Sequence[int]) -> GraphCollection:
        """The graphs of these ids, in this order."""
        wanted = [_graph_id(i) for i in ids]
        if unknown := [i for i in wanted if i not in self._where]:
            raise GraphTaskError(f"there is no graph {unknown[0]} in this collection")
        graphs = [self._graphs[self._where[i]] for i in wanted]
        without = [i for i in wanted if i in self._unlabeled]
        targets = [None if i in self._unlabeled else int(g.y) for i, g in zip(wanted, graphs)]
        return GraphCollection(
            graphs, wanted, targets=targets, unlabeled=without, num_classes=self.num_classes
        )

    def overlap(
        self, other: GraphCollection, *, iterations: int = 3, features: bool = True
    ) -> list[tuple[int, int]]:
        """Pairs of ids ``(here, there)`` of graphs that are equal: leakage between splits.

        Compared by :func:`~nnx.graph_tasks.graph_hash`, which finds every copy under any
        order of nodes; of graphs that it cannot tell apart, look at the pair. Targets are
        not compared. ``features=False`` compares structure alone.
        """
        there: dict[int, list[int]] = {}
        for graph_id, graph in zip(other.ids, other._graphs):
            code = graph_hash(graph, iterations=iterations, features=features)
            there.setdefault(code, []).append(graph_id)
        return [
            (graph_id, match)
            for graph_id, graph in zip(self.ids, self._graphs)
            for match in there.get(graph_hash(graph, iterations=iterations, features=features), ())
        ]

    def loader(self, batch_size: int, *, shuffle: bool = False, seed: int | None = None) -> Any:
        """Batches of graphs: ``Batch(x, edge_index, batch, ptr, y, graph_id)``.

        A shuffling loader draws its order from ``seed``, or from torch's global stream.
        """
        size = check.count("GraphCollection.loader", "batch_size", batch_size)
        generator = None
        if seed is not None:
            seed = check.integer("GraphCollection.loader", "seed", seed)
            generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            self, batch_size=size, shuffle=check.flag("GraphCollection.loader", "shuffle", shuffle),
            generator=generator, collate_fn=_collate,
        )  # fmt: skip


def check_graph_batch(
    batch: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x, edge_index, batch, ptr)`` of a batch of whole graphs.

    Raises :class:`GraphTaskError` unless graph ids are there and distinct, every graph
    has a node and one target (where there are targets), ``ptr`` and ``batch`` agree, and
    no edge crosses from one graph into another.
    """
    if is_link_batch(batch):
        raise GraphTaskError("this batch asks about links; it is for the model of a LinkTask")
    if not is_graph_collection_batch(batch):
        raise GraphTaskError(
            "a graph classifier reads batches of GraphCollection.loader(...), which carry "
            f"graph_id; this {type(batch).__name__} does not"
        )
    for name in ("x", "edge_index", "batch", "ptr"):
        if not isinstance(getattr(batch, name, None), torch.Tensor):
            raise GraphTaskError(f"the batch of graphs has no tensor {name!r}")
    x, edges, of_node, ptr, ids = (
        batch.x, batch.edge_index, batch.batch, batch.ptr, torch.as_tensor(batch.graph_id),
    )  # fmt: skip
    count = ids.numel()
    if ids.ndim != 1 or len(ids.unique()) != count:
        raise GraphTaskError(f"the graph ids of a batch must be distinct: {ids.flatten().tolist()}")
    sizes = ptr.diff()
    if ptr.ndim != 1 or len(sizes) != count or int(ptr[0]) != 0 or int(ptr[-1]) != len(x):
        raise GraphTaskError(
            f"ptr {ptr.tolist()} does not divide {len(x)} nodes among {count} graphs"
        )
    if bool((sizes < 1).any()):
        empty = int(ids[(sizes < 1).nonzero()[0]])
        raise GraphTaskError(f"graph {empty} has no node, so there is nothing to pool")
    if not torch.equal(of_node, torch.arange(count, device=ptr.device).repeat_interleave(sizes)):
        raise GraphTaskError("the batch vector says other graphs for the nodes than ptr does")
    if edges.numel():
        if int(edges.min()) < 0 or int(edges.max()) >= len(x):
            raise GraphTaskError(f"an edge leads to a node outside 0 to {len(x) - 1}")
        crossing = of_node[edges[0]] != of_node[edges[1]]
        if bool(crossing.any()):
            source, target = edges[:, int(crossing.nonzero()[0])].tolist()
            raise GraphTaskError(f"the edge {source} -> {target} leads from one graph to another")
    y = getattr(batch, "y", None)
    if y is not None and (not isinstance(y, torch.Tensor) or tuple(y.shape) != (count,)):
        shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        raise GraphTaskError(f"a batch of {count} graphs needs {count} targets, not {shape}")
    return x, edges, of_node, ptr


def _graph_id(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise GraphTaskError(f"graph ids must be non-negative integers, not {value!r}")
    return int(value)


def _target(given: Any, graph_id: int, unlabeled: bool, num_classes: int | None) -> int:
    if unlabeled:
        return IGNORE
    if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_floating_point():
        given = given.item()
    if given is None:
        raise GraphTaskError(
            f"graph {graph_id} has no target; give one, or name the graph in unlabeled="
        )
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise GraphTaskError(f"graph {graph_id}: a target is one class index, not {given!r}")
    target = int(given)
    if target < 0 or (num_classes is not None and target >= num_classes):
        bound = "" if num_classes is None else f" and below num_classes={num_classes}"
        raise GraphTaskError(f"graph {graph_id}: target {target} must be from 0 on{bound}")
    return target


def _checked(graph: Any, graph_id: int, target: int) -> Any:
    """The graph's own tensors, with its id and target as one-element tensors."""
    x, where = getattr(graph, "x", None), f"graph {graph_id}"
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or not x.is_floating_point():
        raise GraphTaskError(f"{where}: x must be a floating tensor (nodes, features)")
    if not len(x):
        raise GraphTaskError(f"{where} has no node, so there is nothing to pool")
    try:
        edges = checked_edges(getattr(graph, "edge_index", None), len(x), owner=where)
    except (TypeError, RuntimeError) as error:
        raise GraphTaskError(f"{where} has no edge_index: {error}") from None
    except ValueError as error:
        raise GraphTaskError(str(error)) from None
    checked = Data(x=x, edge_index=edges, y=torch.tensor([target]))
    checked.graph_id = torch.tensor([graph_id])
    attributes = getattr(graph, "edge_attr", None)
    if attributes is not None:
        if len(attributes) != edges.shape[1]:
            raise GraphTaskError(
                f"{where}: {len(attributes)} rows of edge_attr do not fit {edges.shape[1]} edges"
            )
        checked.edge_attr = attributes
    return checked


def _collate(graphs: list[Any]) -> Any:
    return Batch.from_data_list(graphs)
