"""The split of a graph's edges as data: what it holds, and how it is derived and replayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from nnx.errors import NNxError
from nnx.graph.edges import checked_edges
from nnx.link_tasks.codes import Edge, Pairs, as_array, as_edges, contains
from nnx.utils import validation as check

FORMAT = "nnx.link-split/1"
SPLITS = ("train", "val", "test")
HELD_OUT = ("val", "test")
SELF_LOOPS = ("bar", "allow")
EXISTENCE = ("hidden", "visible")
_TOPOLOGY = {"hidden": "train_edges", "visible": "labeled_edges"}
_EDGES = (*SPLITS, "val_negatives", "test_negatives")


class LinkTaskError(ValueError, NNxError):
    """A split, a batch or a model that does not fit the link task."""


@dataclass(frozen=True)
class LinkSplit:
    """Which edges train, validate and test, and which pairs are the fixed negatives.

    Edges are canonical (``u <= v`` unless ``directed``), distinct over all splits, and
    kept sorted. ``self_loops`` is ``"bar"`` or ``"allow"``. With ``categories`` it is a
    split of labelled edges: ``edge_labels`` holds one category index per edge, there are
    no negatives, and ``label_existence="visible"`` lets messages pass over held-out edges
    too, whose categories stay hidden. ``seed`` is what it was derived from, ``None`` for
    one made by hand.

    Raises :class:`LinkTaskError` for edges that are not canonical, repeated, in two
    splits, outside the graph, or barred self-loops; for negatives that are edges.
    """

    num_nodes: int
    train: tuple[Edge, ...]
    val: tuple[Edge, ...] = ()
    test: tuple[Edge, ...] = ()
    val_negatives: tuple[Edge, ...] = ()
    test_negatives: tuple[Edge, ...] = ()
    directed: bool = False
    self_loops: str = "bar"
    seed: int | None = None
    categories: tuple[str, ...] | None = None
    edge_labels: tuple[tuple[Edge, int], ...] = ()
    label_existence: str = "hidden"
    version: int = 1

    def __post_init__(self) -> None:
        owner = "LinkSplit"
        put = object.__setattr__
        try:
            put(self, "num_nodes", check.count(owner, "num_nodes", self.num_nodes))
            put(self, "directed", check.flag(owner, "directed", self.directed))
            check.choice(owner, "self_loops", self.self_loops, SELF_LOOPS)
            check.choice(owner, "label_existence", self.label_existence, EXISTENCE)
            if self.seed is not None:
                put(self, "seed", check.integer(owner, "seed", self.seed))
            if check.count(owner, "version", self.version) != 1:
                check.refuse(owner, "version", self.version, "1")
        except ValueError as error:
            raise LinkTaskError(str(error)) from None
        arrays = {name: _sorted(name, getattr(self, name)) for name in _EDGES}
        for name, array in arrays.items():
            put(self, name, as_edges(array))
        self._check_edges(arrays)
        self._check_labels()

    @property
    def mode(self) -> str:
        """``"binary"`` (is there a link?) or ``"edge_label"`` (of which category?)."""
        return "binary" if self.categories is None else "edge_label"

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs that may be linked."""
        return Pairs(self.num_nodes, self.directed, self.self_loops == "allow")

    def positives(self, name: str) -> tuple[Edge, ...]:
        """The edges of a split."""
        return getattr(self, split_name(name))

    def negatives(self, name: str) -> tuple[Edge, ...]:
        """The fixed negatives of a split; training has none, they are drawn each epoch."""
        return getattr(self, f"{name}_negatives") if split_name(name) in HELD_OUT else ()

    def candidate_ids(self, name: str) -> dict[Edge, int]:
        """The id of each positive, then of each fixed negative, of a split.

        Ids number the positives of train, val and test, then the negatives of val and
        test, in order, so that an id names one pair over all splits.
        """
        numbered = zip(self.positives(name), self.ids_of(name))
        negatives = zip(self.negatives(name), self.ids_of(f"{name}_negatives"))
        return dict([*numbered, *negatives])

    def labels(self) -> dict[Edge, int]:
        """The category index of each edge; empty for a binary split."""
        return dict(self.edge_labels)

    def message_edge_index(self) -> torch.Tensor:
        """The only edges that messages may pass over, in every split: ``(2, M)``.

        The training edges, and all labelled ones where their existence is visible; when
        undirected, followed by their reverses.
        """
        visible = self.categories is not None and self.label_existence == "visible"
        parts = [self.arrays[name] for name in (SPLITS if visible else SPLITS[:1])]
        edges = torch.from_numpy(np.concatenate(parts).T.copy())
        if self.directed:
            return edges
        reverse = edges.flip(0)[:, edges[0] != edges[1]]
        return torch.cat([edges, reverse], dim=1)

    def replay(self, edge_index: Any, *, edge_labels: Sequence[int] | None = None) -> LinkSplit:
        """Derive this split again from the graph's edges, and return it.

        Raises :class:`LinkTaskError` when the edges give another split, or when it was
        made by hand and there is nothing to derive it from. No global random stream moves.
        """
        if self.seed is None:
            raise LinkTaskError("this split was made by hand (no seed), so it cannot be replayed")
        edges, labels = _prepare(self.pairs, edge_index, edge_labels, self.categories)
        counts = {name: len(getattr(self, name)) for name in _EDGES}
        total = sum(counts[name] for name in SPLITS)
        if len(edges) != total:
            raise LinkTaskError(f"the graph has {len(edges)} edges, but the split holds {total}")
        again = _derive(
            self.pairs, edges, labels, counts=counts, seed=self.seed,
            categories=self.categories, label_existence=self.label_existence,
        )  # fmt: skip
        if again != self:
            raise LinkTaskError(
                f"these edges do not give this split: {again.digest()} instead of {self.digest()}"
            )
        return again

    # -- identity --------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole split as JSON-like data."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "num_nodes": self.num_nodes,
            "directed": self.directed,
            "self_loops": self.self_loops,
            "seed": self.seed,
            "topology": _TOPOLOGY["hidden"],
        }
        state.update({name: [list(edge) for edge in getattr(self, name)] for name in _EDGES})
        if self.categories is not None:
            state["topology"] = self.__dict__.get("_topology", _TOPOLOGY[self.label_existence])
            state["categories"] = list(self.categories)
            state["edge_labels"] = [[list(edge), label] for edge, label in self.edge_labels]
            state["label_existence"] = self.label_existence
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> LinkSplit:
        """Rebuild from :meth:`state`; anything that does not belong there is refused."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise LinkTaskError(f"this is not a {FORMAT} document (format: {found!r})")
        fields = {
            name: value for name, value in state.items() if name not in ("format", "topology")
        }
        known = set(LinkSplit.__dataclass_fields__)
        if unknown := sorted(fields.keys() - known):
            raise LinkTaskError(f"a {FORMAT} document has the unknown key {unknown[0]!r}")
        if missing := sorted({"num_nodes", "train"} - fields.keys()):
            raise LinkTaskError(f"a {FORMAT} document lacks {missing[0]!r}")
        split = LinkSplit(**fields)
        topology = state.get("topology", _TOPOLOGY[split.label_existence])
        visible = split.label_existence == "visible"
        if not isinstance(topology, str) or visible == (topology == _TOPOLOGY["hidden"]):
            raise LinkTaskError(
                f"the topology {topology!r} is not that of a split whose held-out edges are "
                f"{split.label_existence}"
            )
        if visible:  # kept as it was written, for the digest
            split.__dict__["_topology"] = topology
        return split

    def digest(self) -> str:
        """``sha256:<hex>`` of the state's one spelling as JSON."""
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    # -- arrays ----------------------------------------------------------------------

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The edges and negatives of each split as ``(m, 2)`` arrays."""
        return {name: as_array(getattr(self, name)) for name in _EDGES}

    def ids_of(self, part: str) -> range:
        """The ids of a part of the split."""
        start = 0
        for name in _EDGES:
            count = len(getattr(self, name))
            if name == part:
                return range(start, start + count)
            start += count
        return range(0)

    @property
    def n_fixed(self) -> int:
        """How many ids are in use; those of training negatives come after them."""
        return sum(len(getattr(self, name)) for name in _EDGES)

    def _check_edges(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.__dict__["arrays"] = dict(arrays)
        pairs, seen = self.pairs, np.empty(0, dtype=np.int64)
        for name, edges in arrays.items():
            where = f"LinkSplit.{name}"
            if len(edges) and (edges.min() < 0 or edges.max() >= self.num_nodes):
                wrong = edges[((edges < 0) | (edges >= self.num_nodes)).any(1)][0]
                raise LinkTaskError(
                    f"{where}: {tuple(wrong.tolist())} names a node outside 0 to "
                    f"{self.num_nodes - 1}"
                )
            wrong = edges[edges[:, 0] > edges[:, 1]]
            if not self.directed and len(wrong):
                u, v = wrong[0].tolist()
                raise LinkTaskError(f"{where}: ({u}, {v}) is not canonical; write ({v}, {u})")
            if not pairs.loops and (edges[:, 0] == edges[:, 1]).any():
                node = int(edges[edges[:, 0] == edges[:, 1]][0, 0])
                raise LinkTaskError(f"{where}: the self-loop of node {node} is barred")
            codes = pairs.codes(edges)
            if len(repeated := codes[1:][codes[1:] == codes[:-1]]):
                raise LinkTaskError(f"{where}: {_shown(pairs, repeated)} is there twice")
            if len(both := codes[contains(seen, codes)]):
                raise LinkTaskError(f"{where}: {_shown(pairs, both)} is in another split too")
            seen = np.sort(np.concatenate([seen, codes]))

    def _check_labels(self) -> None:
        put = object.__setattr__
        labels = tuple((_edge(edge), int(label)) for edge, label in self.edge_labels)
        put(self, "edge_labels", tuple(sorted(labels)))
        if self.categories is None:
            if labels:
                raise LinkTaskError("edge_labels need categories=, the names of the labels")
            return
        categories = tuple(self.categories)
        if not all(isinstance(name, str) and name for name in categories):
            raise LinkTaskError(f"categories must be names, not {self.categories!r}")
        if len(categories) < 2 or len(set(categories)) != len(categories):
            raise LinkTaskError(f"categories must be two or more distinct names: {categories}")
        put(self, "categories", categories)
        if self.val_negatives or self.test_negatives:
            raise LinkTaskError(
                "a split of labelled edges has no negatives: a non-edge has no label"
            )
        edges = sorted(edge for name in SPLITS for edge in getattr(self, name))
        if [edge for edge, _ in self.edge_labels] != edges:
            raise LinkTaskError("edge_labels must name each edge of the split once, and no other")
        for edge, label in self.edge_labels:
            if not 0 <= label < len(categories):
                raise LinkTaskError(f"the label {label} of {edge} is none of the categories")


def split_links(
    edge_index: Any,
    num_nodes: int,
    *,
    val: Any = 0.1,
    test: Any = 0.1,
    seed: int,
    directed: bool = False,
    self_loops: str = "bar",
    negatives: int = 1,
    edge_labels: Sequence[int] | None = None,
    categories: Sequence[str] | None = None,
    label_existence: str = "hidden",
) -> LinkSplit:
    """Hold out edges of a graph for validation and testing.

    ``edge_index`` is ``(2, M)``: its edges are made canonical and distinct first (barred
    self-loops are left out), so that neither a duplicate nor, undirected, a reverse can be
    in two splits. ``val`` and ``test`` are shares in [0, 1) or numbers of edges.
    ``negatives`` fixed negatives per held-out edge come from the static complement: pairs
    that are an edge of no split. ``edge_labels`` and ``categories`` make it a split of
    labelled edges, one label per column of ``edge_index``.

    All draws come from ``seed`` by a generator of their own. Raises
    :class:`LinkTaskError`, before anything is drawn, where there are too few edges or
    too few pairs that could be negatives.
    """
    owner = "split_links"
    try:
        nodes = check.count(owner, "num_nodes", num_nodes)
        seed = check.count(owner, "seed", seed, at_least=0)
        per_edge = check.count(owner, "negatives", negatives, at_least=0)
        check.choice(owner, "self_loops", self_loops, SELF_LOOPS)
        check.choice(owner, "label_existence", label_existence, EXISTENCE)
        pairs = Pairs(nodes, check.flag(owner, "directed", directed), self_loops == "allow")
    except ValueError as error:
        raise LinkTaskError(str(error)) from None
    if (edge_labels is None) != (categories is None):
        raise LinkTaskError("a split of labelled edges needs both edge_labels= and categories=")
    names = None if categories is None else tuple(categories)
    edges, labels = _prepare(pairs, edge_index, edge_labels, names)
    counts = {
        name: _count(name, value, len(edges)) for name, value in (("val", val), ("test", test))
    }
    if sum(counts.values()) >= len(edges):
        raise LinkTaskError(
            f"val={val} and test={test} hold out {sum(counts.values())} of {len(edges)} edges; "
            "none is left to train on"
        )
    if names is not None:
        per_edge = 0
    counts.update({f"{name}_negatives": per_edge * counts[name] for name in HELD_OUT})
    return _derive(
        pairs, edges, labels, counts=counts, seed=seed, categories=names,
        label_existence=label_existence,
    )  # fmt: skip


def _prepare(
    pairs: Pairs,
    edge_index: Any,
    edge_labels: Sequence[int] | None,
    categories: tuple[str, ...] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct canonical edges in order, and the label of each."""
    try:
        given = checked_edges(edge_index, pairs.n, owner="split_links").cpu().numpy().T
    except ValueError as error:
        raise LinkTaskError(str(error)) from None
    labels = None if edge_labels is None else np.asarray(edge_labels)
    if (labels is None) != (categories is None):
        raise LinkTaskError("a split of labelled edges needs edge_labels=, one per edge")
    if labels is not None and (labels.shape != (len(given),) or labels.dtype.kind not in "iu"):
        raise LinkTaskError(
            f"edge_labels must be {len(given)} category indices, one per column of edge_index"
        )
    edges = pairs.canonical(given)
    if not pairs.loops:
        kept = edges[:, 0] != edges[:, 1]
        edges, labels = edges[kept], None if labels is None else labels[kept]
    codes, first, inverse = np.unique(pairs.codes(edges), return_index=True, return_inverse=True)
    if labels is not None:
        differing = labels != labels[first][inverse]
        if differing.any():
            edge = tuple(edges[differing][0].tolist())
            raise LinkTaskError(f"the edge {edge} is there twice, with different labels")
        labels = labels[first]
    return pairs.edges(codes), labels


def _derive(
    pairs: Pairs,
    edges: np.ndarray,
    labels: np.ndarray | None,
    *,
    counts: Mapping[str, int],
    seed: int,
    categories: tuple[str, ...] | None,
    label_existence: str,
) -> LinkSplit:
    """The split of distinct, sorted edges: a permutation cut in pieces, then the negatives."""
    wanted = counts["val_negatives"] + counts["test_negatives"]
    capacity = pairs.count - len(edges)
    if wanted > capacity:
        raise LinkTaskError(
            f"{wanted} negatives are asked for, but only {capacity} pairs of nodes are not "
            "linked; lower negatives=, val= or test="
        )
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(edges))
    ends = counts["val"], counts["val"] + counts["test"]
    parts = {"val": order[: ends[0]], "test": order[ends[0] : ends[1]], "train": order[ends[1] :]}
    drawn = np.empty(0, dtype=np.int64)
    if wanted:
        chosen = generator.choice(capacity, size=wanted, replace=False)
        drawn = pairs.absent(chosen, pairs.codes(edges))
    negative = pairs.edges(drawn)
    named = () if labels is None else tuple(zip(as_edges(edges), labels.tolist()))
    return LinkSplit(
        num_nodes=pairs.n,
        directed=pairs.directed,
        self_loops="allow" if pairs.loops else "bar",
        seed=seed,
        categories=categories,
        edge_labels=named,
        label_existence=label_existence if categories is not None else "hidden",
        val_negatives=negative[: counts["val_negatives"]],  # type: ignore[arg-type]
        test_negatives=negative[counts["val_negatives"] :],  # type: ignore[arg-type]
        **{name: edges[part] for name, part in parts.items()},  # type: ignore[arg-type]
    )


def _count(name: str, value: Any, total: int) -> int:
    """How many of ``total`` edges a share or a number of edges is."""
    try:
        if isinstance(value, float) or not isinstance(value, (int, np.integer)):
            share = check.real("split_links", name, value, at_least=0, below=1)
            return round(share * total)
        return check.count("split_links", name, value, at_least=0)
    except ValueError as error:
        raise LinkTaskError(str(error)) from None


def _sorted(name: str, edges: Any) -> np.ndarray:
    """The edges of a part as a sorted ``(m, 2)`` array."""
    if isinstance(edges, np.ndarray) and edges.dtype == np.int64 and edges.ndim == 2:
        array = edges
    else:
        array = as_array([_edge(edge, name) for edge in edges])
    return array[np.lexsort((array[:, 1], array[:, 0]))]


def _edge(edge: Any, name: str = "edge_labels") -> Edge:
    try:
        u, v = edge
        return check.integer(name, "edge", u), check.integer(name, "edge", v)
    except (TypeError, ValueError):
        raise LinkTaskError(f"LinkSplit.{name}: an edge is two node ids, not {edge!r}") from None


def split_name(name: str) -> str:
    if name not in SPLITS:
        raise LinkTaskError(f"a split is one of {', '.join(SPLITS)}, not {name!r}")
    return name


def _shown(pairs: Pairs, codes: np.ndarray) -> str:
    return str(tuple(pairs.edges(codes[:1])[0].tolist()))
