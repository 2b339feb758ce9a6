"""The writing side of one fit: lease, history, and the epoch transaction."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from nnx.records import NNIterationDataPoint
from nnx.store import election, inherited, lease, listing, manifest, shards, standing
from nnx.store.commit import Commit, Current, remove_point
from nnx.store.errors import ResumePointError, RunBusyError
from nnx.store.idps_csv import TableWriter
from nnx.store.paths import LAST, STEP, PointFiles, RunPaths, tag_name
from nnx.store.points import ResumePoint
from nnx.store.run import NNRun, write_config, write_metadata
from nnx.store.standing import BEST
from nnx.utils import files as fs
from nnx.utils.caller import warn_caller
from nnx.utils.flushing import Flushes
from nnx.utils.folders import make_folder
from nnx.utils.locks import locked

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.provenance import ExperimentManifest
    from nnx.store.checkpoint import NNCheckpoint
    from nnx.store.inherited import InheritedBest
    from nnx.store.shards import Shards


@dataclass(frozen=True, slots=True)
class Committed:
    """One committed epoch: LAST's ordinal and id, and the epoch."""

    generation: int
    checkpoint_id: str
    epoch: int


class HistoryWriter(Protocol):
    """Where records go: a table or a journal."""

    @property
    def view(self) -> Sequence[NNIterationDataPoint]: ...
    def add(self, record: NNIterationDataPoint) -> None: ...
    def replace_last(self, record: NNIterationDataPoint) -> None: ...
    def discard(self) -> None: ...
    def abandon(self) -> None: ...
    def commit(self, flushes: Flushes) -> None: ...
    def rollback(self) -> None: ...
    def everything(self) -> Sequence[NNIterationDataPoint]: ...


class RunWriter:
    """Writes one run while it trains; use :meth:`open`.

    An epoch is committed in the order history, LAST, phase tags and BEST,
    ``runs/best``, callback checkpoints. LAST decides: until it is published the
    epoch never happened, afterwards it stays whatever fails.
    """

    def __init__(
        self,
        run: NNRun,
        paths: RunPaths,
        journal: HistoryJournal | None,
        provenance: ExperimentManifest | None,
        parent: Mapping[str, Any] | None,
        best: InheritedBest | None = None,
    ) -> None:
        from nnx.provenance.attempts import AttemptRecorder

        self.run = run
        self.paths = paths
        self._best: NNIterationDataPoint | None = None if best is None else best.record
        self._inherited = best
        self.attempts = AttemptRecorder(paths.dir, paths.id, provenance, parent)
        self._journal = journal
        self._history: HistoryWriter
        if journal is None:
            self._history = TableWriter(paths.idps_csv)
        else:
            from nnx.history.writing import JournalWriter

            self._history = JournalWriter(paths.history, journal)
        self._about = listing.about(run.state(), val_loader=run.train.val_loader)
        if best is not None:
            self._about["grounds"] |= best.grounds  # with the data that the source names
        self._generations: dict[str, Current] = {}
        self._step_written = False
        self._begun = False
        self._replaces = os.path.lexists(paths.replaced)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        run: NNRun,
        root: str | None = None,
        *,
        history: HistoryJournal | None = None,
        overwrite: bool = False,
        provenance: ExperimentManifest | None = None,
        parent: ResumePoint | Mapping[str, Any] | None = None,
        best: InheritedBest | None = None,
    ) -> Iterator[RunWriter]:
        """Hold the run for one fit.

        Refuses an existing run (``FileExistsError``) unless ``overwrite``, and
        one that is being trained (``RunBusyError``). The directory is released
        again when the fit ends before it wrote a run file. ``parent`` is the
        point this fit resumes, for its attempt to link, ``best`` the BEST checkpoint
        that it begins with.
        """
        paths = RunPaths.of(run.id, root)
        from nnx.provenance.records import parent_link

        link = parent_link(parent, root) if isinstance(parent, ResumePoint) else parent
        with lease.writable_lease(paths, overwrite=overwrite, until_commit=True):
            writer = cls(run, paths, history, provenance, link, best)
            try:
                writer.attempts.start()
                yield writer
            except BaseException as error:
                if writer._begun:
                    writer.attempts.fail(error, writer._compile_record())
                else:
                    writer.attempts.remove()
                    writer._history.abandon()
                raise

    # Records

    @property
    def idps(self) -> Sequence[NNIterationDataPoint]:
        """The records so far: the running list, or the journal's read-only window."""
        return self._history.view

    def append(self, record: NNIterationDataPoint) -> None:
        """Record one batch of the epoch that is running."""
        self._history.add(record)

    def extend(self, records: Iterable[NNIterationDataPoint]) -> None:
        for record in records:
            self._history.add(record)

    def replace_last(self, record: NNIterationDataPoint) -> None:
        """Complete the epoch's last record before it is committed."""
        self._history.replace_last(record)

    def discard_epoch(self) -> None:
        """Forget the records since the last commit, of an epoch that stops inside."""
        self._history.discard()

    @contextlib.contextmanager
    def full_history(self) -> Iterator[Sequence[NNIterationDataPoint]]:
        """Every record so far, read back from a journal for the block."""
        yield self._history.everything()

    # Commits

    def commit_epoch(
        self,
        checkpoint: NNCheckpoint,
        training_state: Mapping[str, Any] | None,
        *,
        phases: Iterable[Enum | str] = (),
        best: bool = False,
        deferred: Mapping[str, NNCheckpoint] | None = None,
        sharded: Shards | None = None,
    ) -> Committed:
        """Commit the records since the last commit with the state after them.

        ``phases`` and BEST share LAST's files. ``deferred`` maps stems to
        checkpoints that are written as weights alone, after everything else; one with
        the stem "best" is the BEST of an epoch that improved, and nothing otherwise.
        ``sharded`` are the files, from :meth:`shard_folder`, of the tensors that
        all these checkpoints refer to. Raises what failed; when that was before
        LAST was published, the history is rolled back and the previous epoch stays
        the last.
        """
        self._begin()
        deferred = dict(deferred or {})
        other_best = deferred.pop(BEST, None)
        tags = [LAST, *dict.fromkeys(tag_name(tag) for tag in phases)]
        if best and other_best is None:
            tags.append(BEST)
        flushes = Flushes()
        commit = self._point(checkpoint, training_state, tags, flushes, sharded, improved=best)
        try:
            self._history.commit(flushes)
            with commit:
                for tag in tags:
                    commit.publish(tag)
                    if tag == LAST:
                        self._note(commit, checkpoint)
        except BaseException:
            flushes.settle()
            if LAST not in commit.published:
                with contextlib.suppress(OSError):  # readers cut at LAST in any case
                    self._history.rollback()
            raise
        finally:
            if BEST in commit.published:
                self._best = checkpoint.idp
        self._let_go()
        if best and other_best is not None:
            self.commit_tag(BEST, other_best, sharded=sharded)
            self._best = checkpoint.idp
        self._after(best, deferred, sharded)
        return Committed(commit.generation(LAST), commit.checkpoint_id, checkpoint.idp.epoch_idx)

    def refresh_last(
        self,
        checkpoint: NNCheckpoint,
        training_state: Mapping[str, Any] | None,
        *,
        sharded: Shards | None = None,
    ) -> None:
        """Write LAST of the committed epoch again, as it is after training ended.

        A disk that fails here costs no epoch: LAST stays the one that was committed, and
        a warning says so.
        """
        commit = self._point(checkpoint, training_state, [LAST], sharded=sharded)
        with _only_warned("LAST as on_train_end left the net"), commit:
            commit.publish(LAST)
            self._note(commit, checkpoint)
        if sharded is not None and LAST not in commit.published:
            self.drop_shards(sharded.folder)

    def shard_folder(self) -> str:
        """A new folder for the sharded tensors of the next point."""
        self._begin()
        files = PointFiles(self.paths.checkpoints, LAST)
        folder = files.shards(uuid.uuid4().hex)
        try:
            make_folder(folder)
            fs.disk.flush_directory(files.shards_folder)
            fs.disk.flush_directory(files.folder)
        except BaseException:
            shards.remove(folder)
            raise
        return folder

    def drop_shards(self, folder: str) -> None:
        """Remove tensors that were written for a point, unless it was published."""
        files = PointFiles(self.paths.checkpoints, LAST)
        try:
            found = manifest.locate(files).manifest
        except ResumePointError:
            return
        if found is None or not files.names_shards(found, folder):
            shards.remove(folder)

    def commit_tag(
        self, stem: str, checkpoint: NNCheckpoint, *, sharded: Shards | None = None
    ) -> None:
        """Write weights that a callback asked for; the epoch that they are of is committed."""
        tag = tag_name(stem)
        with self._point(checkpoint, None, [tag], sharded=sharded) as commit:
            commit.publish(tag)

    def commit_step(self, checkpoint: NNCheckpoint, training_state: Mapping[str, Any]) -> None:
        """Write the point inside the running epoch; it replaces the one before.

        LAST, history and ``runs/best`` stay as they are. The next committed
        epoch removes it.
        """
        self._begin()
        with self._point(checkpoint, training_state, [STEP]) as commit:
            commit.publish(STEP)
        self._step_written = True
        self._let_go()

    def finish(self) -> NNRun:
        """Write what is known at the end; the run to hand to the caller.

        Every epoch is committed: what cannot be written now is a warning.
        """
        self.run = replace(self.run, finished=True)
        with _only_warned("the last of the run's metadata"):
            if self._begun:
                with self._run_lock():
                    write_metadata(self.run, self.paths)
        with _only_warned("that the attempt completed"):
            self.attempts.complete(self._compile_record())
        run = replace(
            self.run,
            idps=list(self._history.view),
            history=None if self._journal is None else os.path.abspath(self.paths.history),
        )
        if self.attempts.manifest is not None:
            from nnx.provenance import ProvenanceRecord

            record = ProvenanceRecord(
                manifest=self.attempts.manifest,
                fingerprint=self.attempts.manifest.fingerprint(),
                attempt=self.attempts.attempt,
            )
            run = run.with_provenance(record)
        self.run = run
        return run

    def _begin(self) -> None:
        """Write the run's own files, once, before the first point of it."""
        if self._begun:
            return
        with self._run_lock():
            write_config(self.run, self.paths)
        if not os.path.isdir(self.paths.checkpoints):
            fs.disk.mkdir(self.paths.checkpoints)
        if self._inherited is not None and not inherited.take_over(
            self._inherited, self.paths, self._about_best(self._best)
        ):
            self._best = None
        fs.disk.flush_directory(self.paths.dir)
        fs.disk.flush_directory(self.paths.root)
        self._begun = True

    def _point(
        self,
        checkpoint: NNCheckpoint,
        state: Mapping[str, Any] | None,
        tags: Sequence[str],
        flushes: Flushes | None = None,
        sharded: Shards | None = None,
        *,
        improved: bool = False,
    ) -> Commit:
        improved = improved or BEST in tags
        return Commit(
            self.paths.checkpoints,
            checkpoint,
            state,
            tags=tags,
            generations=self._generations,
            about=self._about_best(checkpoint.idp if improved else self._best),
            flushes=flushes,
            sharded=sharded,
        )

    def _about_best(self, best: NNIterationDataPoint | None) -> dict[str, Any]:
        """What the manifests say of the run, with its best epoch."""
        if best is None:
            return {**self._about, "best": math.inf, "best_epoch": None}
        return {**self._about, "best": standing.shown(best), "best_epoch": best.epoch_idx}

    def _note(self, commit: Commit, checkpoint: NNCheckpoint) -> None:
        epoch = checkpoint.idp.epoch_idx
        self.attempts.committed(LAST, epoch, commit.generation(LAST))

    def _after(
        self, best: bool, deferred: Mapping[str, NNCheckpoint], sharded: Shards | None
    ) -> None:
        if best and self._best is not None:
            known = self._about["grounds"]
            election.claim(self.paths, standing.of_record(self._best, known))
        for stem, checkpoint in deferred.items():
            self.commit_tag(stem, checkpoint, sharded=sharded)
        if self._step_written:
            self._drop_step()

    def _let_go(self) -> None:
        """Remove the run that this one replaces; whoever comes next does it otherwise."""
        if self._replaces:
            self._replaces = False
            with contextlib.suppress(OSError):
                lease.end_replacement(self.paths)

    def _drop_step(self) -> None:
        files = PointFiles(self.paths.checkpoints, STEP)
        with locked(files.lock):
            remove_point(files)
        self._generations.pop(STEP, None)
        self._step_written = False

    def _run_lock(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.paths.lock, timeout=120, what=f"run {self.paths.id}")

    def _compile_record(self) -> dict[str, Any] | None:
        return None if self.run.compile is None else self.run.compile.record()


@contextlib.contextmanager
def _only_warned(what: str) -> Iterator[None]:
    """Make a disk that fails after the last commit a warning, so that the run is returned."""
    try:
        yield
    except (OSError, RunBusyError) as error:
        warn_caller(
            f"the training is finished and committed, but {what} could not be written: {error}",
            RuntimeWarning,
        )
