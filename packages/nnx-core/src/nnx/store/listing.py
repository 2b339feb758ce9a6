"""A quick look over many runs: no checkpoint and no torch, and of ours no history."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nnx.records import NNIterationDataPoint
from nnx.store import manifest, standing
from nnx.store.errors import ResumePointError
from nnx.store.history_of import iterate_committed
from nnx.store.metadata import glance_at_labels
from nnx.store.paths import (
    LAST,
    PointFiles,
    RunPaths,
    reading_root,
    run_names,
    settled,
)
from nnx.store.pointer import best_run_id
from nnx.utils.locks import is_held
from nnx.utils.yamlio import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One line about a run. Unknown numbers are ``None``."""

    id: str
    status: str  # training | finished | stopped | started | unreadable
    model: str
    epochs: int | None
    planned: int | None
    loss: float | None
    error: float | None
    best: float | None
    best_epoch: int | None
    written: float  # seconds since the epoch, of the last commit
    salt: str | None
    is_best: bool
    problem: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()


def list_runs(root: str | None = None) -> Iterator[RunRow]:
    """A row for every run of a folder, in order of id."""
    folder = reading_root(root)
    holder = best_run_id(folder)
    for name in run_names(folder):
        row = settled(partial(RunPaths.seen, folder, name), partial(_row_of, holder=holder))
        if row is not None:
            yield row


def about(config: Mapping[str, Any], *, val_loader: Any = None) -> dict[str, Any]:
    """What a row says of a run's configuration; manifests repeat it."""
    net = (config.get("model") or {}).get("net")
    if isinstance(net, Mapping):
        net = net.get("module") or net.get("id") or "module"
    planned = [(config.get(part) or {}).get("n_epochs") for part in ("trainer", "train")]
    return {
        "model": str(net),
        "planned": next((n for n in planned if isinstance(n, int)), None),
        "salt": config.get("salt"),
        "grounds": standing.grounds(config, val_loader=val_loader),
    }


def _row_of(paths: RunPaths, holder: str | None) -> RunRow | None:
    try:
        written = os.stat(paths.run_yaml).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _row(paths, written, holder == paths.id)


def _row(paths: RunPaths, written: float, is_best: bool) -> RunRow:
    facts: dict[str, Any] = {"epochs": None, "loss": None, "error": None}
    facts |= {"best": None, "best_epoch": None}
    config: dict[str, Any] = {"model": "?", "planned": None, "salt": None}
    problem = None
    try:
        files = PointFiles(paths.checkpoints, LAST)
        last, changed, damage = _newest(files)
        known = None if last.manifest is None else last.manifest.get("run")
        config = dict(known or about(read_yaml(paths.run_yaml)))
        facts["best"] = config.pop("best", None)
        facts["best_epoch"] = config.pop("best_epoch", None)
        config.pop("grounds", None)
        if last.manifest is not None:
            problem, written = damage, changed
            record = last.manifest["record"]
            shown = record.get("val_edp") or record.get("train_edp") or {}
            facts |= {"loss": shown.get("loss"), "error": shown.get("error")}
            facts["epochs"] = int(record["epoch_idx"]) + 1
        else:
            facts |= _told_by_history(paths)
        if known is None:
            best = manifest.locate(PointFiles(paths.checkpoints, "best")).manifest
            if best is not None:
                idp = NNIterationDataPoint.from_state(best["record"])
                facts |= {"best": standing.shown(idp), "best_epoch": idp.epoch_idx}
    except (ResumePointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = str(error)
    return RunRow(
        id=paths.id,
        status=_status(paths, facts["epochs"], config["planned"], problem),
        written=written,
        is_best=is_best,
        problem=problem,
        **glance_at_labels(paths),
        **config,
        **facts,
    )


def _told_by_history(paths: RunPaths) -> dict[str, Any]:
    """How far a run without manifests came, and its best: one of the original NNx, say."""
    if os.path.exists(paths.marker):  # ours, which committed nothing
        return {"epochs": 0}
    known = standing.grounds(read_yaml(paths.run_yaml))
    last: NNIterationDataPoint | None = None
    best: tuple[float, NNIterationDataPoint] | None = None

    def end_epoch() -> None:
        nonlocal best
        one = None if last is None else standing.of_record(last, known)
        if last is not None and one is not None and (best is None or one.value < best[0]):
            best = one.value, last

    for record in iterate_committed(paths, None):
        if last is not None and record.epoch_idx != last.epoch_idx:
            end_epoch()
        last = record
    end_epoch()
    if last is None:
        return {"epochs": None if os.path.exists(paths.checkpoints) else 0}
    shown = last.val_edp or last.train_edp
    found: dict[str, Any] = {"epochs": last.epoch_idx + 1, "loss": shown.loss, "error": shown.error}
    if best is not None:
        found |= {"best": standing.shown(best[1]), "best_epoch": best[1].epoch_idx}
    return found


def _newest(files: PointFiles) -> tuple[manifest.Located, float, str | None]:
    """LAST, when it was committed, and what shows of its damage without reading it."""
    for left in (2, 1, 0):  # a writer may rename the files between two looks
        last = manifest.locate(files)
        if last.manifest is None:
            break
        try:
            found = os.stat(last.checkpoint)
            changed = os.stat(last.manifest_path).st_mtime
        except FileNotFoundError:
            if left:
                continue
            raise
        expected = last.manifest["files"][f"{LAST}.pt"]["size"]
        if stat.S_ISREG(found.st_mode) and found.st_size == expected:
            return last, changed, None
        damage = f"{last.checkpoint} is corrupted: it is not the {expected} bytes that were written"
        if not left:
            return last, changed, damage
    return last, 0.0, None


def _status(paths: RunPaths, epochs: int | None, planned: int | None, problem: str | None) -> str:
    if is_held(paths.lease):
        return "training"
    if problem is not None:
        return "unreadable"
    if epochs == 0:
        return "started"
    return "finished" if epochs is None or planned is None or epochs >= planned else "stopped"
