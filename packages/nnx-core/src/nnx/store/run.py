"""A run: its configuration, what it recorded, and where it was run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nnx.enums import Checkpoints
from nnx.params import (
    NNCheckpointTransform,
    NNModelParams,
    NNParams,
    NNTrainerParams,
    NNTrainParams,
    run_state,
)
from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.store import display, election, idps_csv, lease, providers
from nnx.store.errors import RunBusyError
from nnx.store.history_of import has_journal, read_history
from nnx.store.metadata import change_labels, labels, labels_of, read_metadata, told
from nnx.store.paths import RunPaths, check_run_id, reading_root, run_names, runs_root, settled
from nnx.store.pointer import locate_run
from nnx.utils import validation as check
from nnx.utils.caller import warn_caller
from nnx.utils.folders import make_folder
from nnx.utils.locks import locked
from nnx.utils.yamlio import read_yaml, write_yaml

# NNRun has a method of the name of the built-in.
Records = list[NNIterationDataPoint]

if TYPE_CHECKING:
    from nnx.compilation import CompileRecord
    from nnx.precision import ResolvedPrecision
    from nnx.provenance import ProvenanceRecord
    from nnx.store.checkpoint import NNCheckpoint
    from nnx.store.listing import RunRow

    Runs = list["NNRun"]
    Rows = list[RunRow]
    Phases = list[NNCheckpoint | None]

_PHASES = ("FIRST", "Q1", "Q2", "Q3", "LAST")


@dataclass(frozen=True, slots=True, kw_only=True)
class NNRun:
    """One training run.

    ``net``, ``model``, ``train``, ``trainer``, ``salt`` and ``transforms`` are
    its configuration, whose digest is the run's ``id``. The rest is what
    happened: the records (``idps``; with a journal, its last ones, and
    ``history`` names its directory), how it resumed, and under which precision,
    compilation and provenance it ran; whether it ``finished`` (its plan, or by a stop of
    its own); its ``name`` and ``tags``. None of that is part of the id.
    """

    net: NNParams | None
    train: NNTrainParams
    model: NNModelParams
    trainer: NNTrainerParams | None = None
    salt: str | None = None
    transforms: tuple[NNCheckpointTransform, ...] = ()
    idps: Records | None = field(default=None, repr=False)
    resume_status: ResumeStatus | None = None
    provenance: ProvenanceRecord | None = None
    history: str | None = None
    precision: ResolvedPrecision | None = None
    compile: CompileRecord | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    finished: bool = False
    # The id that run.yaml gives this configuration, where an earlier form made another.
    _stored_id: tuple[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.salt is not None:
            check.text("NNRun", "salt", self.salt)  # a stored run's id is what it is
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.name is not None:
            object.__setattr__(self, "name", check.name("NNRun", "name", self.name))
        object.__setattr__(self, "tags", check.tags("NNRun", "tags", self.tags))

    @property
    def id(self) -> str:
        """The name of the run's directory: the MD5 of the configuration.

        A run that was written in an earlier form keeps the id that it has on disk.
        """
        return str(self.state()["id"])

    def state(self) -> dict[str, Any]:
        """The configuration as plain data, with the id: the content of ``run.yaml``."""
        state = run_state(
            net=self.net,
            model=self.model,
            train=self.train,
            trainer=self.trainer,
            salt=self.salt,
            transforms=self.transforms,
        )
        if self._stored_id is not None and state["id"] == self._stored_id[0]:
            state["id"] = self._stored_id[1]
        return state

    # On disk. ``root`` is the runs folder, ``./runs`` by default.

    def save(self, root: str | None = None, *, update_best: bool = True) -> NNRun:
        """Write ``run.yaml``, ``metadata.yaml`` and, without a journal, ``idps.csv``.

        Each file is replaced atomically. Afterwards the run may claim
        ``runs/best`` if its BEST checkpoint is there. Refuses a run that
        another process is training. In a callback of the run's own fit the history is
        left to the fit, which commits it.
        """
        paths = RunPaths.of(self.id, root)
        if self.history is not None and not _same_path(self.history, paths.history):
            raise ValueError(
                f"run {self.id} keeps its history in {self.history}; saved under {paths.root} "
                f"the copy would have none. Export it with nnx.history.export_history_csv."
            )
        paths.refuse_link()
        with lease.lease(paths, again=True):
            make_folder(paths.dir)
            with locked(paths.lock, timeout=120, what=f"run {paths.id}", error=RunBusyError):
                write_config(self, paths)
                kept = lease.is_fitted_here(paths) or has_journal(paths) or self.history is not None
                if self.idps is not None and not kept:
                    idps_csv.write(paths.idps_csv, self.idps)
                if update_best:
                    election.consider(paths)
        return self

    @staticmethod
    def load(id: str, root: str | None = None) -> NNRun:
        """Read a run with its committed history, by its id or the beginning of it.

        ``"best"`` follows the pointer. A beginning of several ids is a ``ValueError``.
        ``root`` is the runs folder, the folder that holds it as ``runs``, or the run's own.
        Loads no torch and no checkpoint. History newer than LAST was never
        committed and is left out; an empty or damaged LAST is refused.
        """
        return settled(lambda: locate_run(id, root), _load)

    @staticmethod
    def all(root: str | None = None) -> Runs:
        """Every run of a runs folder (or of the ``runs`` in it), sorted by id.

        ``[]`` when there is no such folder.

        A run that cannot be read is left out with a warning.
        """
        runs = []
        folder = reading_root(root)
        for name in run_names(folder):
            try:
                runs += settled(partial(RunPaths.seen, folder, name), _read_if_any)
            except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
                where = os.path.join(folder, name)
                warn_caller(f"{where} is left out: {error}", RuntimeWarning)
        return runs

    @staticmethod
    def list(where: str | None = None, *, sort: str = "time", root: str | None = None) -> Rows:
        """A row about every run, or those that ``where`` describes; reads no history.

        ``where`` compares what a run was told and what became of it, as in
        ``"accuracy > 0.9 and optimizer == 'adamw' and 'baseline' in tags"``: see
        :func:`nnx.store.queries.facts` for the names. ``sort`` is "time" (the newest
        first), "best" or "id".
        """
        from nnx.store.queries import select

        return [row for row, _ in select(where, sort=sort, root=root)]

    @staticmethod
    def find(where: str | None = None, *, sort: str = "time", root: str | None = None) -> Runs:
        """The runs that ``where`` describes, loaded; as :meth:`list` chooses and sorts them."""
        from nnx.store.queries import select

        return [NNRun.load(row.id, root) for row, _ in select(where, sort=sort, root=root)]

    def label(
        self,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        root: str | None = None,
    ) -> NNRun:
        """Give a run that is on disk another ``name`` or other ``tags``; the run with them.

        What is ``None`` stays as it is; ``""`` takes the name away. The environment that
        the run's metadata tell of stays. Refuses a run that is being trained.
        """
        kept = self.name if name is None else name or None
        changed = replace(self, name=kept, tags=self.tags if tags is None else check.tags(
            "NNRun.label()", "tags", tags
        ))  # fmt: skip
        paths = locate_run(self.id, root)
        if not os.path.isfile(paths.run_yaml):
            raise FileNotFoundError(f"there is no run {self.id!r} in {paths.root} to label")
        with lease.lease(paths), locked(paths.lock, timeout=120, what=f"run {paths.id}"):
            change_labels(paths, changed.name, changed.tags)
        return changed

    def checkpoints(self, root: str | None = None) -> Phases:
        """The phase checkpoints FIRST, Q1, Q2, Q3, LAST; ``None`` where one was not written.

        BEST repeats one of them; read it with ``NNCheckpoint.load``.
        """
        from nnx.store.checkpoint import NNCheckpoint

        return [NNCheckpoint.load(self.id, Checkpoints[name], root) for name in _PHASES]

    def ensure_writable(self, root: str | None = None, *, overwrite: bool = False) -> None:
        """Refuse, before anything is touched, a run that cannot be trained here.

        ``FileExistsError`` for an existing one without ``overwrite``,
        ``RunBusyError`` for one being trained, ``PermissionError`` for a folder
        that cannot be written.
        """
        lease.ensure_writable(RunPaths.of(self.id, root), overwrite=overwrite)

    @contextlib.contextmanager
    def writable_lease(self, root: str | None = None, *, overwrite: bool = False) -> Iterator[None]:
        """Be the only writer of this run, its directory reserved, for the block."""
        with lease.writable_lease(RunPaths.of(self.id, root), overwrite=overwrite):
            yield

    def display_path(self, root: str | None = None) -> str:
        """``runs/<id>`` from the working directory, with forward slashes.

        Of a folder elsewhere, only the last name: no absolute prefix is shown.
        """
        folder = runs_root(root)
        if os.path.isabs(folder):
            inside = os.path.relpath(folder)
            folder = os.path.basename(folder) if inside.startswith(os.pardir) else inside
        return f"{folder}/{self.id}".replace(os.sep, "/")

    # Copies

    def with_idps(self, value: Records) -> NNRun:
        return replace(self, idps=value)

    def with_history(self, value: str | None) -> NNRun:
        return replace(self, history=value)

    def with_resume_status(self, value: ResumeStatus | None) -> NNRun:
        return replace(self, resume_status=value)

    def with_provenance(self, value: ProvenanceRecord | None) -> NNRun:
        return replace(self, provenance=value)

    def with_precision(self, value: ResolvedPrecision | None) -> NNRun:
        return replace(self, precision=value)

    def with_compile(self, value: CompileRecord | None) -> NNRun:
        return replace(self, compile=value)

    # To look at

    def __str__(self) -> str:
        return display.as_text(self)

    def _repr_html_(self) -> str:
        return display.as_html(self)


def write_config(run: NNRun, paths: RunPaths) -> None:
    """Write ``run.yaml`` and ``metadata.yaml``; the caller holds the run's lock."""
    write_yaml(paths.run_yaml, run.state())
    write_metadata(run, paths)


def write_metadata(run: NNRun, paths: RunPaths) -> None:
    """Where and how the run ran: the environment, never part of its id."""
    from nnx.seeding import env_snapshot

    metadata = dict(env_snapshot())
    for key, value in (("precision", run.precision), ("compile", run.compile)):
        if value is not None:
            metadata[key] = value.record()
    if run.resume_status is not None:
        metadata["resume"] = run.resume_status.state()
    provided = providers.record(run.state())
    if provided:
        metadata[providers.KEY] = provided
    if run.finished:
        metadata["finished"] = True
    write_yaml(paths.metadata, {**metadata, **labels_of(run.name, run.tags)})


def from_state(state: Mapping[str, Any]) -> NNRun:
    """A run without history from its :meth:`NNRun.state`, whose id it keeps."""
    net, trainer = state.get("net"), state.get("trainer")
    run = NNRun(
        net=None if net is None else NNParams.resolve_from_state(net),
        model=NNModelParams.from_state(state["model"]),
        train=NNTrainParams.from_state(state["train"]),
        trainer=None if trainer is None else NNTrainerParams.from_state(trainer),
        salt=state.get("salt"),
        transforms=tuple(
            NNCheckpointTransform.from_state(t) for t in state.get("transforms") or ()
        ),
    )
    id, stored = run.id, state.get("id")
    if stored is None or stored == id:
        return run
    return replace(run, _stored_id=(id, check_run_id(stored)))


def from_file(paths: RunPaths) -> NNRun:
    """A run without history from its ``run.yaml``; ``ValueError`` says what is wrong with it."""
    state = read_yaml(paths.run_yaml)
    try:
        return from_state(state)
    except KeyError as error:
        reason = f"it has no {error.args[0]!r}" if error.args else repr(error)
    except (TypeError, AttributeError, ValueError) as error:
        reason = str(error)
    raise ValueError(f"{paths.run_yaml} is not a run's configuration: {reason}")


def _load(paths: RunPaths) -> NNRun:
    if os.path.isdir(paths.dir) and not os.path.isfile(paths.run_yaml):
        raise FileNotFoundError(f"{paths.dir} is no run that can be read: it has no run.yaml")
    if not os.path.isfile(paths.run_yaml):
        raise FileNotFoundError(
            f"there is no run {paths.id!r} in {paths.root}{_nearby(paths.root, paths.id)}"
        )
    return _read(paths)


def _read_if_any(paths: RunPaths) -> list[NNRun]:
    return [_read(paths)] if os.path.isfile(paths.run_yaml) else []


def _read(paths: RunPaths) -> NNRun:
    run = from_file(paths)
    metadata = read_metadata(paths)
    providers.remember(paths.id, metadata)
    return replace(
        run,
        idps=read_history(paths),
        history=os.path.abspath(paths.history) if has_journal(paths) else None,
        resume_status=told(paths, metadata, "resume", ResumeStatus.from_state),
        provenance=_provenance(paths),
        precision=told(paths, metadata, "precision", _precision),
        compile=told(paths, metadata, "compile", _compile),
        finished=metadata.get("finished") is True,
        **labels(metadata),
    )


def _precision(record: Mapping[str, Any]) -> ResolvedPrecision:
    from nnx.precision import ResolvedPrecision

    return ResolvedPrecision.from_record(record)


def _compile(record: Mapping[str, Any]) -> CompileRecord:
    from nnx.compilation import CompileRecord

    return CompileRecord.from_record(record)


def _provenance(paths: RunPaths) -> ProvenanceRecord | None:
    if not os.path.exists(os.path.join(paths.dir, "provenance.json")):
        return None
    from nnx.provenance import load_provenance

    return load_provenance(paths.id, paths.root)


def _same_path(left: str, right: str) -> bool:
    return os.path.realpath(left) == os.path.realpath(right)


def _nearby(root: str, wanted: str) -> str:
    """A hint at ids that begin or look alike."""
    from difflib import get_close_matches

    names = run_names(root)
    close = [n for n in names if n.startswith(wanted)][:3] or get_close_matches(wanted, names, n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
