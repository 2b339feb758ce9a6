"""Reading resume points: finding, verifying and loading them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nnx.store import codec, manifest, names
from nnx.store.checkpoint import NNCheckpoint, read_checkpoint
from nnx.store.errors import ResumePointError, RunBusyError
from nnx.store.paths import LAST, STEP, PointFiles, RunPaths, settled, tag_name
from nnx.store.pointer import locate_run
from nnx.store.shards import INDEX, SHARD_FILE
from nnx.utils.flushing import sha256_of, side_by_side
from nnx.utils.locks import locked

LATEST = "latest"
_LOCK_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified point of a run: what a resume continues from.

    ``shards`` is where the sharded tensors are that the checkpoint and the state
    still refer to; ``None`` when they hold whole tensors. ``bundle`` is the generation of
    the bundle that a point came in; its run need not be on this disk.
    """

    run_id: str
    tag: str
    checkpoint: NNCheckpoint
    training_state: dict[str, Any] | None
    manifest: dict[str, Any] | None
    shards: str | None = None
    bundle: str | None = None

    @property
    def generation(self) -> int | None:
        return None if self.manifest is None else int(self.manifest["generation"])

    @property
    def checkpoint_id(self) -> str | None:
        return None if self.manifest is None else str(self.manifest["checkpoint_id"])

    @property
    def completed_epoch(self) -> int:
        if self.manifest is None:
            return self.checkpoint.idp.epoch_idx
        return int(self.manifest["position"]["completed_epoch"])


def read_point(
    run_id: str,
    tag: Enum | str,
    root: str | None = None,
    map_location: Any = "cpu",
    *,
    whole: bool = True,
    with_state: bool = True,
    mapped: bool = False,
) -> ResumePoint:
    """Verify and load a point to resume from, its training state too unless told otherwise.

    ``tag`` is a ``Checkpoints`` member, a custom stem (``"custom_e3"``),
    ``"step"`` (the point inside an epoch) or ``"latest"`` (the newer of step
    and LAST). ``"best"`` as a run id follows the pointer to the best run.
    Raises ``FileNotFoundError`` when the run or the tag is not there, and
    ``ResumePointError`` for a torn, mixed or corrupted point. Without ``whole``,
    sharded tensors stay references, and :func:`check_shards` verifies their files.
    ``mapped`` tensors are the pages of the files, read as they are used.
    """
    name = tag_name(tag)
    return settled(
        lambda: locate_run(run_id, root),
        lambda paths: _read_point(
            paths, name, map_location, whole=whole, with_state=with_state, mapped=mapped
        ),
    )


def _read_point(
    paths: RunPaths, name: str, map_location: Any, *, whole: bool, with_state: bool, mapped: bool
) -> ResumePoint:
    if not os.path.isdir(paths.dir):
        raise FileNotFoundError(f"there is no run {paths.id!r} in {paths.root}")
    if name == LATEST:
        name = STEP if step_is_newer(paths) else LAST
    elif name == STEP and not step_is_newer(paths):
        raise FileNotFoundError(
            f"run {paths.id} has no point inside an epoch that is newer than LAST; "
            f"resume from 'last' or 'latest'"
        )
    files = PointFiles(paths.checkpoints, name)
    with _reading(files):
        found = _verify(files, shards=whole)
        checkpoint, state = _load(
            files, map_location, with_state=with_state, whole=whole, mapped=mapped
        )
    if checkpoint is None:
        there = ", ".join(written_tags(paths)) or "none"
        raise FileNotFoundError(f"run {paths.id} has no checkpoint {name!r} (written: {there})")
    return ResumePoint(
        run_id=paths.id,
        tag=name,
        checkpoint=checkpoint,
        training_state=state,
        manifest=found,
        shards=None if whole or found is None else shards_of(files, found),
    )


def shards_of(files: PointFiles, found: Mapping[str, Any]) -> str | None:
    """Where the sharded tensors of a manifest's point are; ``None`` when it has none."""
    for name in found["files"]:
        if name.startswith(f"{files.tag}.dcp/"):
            return os.path.dirname(listed(files, name, files.manifest))
    return None


def check_shards(point: ResumePoint, *, share: int = 0, of: int = 1) -> None:
    """Compare every ``of``-th file of a point's sharded tensors with its manifest."""
    assert point.shards is not None
    assert point.manifest is not None
    entries = {n.rpartition("/")[2]: e for n, e in point.manifest["files"].items() if "/" in n}
    for name in sorted(entries)[share::of]:
        path, entry = os.path.join(point.shards, name), entries[name]
        if not os.path.isfile(path):
            raise ResumePointError(f"the resume point is torn: {path} is missing")
        if os.path.getsize(path) != entry["size"] or sha256_of(path) != entry["sha256"]:
            raise ResumePointError(
                f"the resume point is corrupted: the SHA-256 of {path} does not match its "
                "manifest. Resume from another checkpoint of the run"
            )


def with_tensors(value: Mapping[str, Any], path: str, map_location: Any) -> dict[str, Any]:
    """A sharded checkpoint's content with whole tensors, read from beside it."""
    from nnx.store.dcp import resolve

    folder, name = os.path.split(os.path.abspath(path))
    where = PointFiles(folder, name.split(".pt")[0]).shards(_generation(value[codec.SHARDS], path))
    if not os.path.isdir(where):
        raise ResumePointError(
            f"{path} is a sharded checkpoint and its tensors, {where}, are not there. Inside its "
            "run, nnx.distributed.gather_checkpoint(run_id) makes one ordinary file of it"
        )
    return {**value, "net_state": resolve(value["net_state"], where, map_location)}


def load_point(
    run_id: str, tag: Enum | str, root: str | None, map_location: Any, *, with_state: bool
) -> tuple[NNCheckpoint | None, dict[str, Any] | None]:
    """A tag's checkpoint and, if asked for, its training state; nothing is created."""

    def look(paths: RunPaths) -> tuple[NNCheckpoint | None, dict[str, Any] | None]:
        files = PointFiles(paths.checkpoints, tag_name(tag))
        if not os.path.isdir(paths.checkpoints):
            return None, None
        with _reading(files):
            return _load(files, map_location, with_state=with_state)

    return settled(lambda: locate_run(run_id, root), look)


def read_manifest(run_id: str, tag: Enum | str, root: str | None = None) -> dict[str, Any] | None:
    """The manifest of a tag, or ``None``; reads no checkpoint."""
    return settled(
        lambda: locate_run(run_id, root),
        lambda paths: manifest.locate(PointFiles(paths.checkpoints, tag_name(tag))).manifest,
    )


def verify_point(run_id: str, tag: Enum | str, root: str | None = None) -> dict[str, Any] | None:
    """The manifest of a tag whose files are as it says; ``None`` without one."""

    def look(paths: RunPaths) -> dict[str, Any] | None:
        files = PointFiles(paths.checkpoints, tag_name(tag))
        if not os.path.isdir(paths.checkpoints):
            return None
        with _reading(files):
            return _verify(files)

    return settled(lambda: locate_run(run_id, root), look)


def written_tags(paths: RunPaths) -> list[str]:
    """The tags that have a checkpoint, in order of name."""
    try:
        names = os.listdir(paths.checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        n[:-3] for n in names if n.endswith(".pt") and ".pt.opt." not in n and not n.startswith(".")
    )


def step_is_newer(paths: RunPaths) -> bool:
    """Whether there is a point inside an epoch past what LAST has committed."""
    step = manifest.locate(PointFiles(paths.checkpoints, STEP))
    if step.manifest is None:
        return False
    last = manifest.locate(PointFiles(paths.checkpoints, LAST)).manifest
    return last is None or _position(step.manifest) > _position(last)


def _position(found: Mapping[str, Any]) -> int:
    position = found["position"]
    step = position["global_step"]
    return int(found["record"]["iter_idx"]) + 1 if step is None else int(step)


def _reading(files: PointFiles) -> AbstractContextManager[None]:
    what = f"the checkpoint {files.checkpoint}"
    return locked(files.lock, timeout=_LOCK_SECONDS, what=what, optional=True, error=RunBusyError)


def _verify(files: PointFiles, *, shards: bool = True) -> dict[str, Any] | None:
    found = manifest.locate(files)
    if found.manifest is None:
        if os.path.exists(files.checkpoint) and os.path.getsize(files.checkpoint) == 0:
            raise ResumePointError(f"{files.checkpoint} is corrupted: it is empty")
        return None
    paths = {}
    for name, entry in found.manifest["files"].items():
        path = found.checkpoint
        if name != files.name:
            path = listed(files, name, found.manifest_path)
        if not shards and "/" in name:
            continue
        if not os.path.isfile(path):
            raise ResumePointError(
                f"the resume point {files.checkpoint} is torn: {path}, which its manifest "
                f"lists, is missing. {_way_out(files)}"
            )
        if os.path.getsize(path) != entry["size"]:
            raise _explain(files, found, name, path)
        paths[name] = path
    for (name, path), digest in zip(paths.items(), side_by_side(sha256_of, paths.values())):
        if digest != found.manifest["files"][name]["sha256"]:
            raise _explain(files, found, name, path)
    return found.manifest


def listed(files: PointFiles, name: str, where: str) -> str:
    """The path of a file that a point's manifest names; refused when it is no file of the point."""
    if name.startswith(f"{files.tag}.dcp/"):
        _, generation, file = (*name.split("/"), "", "")[:3]
        plain = name == files.shard_name(generation, file) and generation.isalnum()
        if plain and (file == INDEX or SHARD_FILE.fullmatch(file)):
            return os.path.join(files.shards(generation), file)
    if os.path.basename(name) != name or not name.startswith(f"{files.name}.opt."):
        raise ResumePointError(
            f"{where} is corrupted: it lists {name!r}, which is no file of this point"
        )
    return os.path.join(files.folder, name)


def _explain(files: PointFiles, found: manifest.Located, name: str, path: str) -> ResumePointError:
    """Which of the three things is wrong with a file that differs from its digest."""
    from nnx.store.data import load_data

    assert found.manifest is not None
    wanted = found.manifest["checkpoint_id"] if name == files.name else None
    value: Any = None
    try:
        if "/" in name:  # sharded tensors
            raise ResumePointError(path)
        value = load_data(path)
    except ResumePointError:
        value = None
    if wanted is not None and codec.is_checkpoint(value) and value["checkpoint_id"] != wanted:
        return ResumePointError(
            f"the resume point {files.checkpoint} is torn: its manifest names another "
            f"checkpoint ({wanted}). {_way_out(files)}"
        )
    generation = found.manifest["training_state_id"]
    if wanted is None and codec.is_training_state(value) and value["generation"] != generation:
        return ResumePointError(
            f"the resume point {files.checkpoint} is mixed: {path} is of generation "
            f"{value['generation']}, the checkpoint of {generation}. {_way_out(files)}"
        )
    return ResumePointError(
        f"the resume point {files.checkpoint} is corrupted: the SHA-256 of {path} does not "
        f"match its manifest. {_way_out(files)}"
    )


def _way_out(files: PointFiles) -> str:
    return "Resume from another checkpoint of the run, or restore its files from a backup."


def _load(
    files: PointFiles,
    map_location: Any,
    *,
    with_state: bool,
    whole: bool = True,
    mapped: bool = False,
) -> tuple[NNCheckpoint | None, dict[str, Any] | None]:
    from nnx.store.data import load_data

    found = manifest.locate(files)
    if not os.path.exists(found.checkpoint):
        if found.manifest is None:
            return None, None
        raise ResumePointError(
            f"the resume point {files.checkpoint} is torn: the checkpoint is missing"
        )
    if os.path.getsize(found.checkpoint) == 0:
        raise ResumePointError(f"{found.checkpoint} is corrupted: it is empty")
    sharded = None if found.manifest is None else shards_of(files, found.manifest)
    checkpoint: NNCheckpoint | None
    if sharded is not None and not whole:
        value = load_data(found.checkpoint, map_location)
        checkpoint = NNCheckpoint(**codec.fields_of(value, found.checkpoint))
    else:
        checkpoint = read_checkpoint(found.checkpoint, map_location, mapped=mapped)
    if checkpoint is None:
        raise ResumePointError(f"{found.checkpoint} is not a checkpoint of NNx")
    if not with_state:
        return checkpoint, None
    if checkpoint.training_state_id is None:
        return checkpoint, _legacy_state(files, checkpoint, map_location)
    path = files.sidecar(_generation(checkpoint.training_state_id, found.checkpoint))
    state = _load_state(files, path, checkpoint, map_location, mapped=mapped)
    if sharded is not None and whole:
        from nnx.store.dcp import resolve

        state = resolve(state, sharded, map_location)
    return checkpoint, names.training_state(checkpoint.net_params, state)


def _load_state(
    files: PointFiles, path: str, checkpoint: NNCheckpoint, map_location: Any, *, mapped: bool
) -> dict[str, Any]:
    """The training state in the sidecar at ``path``, which must be the checkpoint's own."""
    from nnx.store.data import load_data

    if not os.path.exists(path):
        raise ResumePointError(
            f"the resume point {files.checkpoint} is torn: its training state {path} is "
            f"missing. {_way_out(files)}"
        )
    state: dict[str, Any] = load_data(path, map_location, mapped=mapped)
    if not codec.is_training_state(state):
        raise ResumePointError(f"{path} is corrupted: it is not a training state")
    _check_version(state, path)
    if state["generation"] != checkpoint.training_state_id:
        raise ResumePointError(
            f"the resume point {files.checkpoint} is mixed: {path} is of generation "
            f"{state['generation']}. {_way_out(files)}"
        )
    return state


def _check_version(state: Mapping[str, Any], path: str) -> None:
    if state.get("version") != codec.STATE_VERSION:
        raise ResumePointError(
            f"{path} is a training state of version {state.get('version')!r}; this NNx reads "
            f"version {codec.STATE_VERSION}. Resume with the NNx that wrote it, or with "
            'resume_mode="weights_only"'
        )


def _generation(state_id: str, path: str) -> str:
    if not isinstance(state_id, str) or not state_id.isalnum():
        raise ResumePointError(f"{path} is corrupted: it names the generation {state_id!r}")
    return state_id


def _legacy_state(
    files: PointFiles, checkpoint: NNCheckpoint, map_location: Any
) -> dict[str, Any] | None:
    """The fixed sidecar of a checkpoint that names no generation."""
    from nnx.store.data import load_data

    if checkpoint.training_state_present is False or not os.path.exists(files.compat_sidecar):
        return None
    value = load_data(files.compat_sidecar, map_location)
    if not isinstance(value, dict):
        raise ResumePointError(f"{files.compat_sidecar} is corrupted: it is not a training state")
    if codec.is_training_state(value):
        _check_version(value, files.compat_sidecar)
    if names.is_original_state(value):
        value = names.from_original_state(value)
    elif "optimizer_state" not in value:
        value = {"optimizer_state": value}
    return names.training_state(checkpoint.net_params, value)
