"""Predictions kept with a run: what was predicted for which rows of a split.

``runs/<id>/predictions/<split>.csv`` holds one row per sample: its id, its
target and its prediction. Reading it loads no torch.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnx.store.paths import check_name
from nnx.store.pointer import locate_run
from nnx.utils.files import atomic_write
from nnx.utils.folders import make_folder

_HEADER = ["sample_id", "target", "predicted"]


@dataclass(frozen=True, slots=True)
class StoredPredictions:
    """The rows of one split, as text: what the CSV says."""

    split: str
    sample_ids: tuple[str, ...]
    targets: tuple[str, ...]
    predicted: tuple[str, ...]


def save_predictions(
    run_id: str,
    split: str,
    *,
    targets: Sequence[Any],
    predicted: Sequence[Any],
    sample_ids: Sequence[Any] | None = None,
    root: str | None = None,
) -> str:
    """Store the predictions of one split with its run; an earlier file of the split is replaced.

    ``targets`` and ``predicted`` are 1-D and of equal length: class names, class
    indices or numbers. ``sample_ids`` default to ``0 .. N-1``. Returns the path.

    Raises ``FileNotFoundError`` for a run that does not exist and ``ValueError``
    for unequal lengths or a split that is not a plain name.
    """
    paths = locate_run(run_id, root)
    if not paths.exists():
        raise FileNotFoundError(f"there is no run {run_id!r} to keep predictions with")
    check_name(split, "split")
    columns = [list(range(len(targets))) if sample_ids is None else sample_ids, targets, predicted]
    if len({len(c) for c in columns}) != 1:
        raise ValueError(
            "sample_ids, targets and predicted must have the same length, not "
            + ", ".join(str(len(c)) for c in columns)
        )
    folder = os.path.join(paths.dir, "predictions")
    make_folder(folder)
    path = os.path.join(folder, f"{split}.csv")
    with atomic_write(path) as stream:
        writer = csv.writer(stream)
        writer.writerow(_HEADER)
        writer.writerows([_plain(v) for v in row] for row in zip(*columns))
    return path


def load_predictions(run_id: str, root: str | None = None) -> list[StoredPredictions]:
    """Every split stored with a run, by name; empty when there is none."""
    folder = os.path.join(locate_run(run_id, root).dir, "predictions")
    if not os.path.isdir(folder):
        return []
    found = []
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".csv") or name.startswith("."):
            continue
        path = os.path.join(folder, name)
        with open(path, encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream))
        if not rows or rows[0] != _HEADER or any(len(r) != 3 for r in rows):
            raise ValueError(f"{path} is not a table of {', '.join(_HEADER)}; remove it")
        ids, targets, predicted = zip(*rows[1:]) if len(rows) > 1 else ((), (), ())
        found.append(StoredPredictions(name[:-4], ids, targets, predicted))
    return found


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
