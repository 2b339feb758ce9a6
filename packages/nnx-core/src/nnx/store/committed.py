"""How far a run's history is committed: LAST is the marker of an epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nnx.store import manifest
from nnx.store.errors import ForeignFileError, ResumePointError
from nnx.store.paths import LAST, PointFiles, RunPaths
from nnx.utils.caller import warn_caller

NOTHING = -1  # no epoch is committed
_TRIES = 5


def committed_epoch(paths: RunPaths) -> int | None:
    """The last committed epoch; ``None`` when the whole history counts.

    A run of the history protocol (its marker is there) without LAST has
    committed nothing. LAST is read through its manifest; only one written
    without a manifest is opened. An empty or damaged LAST is a
    ``ResumePointError``: it must not make the history look shorter.
    """
    return committed_end(paths)[0]


def committed_end(paths: RunPaths) -> tuple[int | None, Mapping[str, Any] | None]:
    """:func:`committed_epoch`, and the record that LAST committed as the last one."""
    state = checkpoint_record(paths, LAST)
    if state is not None:
        return int(state["epoch_idx"]), state
    if os.path.lexists(PointFiles(paths.checkpoints, LAST).checkpoint):
        return None, None
    return (NOTHING if os.path.exists(paths.marker) else None), None


def checkpoint_record(paths: RunPaths, tag: str) -> Mapping[str, Any] | None:
    """The record state of a tag's checkpoint; ``None`` when there is none to read."""
    files = PointFiles(paths.checkpoints, tag)
    for _ in range(_TRIES):  # a writer may rename the files between two looks
        found = manifest.locate(files)
        try:
            info = os.stat(found.checkpoint)
        except (FileNotFoundError, NotADirectoryError):
            if found.manifest is None:
                return None
            continue
        if info.st_size == 0:
            raise ResumePointError(f"{found.checkpoint} is corrupted: it is empty")
        if found.manifest is not None and _describes(found, info):
            record = found.manifest["record"]
            assert isinstance(record, dict)
            return record
        return _read_record(found.checkpoint)
    raise ResumePointError(f"{found.checkpoint} is missing, though its manifest is there")


def _describes(found: manifest.Located, info: os.stat_result) -> bool:
    """Whether the manifest is about this very file, as far as that shows without reading it."""
    assert found.manifest is not None
    entry = found.manifest["files"].get(f"{found.manifest['tag']}.pt", {})
    if entry.get("size") != info.st_size:
        return False
    try:
        return info.st_mtime <= os.stat(found.manifest_path).st_mtime
    except FileNotFoundError:
        return True  # it was staged, and is made live right now


def _read_record(path: str) -> Mapping[str, Any] | None:
    from nnx.store.checkpoint import NNCheckpoint

    try:
        checkpoint = NNCheckpoint.from_file(path)
    except ForeignFileError:
        warn_caller(
            f"{path} was not written as plain data and is not read; the run's whole "
            f"history is shown",
            RuntimeWarning,
        )
        return None
    if checkpoint is None:
        raise ResumePointError(f"{path} is not a checkpoint of NNx")
    return checkpoint.idp.state()
