"""What was asked about a table, and which of its rows train, validate and test."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx.cli import preparation as prepare
from nnx.cli.table import Table, TableError
from nnx.data_splits import SplitIndices, plan_split
from nnx.utils.jsonlike import canonical

SPLIT_NAMES = {"train": 0, "training": 0, "validation": 1, "val": 1, "test": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What was asked about the data; with the file's content it identifies it."""

    path: str
    target: str
    regression: bool = False
    delimiter: str = ","
    impute: bool = False
    drop: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    validation: float = 0.15
    test: float = 0.15
    split_seed: int = 0
    split_column: str | None = None
    batch_size: int = 32
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, not {self.batch_size}")
        for name in ("validation", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} is a share in [0, 1), not {getattr(self, name)}")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"--validation {self.validation} and --test {self.test} leave no row to train on"
            )
        if self.target in self.drop:
            raise ValueError(f"--drop {self.target} is the target")
        both = set(self.numeric) & set(self.categorical)
        if both:
            raise ValueError(f"{sorted(both)[0]!r} cannot be both --numeric and --categorical")

    def state(self) -> dict[str, Any]:
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Source:
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in state.items()
        }
        return Source(**fields)

    def identity(self, digest: str) -> str:
        """The run's ``data_id``: file name and a digest of content, columns, split and batches."""
        state = {**self.state(), "content": digest}
        del state["path"], state["patience"]  # where it lies and when to stop are not the data
        name = Path(self.path).name
        return f"{name}@{hashlib.sha256(canonical(state)).hexdigest()[:16]}"


def split_rows(source: Source, table: Table) -> SplitIndices:
    """Row positions of each split: from a column, stratified by class, or at random."""
    count = len(table)
    if source.split_column is not None:
        members: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row, cell in enumerate(table.column(source.split_column)):
            which = SPLIT_NAMES.get(cell.lower())
            if which is None:
                raise TableError(
                    f"{table.place(row, source.split_column)}: {cell!r} is none of "
                    "train, validation and test"
                )
            members[which].append(row)
        if not members[0]:
            raise TableError(f"{table.path}: no row of {source.split_column!r} says train")
        return SplitIndices(*map(tuple, members))
    shares = (1 - source.validation - source.test, source.validation, source.test)
    if source.regression:
        planned = plan_split(
            range(count), strategy="group", groups=range(count), proportions=shares,
            seed=source.split_seed,
        )  # fmt: skip
    else:
        prepare.class_labels(table, source.target)  # one class is refused before it is split
        planned = plan_split(
            range(count), strategy="stratified", labels=table.column(source.target),
            proportions=shares, seed=source.split_seed, insufficient="train",
        )  # fmt: skip
    return planned.resolve(range(count))
