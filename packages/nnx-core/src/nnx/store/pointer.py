"""Which run is meant: by an id, by the beginning of one, or by the pointer ``runs/best``."""

from __future__ import annotations

import contextlib
import os
import shlex

from nnx.store.paths import (
    BEST_POINTER,
    RunPaths,
    check_name,
    check_run_id,
    reading_root,
    run_names,
)
from nnx.utils import files as fs

POINTER_FILE = "POINTER.txt"


def locate_run(run_id: object, root: str | os.PathLike[str] | None = None) -> RunPaths:
    """The paths of a run to read; ``"best"`` follows the pointer to the best run.

    The beginning of one run's id is enough; ``ValueError`` names the candidates when it is
    that of several. ``root`` is the runs folder, the folder that holds it as ``runs``, or the run's own.
    """
    if run_id == BEST_POINTER:
        found = best_run_id(root)
        if found is None:
            raise FileNotFoundError(
                f"there is no best run in {reading_root(root)}: no run has a committed "
                f"BEST checkpoint that can be compared"
            )
        run_id = found
    name = check_run_id(run_id)
    paths = RunPaths.seen(reading_root(root, name), name)
    if os.path.lexists(paths.dir):
        return paths
    return RunPaths.seen(paths.root, _begins(name, _readable(paths.root)) or name)


def resolve_run_id(text: str, root: str | os.PathLike[str] | None = None) -> str:
    """The run that an id, a unique beginning of one, or ``best`` names.

    ``FileNotFoundError`` when there is none, ``ValueError`` when the beginning
    is ambiguous; both say what is there.
    """
    if text == BEST_POINTER:
        return locate_run(text, root).id
    check_name(text, "the run id")
    folder = reading_root(root)
    names = _readable(folder)
    found = _begins(text, names)
    if found is not None:
        return found
    _refuse_unfinished(folder, text)
    if not names:
        raise FileNotFoundError(f"there is no run {text!r} in {folder}, nor any other run")
    command = "nnx runs" if folder == "runs" else f"nnx runs --runs {shlex.quote(folder)}"
    raise FileNotFoundError(
        f"there is no run {text!r} in {folder}; `{command}` lists the {len(names)} that are there"
    )


def _readable(folder: str) -> list[str]:
    return [n for n in run_names(folder) if os.path.exists(RunPaths.seen(folder, n).run_yaml)]


def _begins(text: str, names: list[str]) -> str | None:
    """The one name that begins so; ``None`` without one, ``ValueError`` for several."""
    if text in names:
        return text
    found = [name for name in names if name.startswith(text)]
    if len(found) > 1:
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise ValueError(f"{text!r} is the beginning of {len(found)} runs: {shown}")
    return found[0] if found else None


def _refuse_unfinished(folder: str, text: str) -> None:
    """Say so where the name is that of a directory without a ``run.yaml``."""
    for name in run_names(folder):
        if name.startswith(text):
            raise FileNotFoundError(
                f"{RunPaths(folder, name).dir} is no run that can be read: it has no run.yaml"
            )


def best_run_id(root: str | os.PathLike[str] | None = None) -> str | None:
    """The run that the pointer names, if that run is there."""
    folder = reading_root(root)
    pointer = os.path.join(folder, BEST_POINTER)
    try:
        if os.path.islink(pointer):
            target = os.readlink(pointer)
        elif os.path.isdir(pointer):
            with open(os.path.join(pointer, POINTER_FILE), encoding="utf-8") as stream:
                target = stream.read(4096).strip()
        else:
            return None
        name = check_run_id(os.path.basename(target.replace("\\", "/").rstrip("/")))
    except (OSError, ValueError):
        return None
    where = os.path.join(folder, name)
    if os.path.islink(where) or not os.path.isdir(where):
        return None
    beside = target == name  # the pointer as it is written here: it cannot lead elsewhere
    if not beside and os.path.islink(pointer) and not _same(pointer, where):
        return None
    return name


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def point_to(root: str, run_id: str | None) -> None:
    """Make ``runs/best`` name a run, or nothing."""
    if run_id == best_run_id(root) and run_id is not None:
        return
    pointer = os.path.join(root, BEST_POINTER)
    if run_id is None:
        _remove(pointer)
        return
    temporary = fs.temporary_name(pointer)
    try:
        fs.disk.symlink(run_id, temporary)
    except (OSError, NotImplementedError):
        _point_by_file(pointer, os.path.join(root, run_id))
        return
    try:
        if os.path.isdir(pointer) and not os.path.islink(pointer):
            _remove(pointer)
        fs.disk.replace(temporary, pointer)
    except BaseException:
        fs.remove_quietly(temporary)
        raise


def _point_by_file(pointer: str, target: str) -> None:
    """Where symbolic links cannot be made: a directory that holds the path."""
    if os.path.islink(pointer):
        fs.disk.unlink(pointer)
    if not os.path.isdir(pointer):
        fs.disk.mkdir(pointer)
    with fs.atomic_write(os.path.join(pointer, POINTER_FILE)) as stream:
        stream.write(target.replace(os.sep, "/") + "\n")


def _remove(pointer: str) -> None:
    if os.path.islink(pointer):
        fs.disk.unlink(pointer)
    elif os.path.isdir(pointer):
        with contextlib.suppress(FileNotFoundError):
            fs.disk.unlink(os.path.join(pointer, POINTER_FILE))
        fs.disk.rmdir(pointer)
