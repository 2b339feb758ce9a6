"""What was asked about a table, and which of its rows train, validate and test."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from nnx.cli.columns import class_labels
from nnx.cli.table import Table, TableError
from nnx.data.split_strategies import by_class, by_group, hashed_order
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
    # Of a run that an earlier form of the command stored: its rows were dealt in another order.
    earlier: bool = False

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
        """What was asked, without defaults, so that a new option moves no identity."""
        asked = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "earlier" and (self.earlier or value != field.default):
                asked[field.name] = list(value) if isinstance(value, tuple) else value
        return asked

    @staticmethod
    def from_state(state: Mapping[str, Any], *, earlier: bool = False) -> Source:
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in state.items()
        }
        return Source(**fields, earlier=earlier)

    def identity(self, digest: str) -> str:
        """The run's ``data_id``: file name and a digest of content, columns, split and batches."""
        # Where it lies and when to stop are not the data.
        return self._named(digest, leaving=("path", "patience"))

    def held_out(self, digest: str) -> str:
        """What the validation rows are called: runs on them compare, however they read them."""
        reading = ("impute", "drop", "numeric", "categorical", "batch_size")
        return self._named(digest, leaving=("path", "patience", *reading))

    def _named(self, digest: str, *, leaving: Sequence[str]) -> str:
        state = {k: v for k, v in self.state().items() if k not in leaving}
        name = Path(self.path).name if is_regular(self.path) else "pipe"
        digest = hashlib.sha256(canonical({**state, "content": digest})).hexdigest()
        return f"{name}@{digest[:16]}"


def is_regular(path: str) -> bool:
    """Whether ``path`` is a file, which can be read again, and no pipe."""
    return Path(path).is_file()


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
    if source.earlier:
        labels = None if source.regression else table.column(source.target)
        return _earlier_rows(count, labels, shares, source.split_seed)
    if source.regression:
        planned = plan_split(
            range(count), strategy="group", groups=range(count), proportions=shares,
            seed=source.split_seed,
        )  # fmt: skip
    else:
        class_labels(table, source.target)  # one class is refused before it is split
        planned = plan_split(
            range(count), strategy="stratified", labels=table.column(source.target),
            proportions=shares, seed=source.split_seed, insufficient="train",
        )  # fmt: skip
    return planned.resolve(range(count))


def _earlier_rows(
    count: int, labels: Sequence[Any] | None, shares: Sequence[float], seed: int
) -> SplitIndices:
    """The rows as runs of the earlier form were dealt them, for a resume of one."""

    def order_of(keys: Sequence[Any]) -> Any:
        return hashed_order(keys, f"{seed}:", mark=":")

    def give_least(counts: list[int], wish: Any, active: list[int]) -> None:
        for split in active:
            if counts[split] == 0:
                counts[max(active, key=lambda s: (counts[s], -s))] -= 1
                counts[split] = 1

    parts = [Fraction(repr(share)) for share in shares]
    parts = [part / sum(parts) for part in parts]
    if labels is None:
        codes = by_group(range(count), parts, order_of)
    else:
        codes, _ = by_class(
            labels, parts, order_of(range(count)), small_classes_train=True, give_least=give_least
        )
    return SplitIndices(*(tuple((codes == split).nonzero()[0].tolist()) for split in range(3)))
