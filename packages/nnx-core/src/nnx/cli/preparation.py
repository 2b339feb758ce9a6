"""From columns of text to tensors: fitted once on the training rows, stored with the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.cli.table import (
    Table,
    TableError,
    is_missing,
    looks_like_a_number,
    number,
    option,
    unknown_column,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nnx.preprocessing import Standardizer

FORMAT = "nnx.table/1"


@dataclass(frozen=True, slots=True)
class Feature:
    """One input column. ``categories`` is ``None`` for numbers.

    ``fill`` replaces missing cells, and never one that holds something; ``None``
    refuses them.
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: float | str | None = None

    @property
    def width(self) -> int:
        """Inputs of the network that this column takes: one, or one per category."""
        return 1 if self.categories is None else len(self.categories)

    def encode(self, table: Table) -> np.ndarray:
        """The column as float64 of shape (rows, width); refuses what it cannot read."""
        import numpy as np

        if self.categories is None:
            return self.read(table)[:, None]
        encoded = np.zeros((len(table), self.width), dtype=np.float64)
        encoded[np.arange(len(table)), self.read(table)] = 1.0
        return encoded

    def read(self, table: Table) -> np.ndarray:
        """The numbers of a column, or the positions of its categories, of shape (rows,)."""
        import numpy as np

        cells = table.column(self.name)
        if self.categories is None:
            numbers = [self._number(cell) for cell in cells]
            bad = [row for row, value in enumerate(numbers) if value is None]
            read = np.array(numbers, dtype=np.float64)
        else:
            place = {category: index for index, category in enumerate(self.categories)}
            read = np.array([place.get(self._category(cell), -1) for cell in cells])
            bad = np.flatnonzero(read < 0).tolist()
        if bad:
            raise TableError(self._refusal(table, bad))
        return read

    def filled(self, table: Table) -> int:
        """How many cells of a table this column fills."""
        return 0 if self.fill is None else sum(map(is_missing, table.columns[self.name]))

    def _number(self, cell: str) -> float | None:
        if is_missing(cell):
            return self.fill if isinstance(self.fill, float) else None
        return number(cell)

    def _category(self, cell: str) -> str:
        return self.fill if is_missing(cell) and isinstance(self.fill, str) else cell

    def _refusal(self, table: Table, bad: Sequence[int]) -> str:
        cell = table.columns[self.name][bad[0]]
        more = f" (and {len(bad) - 1} more in this column)" if len(bad) > 1 else ""
        where = f"{table.place(bad[0], self.name)}: "
        drop = option("--drop", self.name)
        if is_missing(cell):
            return (
                f"{where}the value is missing{more}. Fill it in, train with --impute, "
                f"or leave the column out with {drop}"
            )
        if self.categories is None:
            return (
                f"{where}{cell!r} is not a number{as_written(cell)}{more}. Mend the cell, read the "
                f"column as categories with {option('--categorical', self.name)}, or leave it out "
                f"with {drop}"
            )
        known = ", ".join(map(repr, self.categories[:8]))
        dots = ", ..." if len(self.categories) > 8 else ""
        return f"{where}{cell!r} is not a category seen in training{more}. Known: {known}{dots}"


def as_written(cell: str) -> str:
    """What is wrong with a number that is written for people."""
    return " as a program writes it (digits and a point)" if looks_like_a_number(cell) else ""


@dataclass(frozen=True, slots=True)
class Target:
    """The column to predict: classes by name, or a number (``labels`` is ``None``)."""

    name: str
    labels: tuple[str, ...] | None = None
    standardizer: Standardizer | None = None

    def encode(self, table: Table) -> torch.Tensor:
        """Class indices, int64 of shape (rows,); or standardized numbers, (rows, 1)."""
        import numpy as np
        import torch

        cells = table.column(self.name)
        refuse_missing_target(table, self.name)
        if self.labels is None:
            values = target_numbers(table, self.name)
            assert self.standardizer is not None
            return self.standardizer.transform(np.array(values)[:, None])
        place = {label: index for index, label in enumerate(self.labels)}
        for row, cell in enumerate(cells):
            if cell not in place:
                raise TableError(
                    f"{table.place(row, self.name)}: {cell!r} is not a class seen in training. "
                    f"Known: {', '.join(map(repr, self.labels))}"
                )
        return torch.tensor([place[cell] for cell in cells])

    def restore(self, outputs: np.ndarray) -> np.ndarray:
        """Standardized predictions of a number in the units of the table."""
        import numpy as np

        assert self.standardizer is not None
        scaled = outputs.astype(np.float64) * self.standardizer.scale[0]
        restored: np.ndarray = scaled + self.standardizer.mean[0]
        return restored


@dataclass(frozen=True, slots=True)
class Preparation:
    """What was learned from the training rows; ``state()`` is JSON."""

    features: tuple[Feature, ...]
    target: Target
    standardizer: Standardizer | None  # of the numeric columns, None when there are none

    @property
    def width(self) -> int:
        """Inputs of the network."""
        return sum(feature.width for feature in self.features)

    def inputs(self, table: Table) -> torch.Tensor:
        """The prepared features: float32 of shape (rows, width); numbers come first."""
        import torch

        for feature in self.features:
            if feature.name not in table.columns:
                raise TableError(
                    f"{unknown_column(table, feature.name)}, which the run was trained on"
                )
        numeric = [f.encode(table) for f in self.features if f.categories is None]
        blocks = [torch.from_numpy(f.encode(table)) for f in self.features if f.categories]
        if numeric:
            assert self.standardizer is not None
            blocks.insert(0, self.standardizer.transform(beside(numeric)))
        return torch.cat([block.to(torch.float32) for block in blocks], dim=1)

    def filled(self, table: Table) -> str:
        """How many missing cells of which columns are filled, for a person; empty: none."""
        counts = {f: f.filled(table) for f in self.features}
        return ", ".join(
            f"{count} in {f.name!r} with {f.fill!r}" for f, count in counts.items() if count
        )

    def state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "features": [
                {
                    "name": f.name,
                    "categories": None if f.categories is None else list(f.categories),
                    "fill": f.fill,
                }
                for f in self.features
            ],
            "target": {
                "name": self.target.name,
                "labels": None if self.target.labels is None else list(self.target.labels),
                "standardizer": _state(self.target.standardizer),
            },
            "standardizer": _state(self.standardizer),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Preparation:
        if state.get("format") != FORMAT:
            raise ValueError(f"the preparation has format {state.get('format')!r}, not {FORMAT!r}")
        target = state["target"]
        return Preparation(
            features=tuple(
                Feature(f["name"], _tuple(f["categories"]), f["fill"]) for f in state["features"]
            ),
            target=Target(
                target["name"], _tuple(target["labels"]), _standardizer(target["standardizer"])
            ),
            standardizer=_standardizer(state["standardizer"]),
        )


def refuse_missing_target(table: Table, name: str) -> None:
    for row, cell in enumerate(table.column(name)):
        if is_missing(cell):
            raise TableError(
                f"{table.place(row, name)}: the target is missing. A target is never imputed: "
                "fill it in or remove the row"
            )


def target_numbers(table: Table, name: str) -> list[float]:
    """The numbers of a target column; refuses a cell that is none."""
    values = []
    for row, cell in enumerate(table.column(name)):
        value = number(cell)
        if value is None:
            raise TableError(
                f"{table.place(row, name)}: {cell!r} is not a number{as_written(cell)}, which "
                "--regression needs"
            )
        values.append(value)
    return values


def beside(columns: list[np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.concatenate(columns, axis=1)


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _state(standardizer: Standardizer | None) -> dict[str, Any] | None:
    return None if standardizer is None else standardizer.state()


def _standardizer(state: Mapping[str, Any] | None) -> Standardizer | None:
    from nnx.preprocessing import Standardizer

    return None if state is None else Standardizer.from_state(state)
