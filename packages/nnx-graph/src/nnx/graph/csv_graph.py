"""A graph of two tables: its nodes by name, its edges, and what is refused of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnx.cli import columns
from nnx.cli.preparation import Preparation
from nnx.cli.table import Table, TableError, is_missing, read_table
from nnx.data_splits import plan_split
from nnx.utils.jsonlike import canonical
from torch_geometric.utils import coalesce

TASKS = ("node", "link")
_NO_TARGET = "\0"  # a column that no file has: link runs prepare features and predict none


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSource:
    """What was asked about the two files; with their contents it identifies the data."""

    nodes: str
    edges: str
    task: str = "node"
    target: str | None = None
    id: str | None = None
    ends: tuple[str, ...] | None = None
    directed: bool = False
    neighbours: str | None = None
    batch_size: int = 256
    patience: int | None = None
    validation: float = 0.15
    test: float = 0.15
    split_seed: int = 0
    impute: bool = False
    drop: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    delimiter: str = ","

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"--task is node or link, not {self.task!r}")
        if self.task == "node" and self.target is None:
            raise ValueError("--target names the column to predict; for links, pass --task link")
        if self.task == "link" and self.target is not None:
            raise ValueError("--target is for --task node; links are predicted from the edges")
        if self.task == "link" and self.neighbours is not None:
            raise ValueError("--neighbours is for --task node")
        if self.ends is not None and len(self.ends) != 2:
            raise ValueError(f"--ends is two columns, FROM,TO; not {','.join(self.ends)!r}")
        for name in ("validation", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} is a share in [0, 1), not {getattr(self, name)}")
        if self.validation + self.test >= 1:
            raise ValueError(f"--validation {self.validation} and --test {self.test} leave nothing")

    @property
    def fanouts(self) -> list[int] | None:
        """``--neighbours`` as numbers."""
        if self.neighbours is None:
            return None
        try:
            return [int(word) for word in self.neighbours.split(",")]
        except ValueError:
            raise ValueError(
                f"--neighbours is counts such as 10,10; not {self.neighbours!r}"
            ) from None

    def state(self) -> dict[str, Any]:
        state = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in state.items()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> GraphSource:
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in state.items()
        }
        return GraphSource(**fields)

    def identity(self, graph: CsvGraph) -> str:
        """The run's ``data_id``: file names and a digest of contents, columns and split."""
        return self._named(graph, leaving=("nodes", "edges", "patience"))

    def held_out(self, graph: CsvGraph) -> str:
        """What is validated on: runs on it compare, however they read the graph."""
        reading = ("impute", "drop", "numeric", "categorical", "neighbours", "batch_size")
        return self._named(graph, leaving=("nodes", "edges", "patience", *reading))

    def _named(self, graph: CsvGraph, *, leaving: Sequence[str]) -> str:
        state = {k: v for k, v in self.state().items() if k not in leaving}
        names = f"{Path(self.nodes).name}+{Path(self.edges).name}"
        digest = hashlib.sha256(canonical({**state, "content": graph.content})).hexdigest()
        return f"{names}@{digest[:16]}"


@dataclass(frozen=True, slots=True)
class CsvGraph:
    """The nodes' table, their ids in its order, and the edges as ``(2, M)`` rows of it."""

    table: Table
    id: str
    ids: list[str]
    edge_index: torch.Tensor
    content: str

    @staticmethod
    def read(source: GraphSource) -> CsvGraph:
        """Read both tables; every refusal of ids and edges happens here."""
        nodes = read_table(source.nodes, delimiter=source.delimiter)
        edges = read_table(source.edges, delimiter=source.delimiter)
        name = next(iter(nodes.columns)) if source.id is None else source.id
        ids = nodes.column(name)
        place: dict[str, int] = {}
        for row, node in enumerate(ids):
            if is_missing(node):
                raise TableError(f"{nodes.place(row, name)}: a node needs an id")
            if place.setdefault(node, row) != row:
                raise TableError(
                    f"{nodes.place(row, name)}: the node {node!r} is in row {place[node] + 1} "
                    "already; ids must be unique"
                )
        ends = source.ends
        if ends is None:
            if len(edges.columns) < 2:
                raise TableError(f"{edges.path} needs two columns, the ends of each edge")
            ends = tuple(edges.columns)[:2]
        both = [positions(edges, end, place, nodes.path) for end in ends]
        digest = hashlib.sha256(f"{nodes.digest} {edges.digest}".encode()).hexdigest()
        return CsvGraph(nodes, name, ids, torch.tensor(both), f"sha256:{digest}")

    def messages(self, directed: bool) -> torch.Tensor:
        """Distinct edges, with their reverses unless ``directed``."""
        edges = self.edge_index
        if not directed:
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        return coalesce(edges, num_nodes=len(self.ids))


def positions(table: Table, column: str, place: Mapping[str, int], nodes: str) -> list[int]:
    """Where the nodes that a column names are; one that is not there is refused, with its row."""
    found = []
    for row, node in enumerate(table.column(column)):
        if node not in place:
            raise TableError(
                f"{table.place(row, column)}: there is no node {node!r} in {nodes}; "
                "add it there, or remove the row"
            )
        found.append(place[node])
    return found


def node_parts(source: GraphSource, table: Table) -> dict[str, tuple[int, ...]]:
    """The labelled rows of each split, stratified by class."""
    cells = table.column(str(source.target))
    known = [row for row, cell in enumerate(cells) if not is_missing(cell)]
    if not known:
        raise TableError(
            f"{table.path}: no node has a {source.target!r}, so nothing can be learned"
        )
    columns.class_labels(filled(table, str(source.target)), str(source.target))
    shares = (1 - source.validation - source.test, source.validation, source.test)
    plan = plan_split(
        known, strategy="stratified", labels=[cells[row] for row in known], proportions=shares,
        seed=source.split_seed, insufficient="train",
    )  # fmt: skip
    named = {"train": plan.train, "validation": plan.validation, "test": plan.test}
    return {name: tuple(int(row) for row in rows) for name, rows in named.items()}


def fit(source: GraphSource, graph: CsvGraph, rows: Sequence[int]) -> Preparation:
    """What is learned of the columns from the training rows; of links, from all nodes."""
    table, target = graph.table, source.target
    if target is None:
        target = _NO_TARGET
        cells = [str(row % 2) for row in range(len(table))]
        table = dataclasses.replace(table, columns={**table.columns, target: cells})
        drop = {graph.id, *source.drop}
        if not table.columns.keys() - drop - {target}:
            raise TableError(
                f"{table.path} has no column beside the id {graph.id!r} to learn from; add one, "
                "such as the node's degree"
            )
    else:
        table = filled(table, target)
    return columns.fit(
        table, target=target, rows=rows, impute=source.impute, drop=[graph.id, *source.drop],
        numeric=source.numeric, categorical=source.categorical,
    )  # fmt: skip


def filled(table: Table, target: str) -> Table:
    """The table with a known class where a target is missing: those rows are not looked at."""
    cells = table.column(target)
    some = next((cell for cell in cells if not is_missing(cell)), "")
    filled = [some if is_missing(cell) else cell for cell in cells]
    return dataclasses.replace(table, columns={**table.columns, target: filled})
