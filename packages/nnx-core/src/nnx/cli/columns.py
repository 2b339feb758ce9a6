"""Learning from a table how its columns become inputs: kinds, categories, fills and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nnx.cli.preparation import (
    Feature,
    Preparation,
    Target,
    as_written,
    beside,
    refuse_missing_target,
    target_numbers,
)
from nnx.cli.table import (
    Table,
    TableError,
    is_missing,
    looks_like_a_number,
    number,
    option,
)

# A column of text with more distinct values than this is rather a name than a category.
MOST_CATEGORIES = 100


def fit(
    table: Table,
    *,
    target: str,
    rows: Sequence[int],
    regression: bool = False,
    impute: bool = False,
    drop: Iterable[str] = (),
    numeric: Iterable[str] = (),
    categorical: Iterable[str] = (),
) -> Preparation:
    """Learn columns, categories, fills and scales; statistics come from ``rows`` only.

    A column is numeric when most of its present cells are numbers. Categories
    are those of the whole table, since a schema is no statistic.
    """
    from nnx.preprocessing import Standardizer

    drop, numeric, categorical = set(drop), set(numeric), set(categorical)
    for name in (target, *sorted(drop | numeric | categorical)):
        table.column(name)
    names = [name for name in table.columns if name != target and name not in drop]
    if not names:
        raise TableError(f"{table.path} has no column beside the target {target!r} to learn from")
    features = []
    for name in names:
        as_number = name in numeric or (name not in categorical and _mostly_numbers(table, name))
        if not as_number and name not in categorical:
            _refuse_written_numbers(table, name)
        make = _numeric_feature if as_number else _categorical_feature
        features.append(make(table, name, rows, impute, asked=name in categorical))
    features.sort(key=lambda feature: feature.categories is not None)  # stable: numbers first
    read = {feature.name: feature.read(table) for feature in features}  # refuses every bad cell
    numbers = [read[f.name][:, None] for f in features if f.categories is None]
    standardizer = Standardizer.fit(beside(numbers), rows=rows) if numbers else None
    return Preparation(tuple(features), _fit_target(table, target, rows, regression), standardizer)


def class_labels(table: Table, target: str) -> tuple[str, ...]:
    """The classes of a target column, numbers in numeric order; refuses a target of one."""
    refuse_missing_target(table, target)
    found = set(table.column(target))
    if len(found) < 2:
        raise TableError(
            f"{table.path}: the target {target!r} has one class, {found.pop()!r}, in all rows; "
            "a classifier needs at least two"
        )
    numbers = {label: number(label) for label in found}
    if all(value is not None for value in numbers.values()):
        distinct, whole = len(found), all(float(v or 0).is_integer() for v in numbers.values())
        if distinct > 20 and (not whole or distinct > len(table) / 2):
            raise TableError(
                f"{table.path}: the target {target!r} has {distinct} distinct numbers in "
                f"{len(table)} rows; to predict a number pass --regression"
            )
        return tuple(sorted(found, key=lambda label: (numbers[label] or 0.0, label)))
    if len(found) > 20 and all(map(looks_like_a_number, found)):
        row = next(i for i, cell in enumerate(table.column(target)) if number(cell) is None)
        cell = table.column(target)[row]
        raise TableError(
            f"{table.place(row, target)}: {cell!r} is not a number{as_written(cell)}, and the "
            f"target has {len(found)} distinct values like it; mend them, and to predict a number "
            "pass --regression"
        )
    if len(found) > max(MOST_CATEGORIES, len(table) // 2):
        raise TableError(
            f"{table.path}: the target {target!r} has {len(found)} distinct values in "
            f"{len(table)} rows, so it names rows rather than classes; choose another target"
        )
    return tuple(sorted(found))


def _fit_target(table: Table, name: str, rows: Sequence[int], regression: bool) -> Target:
    import numpy as np

    from nnx.preprocessing import Standardizer

    if not regression:
        return Target(name, class_labels(table, name))
    refuse_missing_target(table, name)
    values = np.array(target_numbers(table, name))[:, None]
    if np.ptp(values) == 0:
        raise TableError(
            f"{table.path}: the target {name!r} is {values[0, 0]:g} in all rows; "
            "there is nothing to predict"
        )
    return Target(name, None, Standardizer.fit(values, rows=rows))


def _numeric_feature(
    table: Table, name: str, rows: Sequence[int], impute: bool, *, asked: bool
) -> Feature:
    if not impute:
        return Feature(name)
    import statistics

    cells = table.columns[name]
    present = [v for row in rows if (v := number(cells[row])) is not None]
    if not present:
        raise TableError(
            f"{table.path}: the column {name!r} has no number in the training rows, so its "
            f"missing cells cannot be filled; leave it out with {option('--drop', name)}"
        )
    return Feature(name, fill=statistics.median(present))


def _categorical_feature(
    table: Table, name: str, rows: Sequence[int], impute: bool, *, asked: bool
) -> Feature:
    cells = table.columns[name]
    categories = tuple(sorted({cell for cell in cells if not is_missing(cell)}))
    if len(categories) > MOST_CATEGORIES and not asked:
        raise TableError(
            f"{table.path}: the column {name!r} has {len(categories)} distinct values in "
            f"{len(table)} rows. Leave it out with {option('--drop', name)}, or keep them all "
            f"with {option('--categorical', name)}"
        )
    present = Counter(cells[row] for row in rows if not is_missing(cells[row]))
    if not present:
        raise TableError(
            f"{table.path}: the column {name!r} has no value in the training rows; "
            f"leave it out with {option('--drop', name)}"
        )
    most = min(present, key=lambda category: (-present[category], category))
    return Feature(name, categories, most if impute else None)


def _refuse_written_numbers(table: Table, name: str) -> None:
    """Refuse a column of numbers that are written for people, rather than call them categories."""
    cells = table.columns[name]
    present = [row for row, cell in enumerate(cells) if not is_missing(cell)]
    written = [row for row in present if looks_like_a_number(cells[row])]
    if len(written) * 2 > len(present):
        bad = next(row for row in written if number(cells[row]) is None)
        raise TableError(
            f"{table.place(bad, name)}: {cells[bad]!r} is not a number{as_written(cells[bad])}, "
            f"and most of the column is written like it. Mend the column, read it as categories "
            f"with {option('--categorical', name)}, or leave it out with {option('--drop', name)}"
        )


def _mostly_numbers(table: Table, name: str) -> bool:
    present = [cell for cell in table.columns[name] if not is_missing(cell)]
    return sum(number(cell) is not None for cell in present) * 2 > len(present)
