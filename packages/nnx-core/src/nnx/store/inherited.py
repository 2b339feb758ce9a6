"""The BEST checkpoint that a continued run takes over from the run it continues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.records import NNIterationDataPoint
from nnx.store import manifest, standing
from nnx.store.commit import publish_staged, remove_point
from nnx.store.committed import checkpoint_record
from nnx.store.errors import ResumePointError, RunBusyError
from nnx.store.paths import PointFiles, RunPaths
from nnx.store.pointer import locate_run
from nnx.store.points import listed, verify_point
from nnx.utils import files as fs
from nnx.utils.caller import warn_caller
from nnx.utils.folders import make_folder
from nnx.utils.locks import locked
from nnx.utils.yamlio import read_yaml

LOCK_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedBest:
    """A BEST in the run ``source``, which ``run_id`` wrote; both are the same unless it
    was taken over there too. ``grounds`` are those of the run that takes it over.
    """

    source: str
    run_id: str
    checkpoint_id: str | None
    record: NNIterationDataPoint
    grounds: Mapping[str, Any]

    @property
    def epoch(self) -> int:
        return self.record.epoch_idx


def find(
    source: str, config: Mapping[str, Any], *, until: int, root: str | None = None
) -> InheritedBest | None:
    """The BEST of the run ``source`` that a run of ``config`` takes over at epoch ``until``.

    ``None`` where there is no BEST. Raises ``ResumePointError``, whose message says
    why, for one that is newer than ``until``, damaged, or measured by other means.
    """
    paths = locate_run(source, root)
    what = f"the BEST checkpoint of run {paths.id}"
    state = checkpoint_record(paths, standing.BEST)
    if state is None:
        return None
    record = NNIterationDataPoint.from_state(state)
    if record.epoch_idx > until:
        raise ResumePointError(f"{what} is of epoch {record.epoch_idx}, later than epoch {until}")
    theirs, ours = standing.grounds(read_yaml(paths.run_yaml)), standing.grounds(config)
    # A continuation is over the same data unless both runs name theirs.
    theirs["data"], ours["data"] = theirs["data"] or ours["data"], ours["data"] or theirs["data"]
    if theirs != ours:
        named = ", ".join(
            f"{k} {theirs[k]!r}, not {ours[k]!r}" for k in ours if theirs[k] != ours[k]
        )
        raise ResumePointError(f"{what} was chosen by another measure: {named}")
    found = verify_point(source, standing.BEST, root)
    origin = (found or {}).get("origin") or {}
    return InheritedBest(
        source=paths.id,
        run_id=origin.get("run_id", paths.id),
        checkpoint_id=None if found is None else found["checkpoint_id"],
        record=record,
        grounds=ours,
    )


def take_over(best: InheritedBest, paths: RunPaths, about: Mapping[str, Any]) -> bool:
    """Give ``paths``, which has no BEST yet, that of another run under the same name.

    The files are hard links where the filesystem has them. ``False``, with a warning,
    when the source's BEST is not there any more.
    """
    source = PointFiles(RunPaths.of(best.source, paths.root).checkpoints, standing.BEST)
    target = PointFiles(paths.checkpoints, standing.BEST)
    what = f"the checkpoint {source.checkpoint}"
    try:
        with locked(
            source.lock, timeout=LOCK_SECONDS, what=what, optional=True, error=RunBusyError
        ):
            found = manifest.locate(source)
            if not os.path.exists(found.checkpoint) or (
                found.manifest is not None and found.manifest["checkpoint_id"] != best.checkpoint_id
            ):
                raise FileNotFoundError(what)
            _publish(best, source, target, found, about)
    except FileNotFoundError:
        warn_caller(
            f"the BEST checkpoint of run {best.source}, of epoch {best.epoch}, was removed or "
            f"replaced since run {paths.id} continued from it; it has none until an epoch is "
            "better",
            RuntimeWarning,
        )
        return False
    return True


def _publish(
    best: InheritedBest,
    source: PointFiles,
    target: PointFiles,
    found: manifest.Located,
    about: Mapping[str, Any],
) -> None:
    """Share a point's files and give them the target's names, all or none."""
    try:
        _share(source, target, found)
        if found.manifest is None:
            fs.disk.replace(target.staged, target.checkpoint)
        else:
            document = {
                **found.manifest,
                "generation": 1,
                "epoch_tag": False,
                "run": dict(about),
                "origin": {"run_id": best.run_id, "epoch": best.epoch},
            }
            with fs.atomic_write(target.staged_manifest, "wb", strict=True) as stream:
                stream.write(manifest.encode(document))
            publish_staged(target)
        fs.disk.flush_directory(target.folder)
    except BaseException:
        for path in (target.staged, target.staged_manifest):
            fs.remove_quietly(path)
        with contextlib.suppress(OSError):
            remove_point(target)
        raise


def _share(source: PointFiles, target: PointFiles, found: manifest.Located) -> None:
    """Every file of a point under the target's names, the checkpoint staged."""
    if found.manifest is None:  # written before manifests: its sidecars are known by name
        files = [p for p in (source.compat_sidecar, *source.sidecars()) if os.path.exists(p)]
        named = {path: os.path.join(target.folder, os.path.basename(path)) for path in files}
    else:
        names = [name for name in found.manifest["files"] if name != source.name]
        named = {
            listed(source, name, found.manifest_path): os.path.join(target.folder, *name.split("/"))
            for name in names
        }
        state_id = found.manifest["training_state_id"]
        if state_id is not None:
            fs.share_file(source.sidecar(state_id), target.compat_sidecar)
    for path, name in named.items():
        make_folder(os.path.dirname(name))
        fs.share_file(path, name)
    for folder in {os.path.dirname(name) for name in named.values()}:
        fs.disk.flush_directory(folder)
    fs.share_file(found.checkpoint, target.staged)
