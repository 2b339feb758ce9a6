"""Where everything of a run is, and which names are allowed there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from nnx.utils.validation import WrongTypeError

_T = TypeVar("_T")
_LOOKS = 10
BEST_POINTER = "best"
STEP = "step"  # the tag of the point inside an epoch
LAST = "last"
MARKER = ".history-committed-by-last"
REPLACED = ".replaced-"  # before the id: where a run waits while another takes its place

# Windows refuses these in any name; a run folder should move between systems.
_FORBIDDEN = re.compile(r'[/\\:*?"<>|\x00-\x1f]')
_DEVICE = re.compile(r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?", re.IGNORECASE)


def runs_root(root: str | os.PathLike[str] | None = None) -> str:
    """The folder that holds the runs: ``root``, by default ``$NNX_RUNS`` or ``./runs``."""
    return os.environ.get("NNX_RUNS") or "runs" if root is None else os.fspath(root)


def reading_root(root: str | os.PathLike[str] | None, name: str | None = None) -> str:
    """The folder that holds the runs, for whoever reads: ``root``, or the ``runs`` in it.

    For a run by its ``name``, also the folder above where ``root`` is the run's own.
    """
    folder = runs_root(root)
    inside = os.path.join(folder, "runs")
    if name is not None:
        above, own = os.path.split(os.path.abspath(folder))
        places = [folder, inside, *([above] if own == name else [])]
        return next((p for p in places if os.path.lexists(os.path.join(p, name))), folder)
    try:
        names = os.listdir(inside)
    except (FileNotFoundError, NotADirectoryError):
        return folder
    here = any(os.path.isfile(os.path.join(folder, n, "run.yaml")) for n in os.listdir(folder))
    return inside if names and not here else folder


def run_names(root: str) -> list[str]:
    """The run directories under a root, sorted; links, files and hidden names are none."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                {
                    e.name.removeprefix(REPLACED)
                    for e in entries
                    if e.name != BEST_POINTER
                    and (e.name.startswith(REPLACED) or not e.name.startswith("."))
                    and e.is_dir(follow_symlinks=False)
                }
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def check_name(name: object, what: str) -> str:
    """``name`` if it is one plain path component; ``ValueError`` says why not."""
    if not isinstance(name, str):
        raise WrongTypeError(f"{what} must be a string, not {type(name).__name__}")
    if not name or name.startswith(".") or name != name.strip() or name.endswith("."):
        raise ValueError(f"{what} {name!r} is not a plain name")
    if _FORBIDDEN.search(name):
        raise ValueError(
            f"{what} {name!r} must be one plain name, without path separators or control characters"
        )
    if _DEVICE.fullmatch(name):
        raise ValueError(f"{what} {name!r} is the name of a device on Windows")
    if len(os.fsencode(name)) > 180:
        raise ValueError(f"{what} {name[:40]!r}... is longer than 180 bytes")
    return name


def check_run_id(run_id: object) -> str:
    """A run id that may name a directory; ``best`` is the pointer, not a run."""
    name = check_name(run_id, "the run id")
    if name == BEST_POINTER:
        raise ValueError("'best' is the pointer to the best run, not a run id")
    return name


def tag_name(tag: Enum | str) -> str:
    """The file stem of a checkpoint tag: a ``Checkpoints`` member or a custom stem."""
    name = tag.value if isinstance(tag, Enum) else tag
    checked = check_name(name, "the checkpoint tag")
    if ".pt" in checked:
        raise ValueError(f"the checkpoint tag {name!r} must not contain '.pt'")
    return checked


@dataclass(frozen=True)
class RunPaths:
    """The files of one run under one runs root, in ``folder`` instead of one named ``id``."""

    root: str
    id: str
    folder: str | None = None

    @classmethod
    def of(cls, run_id: object, root: str | os.PathLike[str] | None = None) -> RunPaths:
        """Paths of a run to write or read; the id is checked, nothing is touched."""
        return cls(runs_root(root), check_run_id(run_id))

    @classmethod
    def seen(cls, root: str, name: str) -> RunPaths:
        """The run that readers find under a name: one that is being replaced stays, until the
        first commit of what replaces it."""
        paths = cls(root, name)
        if os.path.lexists(paths.replaced) and not paths.has_point():
            return cls(root, name, os.path.basename(paths.replaced))
        return paths

    @cached_property
    def dir(self) -> str:
        return os.path.join(self.root, self.folder or self.id)

    @cached_property
    def replaced(self) -> str:
        return os.path.join(self.root, f"{REPLACED}{self.id}")

    @cached_property
    def run_yaml(self) -> str:
        return os.path.join(self.dir, "run.yaml")

    @cached_property
    def metadata(self) -> str:
        return os.path.join(self.dir, "metadata.yaml")

    @cached_property
    def idps_csv(self) -> str:
        return os.path.join(self.dir, "idps.csv")

    @cached_property
    def history(self) -> str:
        return os.path.join(self.dir, "history")

    @cached_property
    def marker(self) -> str:
        return os.path.join(self.dir, MARKER)

    @cached_property
    def lock(self) -> str:
        return os.path.join(self.dir, ".run.lock")

    @cached_property
    def checkpoints(self) -> str:
        return os.path.join(self.dir, "checkpoints")

    @cached_property
    def lease(self) -> str:
        return os.path.join(self.root, ".leases", f"{self.id}.lock")

    @cached_property
    def admission(self) -> str:
        return os.path.join(self.root, ".admission.lock")

    @cached_property
    def best(self) -> str:
        return os.path.join(self.root, BEST_POINTER)

    @cached_property
    def best_lock(self) -> str:
        return os.path.join(self.root, ".best.lock")

    def checkpoint(self, tag: Enum | str) -> str:
        return os.path.join(self.checkpoints, f"{tag_name(tag)}.pt")

    def refuse_link(self) -> None:
        """Refuse to write through a symbolic link in place of the run's directory."""
        for folder in (self.dir, self.checkpoints):
            if os.path.islink(folder):
                raise FileExistsError(f"{folder} is in the way: it is a symbolic link, not a run")

    def has_point(self) -> bool:
        """Whether a fit has committed anything: an epoch, or a point inside one."""
        points = (PointFiles(self.checkpoints, tag).checkpoint for tag in (LAST, STEP))
        return any(map(os.path.lexists, points))

    def exists(self) -> bool:
        """Whether anything of the run is there, beyond an empty reservation."""
        return not os.path.islink(self.dir) and any(
            os.path.exists(path)
            for path in (self.run_yaml, self.idps_csv, self.history, self.checkpoints)
        )


@dataclass(frozen=True)
class PointFiles:
    """The files of one resume point."""

    folder: str
    tag: str

    @cached_property
    def name(self) -> str:
        return f"{self.tag}.pt"

    @cached_property
    def checkpoint(self) -> str:
        return os.path.join(self.folder, self.name)

    @cached_property
    def staged(self) -> str:
        return f"{self.checkpoint}.staged"

    @cached_property
    def manifest(self) -> str:
        return f"{self.checkpoint}.manifest.json"

    @cached_property
    def staged_manifest(self) -> str:
        return f"{self.manifest}.staged"

    @cached_property
    def lock(self) -> str:
        return f"{self.checkpoint}.lock"

    @cached_property
    def compat_sidecar(self) -> str:
        return f"{self.checkpoint}.opt.pt"

    def sidecar(self, generation: str) -> str:
        return f"{self.checkpoint}.opt.{generation}.pt"

    @cached_property
    def shards_folder(self) -> str:
        return os.path.join(self.folder, f"{self.tag}.dcp")

    def shards(self, generation: str) -> str:
        """Where the sharded tensors of a generation are."""
        return os.path.join(self.shards_folder, generation)

    def shard_name(self, generation: str, name: str) -> str:
        """How a manifest calls a file of sharded tensors."""
        return f"{self.tag}.dcp/{generation}/{name}"

    def names_shards(self, manifest: Mapping[str, Any], path: str) -> bool:
        """Whether a manifest lists files of the generation at ``path``."""
        prefix = self.shard_name(os.path.basename(path), "")
        return any(name.startswith(prefix) for name in manifest["files"])

    def shard_generations(self) -> list[str]:
        """The folders of sharded tensors that are there."""
        try:
            names = os.listdir(self.shards_folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(os.path.join(self.shards_folder, n) for n in names)

    def sidecars(self) -> list[str]:
        """The generation-addressed sidecars that are there."""
        prefix = f"{self.name}.opt."
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [
            os.path.join(self.folder, n)
            for n in names
            if n.startswith(prefix) and n.endswith(".pt") and n != f"{self.name}.opt.pt"
        ]


def settled(find: Callable[[], RunPaths], look: Callable[[RunPaths], _T]) -> _T:
    """What ``look`` makes of a run; again where the run was replaced while it looked.

    ``find`` says where the run is now.
    """
    for left in reversed(range(_LOOKS)):
        paths = find()
        before = folder_of(paths)
        try:
            found = look(paths)
        except (OSError, ValueError):
            if not left or folder_of(find()) == before:
                raise
        else:
            if not left or folder_of(find()) == before:
                return found
    raise AssertionError


def folder_of(paths: RunPaths) -> tuple[str, int, int] | None:
    """Which folder a run has, whatever it is called; another one after the run was replaced."""
    try:
        info = os.stat(paths.dir)
    except OSError:
        return None
    return paths.dir, info.st_dev, info.st_ino
