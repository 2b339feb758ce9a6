"""Finding runs by what they were told and by what became of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nnx.store import manifest
from nnx.store.election import standings
from nnx.store.errors import ResumePointError
from nnx.store.listing import RunRow, list_runs
from nnx.store.paths import LAST, PointFiles, RunPaths, reading_root
from nnx.store.pointer import locate_run
from nnx.store.where import Where
from nnx.utils import validation as check
from nnx.utils.tables import flatten_dict
from nnx.utils.yamlio import read_yaml

if TYPE_CHECKING:
    import pandas as pd

SORTS = ("time", "best", "id")
# Short names of what is asked for most, and where the configuration has it.
_SHORT = {
    "optimizer": ("train.optim.name", "train.optim.factory.id"),
    "lr": ("train.optim.max_lr",),
    "schedule": ("train.scheduler.kind", "train.scheduler.id"),
    "seed": ("train.seed",),
    "data_id": ("train.data_id",),
    "device": ("model.device",),
    "net": ("model.net", "model.net.id", "model.net.module"),
    "parent": ("train.parent_run_id",),
}
_SCORES = ("loss", "error", "accuracy", "f1", "recall", "precision")
Found = tuple[RunRow, dict[str, Any]]


def select(where: str | None = None, *, sort: str = "time", root: str | None = None) -> list[Found]:
    """The rows of the runs that ``where`` describes, each with its :func:`facts`, sorted."""
    chosen = None if where is None else Where.parse(where)
    order = sorting(check.choice("runs", "sort", sort, SORTS), root)
    found = [(row, facts(row, root)) for row in list_runs(root)]
    if chosen is not None:
        if found:
            chosen.check_names({name for _, known in found for name in known})
        found = [pair for pair in found if chosen.matches(pair[1])]
    return sorted(found, key=lambda pair: order(pair[0]))


def facts(row: RunRow, root: str | None = None) -> dict[str, Any]:
    """What can be asked about a run, by name.

    Its row (``id``, ``status``, ``epochs``, ``planned``, ``best``, ``best_epoch``, ``name``,
    ``tags``, ``salt``, ...); the scores of its last epoch (``accuracy``: on the validation
    split, or on training without one; ``val.accuracy``, ``train.accuracy``) and of its best
    (``best.accuracy``), declared metrics among them; its configuration by path
    (``train.optim.max_lr``), and in short ``optimizer``, ``lr``, ``schedule``, ``seed``,
    ``data_id``, ``device``, ``net`` and ``parent``. What a run does not have is ``None``.
    """
    known: dict[str, Any] = {field.name: getattr(row, field.name) for field in _ROW}
    paths = locate_run(row.id, root)
    try:
        config = flatten_dict(read_yaml(paths.run_yaml))
    except (ValueError, OSError):
        config = {}
    config.pop("id", None)
    for short, places in _SHORT.items():
        known[short] = next((config[p] for p in places if config.get(p) is not None), None)
    return {**config, **_scores(paths), **known}


def sorting(sort: str, root: str | None = None) -> Callable[[RunRow], tuple[Any, ...]]:
    """The key of an order: the newest first, by the best of each comparable group, by id."""
    if sort == "time":
        return lambda row: (-row.written, row.id)
    if sort == "id":
        return lambda row: (row.id,)
    found = standings(reading_root(root))

    def by_standing(row: RunRow) -> tuple[Any, ...]:
        one = found.get(row.id)
        if one is None:
            return (math.inf, "", 0.0, row.id)
        return (one.rank, str(one), one.value, row.id)

    return by_standing


def runs_frame(
    where: str | None = None, *, sort: str = "time", root: str | None = None
) -> pd.DataFrame:
    """The runs as a DataFrame, one row each by id: status, scores and configuration.

    ``where`` and ``sort`` are those of ``NNRun.list``; the columns are the :func:`facts`.
    Needs pandas (``nnx-core[tabular]``).
    """
    try:
        import pandas as pd
    except ImportError:
        from nnx.plugins.siblings import install_line

        raise ImportError(
            f"runs_frame needs pandas, which is not installed: {install_line('nnx-core', 'tabular')}"
        ) from None
    found = select(where, sort=sort, root=root)
    first = [field.name for field in _ROW]
    names = dict.fromkeys([*first, *_SCORES, *_SHORT, *(n for _, known in found for n in known)])
    rows = [[known.get(name) for name in names] for _, known in found]
    frame = pd.DataFrame(rows, columns=list(names))
    frame["written"] = pd.to_datetime(frame["written"], unit="s", utc=True)
    return frame.set_index("id")


_ROW = dataclasses.fields(RunRow)


def _scores(paths: RunPaths) -> dict[str, Any]:
    last, best = _record(paths, LAST), _record(paths, "best")
    train = _values(last.get("train_summary") or last.get("train_edp"))
    val = _values(last.get("val_edp"))
    shown = val or train
    named = {"val": val, "train": train}
    named["best"] = _values(
        best.get("val_edp") or best.get("train_summary") or best.get("train_edp")
    )
    scores = {f"{split}.{name}": v for split, values in named.items() for name, v in values.items()}
    return {**dict.fromkeys(_SCORES), **scores, **shown}


def _record(paths: RunPaths, tag: str) -> Mapping[str, Any]:
    try:
        found = manifest.locate(PointFiles(paths.checkpoints, tag)).manifest
    except (ResumePointError, OSError):
        return {}
    record = None if found is None else found.get("record")
    return record if isinstance(record, Mapping) else {}


def _values(record: Any) -> dict[str, Any]:
    """The numbers in the state of an evaluation, declared metrics by their names."""
    if not isinstance(record, Mapping):
        return {}
    values = {name: record[name] for name in _SCORES if record.get(name) is not None}
    for group in ("metrics", "extra"):
        if isinstance(record.get(group), Mapping):
            values = {**record[group], **values}
    return values
