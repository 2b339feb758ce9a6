"""Writing resume points: one state, written and hashed once, under many tags."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from nnx.store import codec, manifest, shards
from nnx.store.errors import ResumePointError, RunBusyError
from nnx.store.paths import LAST, PointFiles
from nnx.utils import files as fs
from nnx.utils.flushing import Flushes, write_new
from nnx.utils.interrupts import hold_interrupts
from nnx.utils.locks import locked

LOCK_SECONDS = 120.0


class Current(NamedTuple):
    """What a tag holds: its ordinal and the files that the next point replaces."""

    ordinal: int = 0
    sidecar: str | None = None
    shards: str | None = None


class Commit:
    """Stage one state under every tag, then publish it tag by tag.

    Entering writes the files; nothing that is read changes until
    :meth:`publish` renames a tag's checkpoint and manifest into place. Leaving
    removes what was not published. The tags' locks are held throughout.

    ``fields`` is the training state; ``None`` writes weights alone.
    ``generations`` remembers, between the commits of one writer, each tag's
    ordinal and files. ``about`` goes into the manifests, for listings. What
    ``flushes`` holds is on the disk before anything is published. ``sharded`` are the
    files of the tensors that the checkpoint and the state refer to.
    """

    def __init__(
        self,
        folder: str,
        checkpoint: codec.Stored,
        fields: Mapping[str, Any] | None,
        *,
        tags: Sequence[str],
        generations: dict[str, Current] | None = None,
        about: Mapping[str, Any] | None = None,
        flushes: Flushes | None = None,
        sharded: shards.Shards | None = None,
    ) -> None:
        self.checkpoint_id = uuid.uuid4().hex
        self.state_id = None if fields is None else uuid.uuid4().hex
        self.published: list[str] = []
        self._fields = fields
        self._about = about
        self._sharded = sharded
        self._flushes = Flushes() if flushes is None else flushes
        self._checkpoint = checkpoint
        self._points = [PointFiles(folder, tag) for tag in tags]
        self._folder = folder
        self._generations = {} if generations is None else generations
        self._digests: dict[str, dict[str, Any]] = {}
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> Commit:
        try:
            for point in self._points:
                self._lock(point)
                if point.tag not in self._generations:
                    settle(point)
                    self._generations[point.tag] = _current(point)
            first, *others = self._points
            self._write(first)
            for point in others:
                self._share(first, point)
            for point in self._points:
                if self._sharded is not None:
                    shards.share(self._sharded, point.shards(self._sharded.generation))
                document = manifest.encode(self._document(point))
                write_new(point.staged_manifest, document, self._flushes)
            self._flushes.add_directory(self._folder)
            self._flushes.wait()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon()

    def generation(self, tag: str) -> int:
        """The tag's ordinal: how many points were written under it."""
        return self._generations[tag].ordinal

    def publish(self, tag: str) -> None:
        """Make the staged state the tag's point, and drop the one it replaces."""
        point = next(p for p in self._points if p.tag == tag)
        old = self._generations[tag]
        with hold_interrupts():
            fs.disk.replace(point.staged, point.checkpoint)
            self.published.append(tag)
            self._generations[tag] = Current(
                old.ordinal + 1,
                None if self.state_id is None else point.sidecar(self.state_id),
                None if self._sharded is None else point.shards(self._sharded.generation),
            )
            fs.disk.replace(point.staged_manifest, point.manifest)
        self._refresh_compat(point)
        if point is self._points[0]:
            # The other tags are staged durably: after a power loss, whoever comes
            # next completes them from there.
            fs.disk.flush_directory(self._folder)
        if old.sidecar is not None:
            with contextlib.suppress(FileNotFoundError):
                fs.disk.unlink(old.sidecar)
        if old.shards is not None:
            shards.remove(old.shards)

    def _lock(self, point: PointFiles) -> None:
        what = f"the checkpoint {point.checkpoint}"
        self._locks.enter_context(
            locked(point.lock, timeout=LOCK_SECONDS, what=what, error=RunBusyError)
        )

    def _write(self, point: PointFiles) -> None:
        from nnx.store.data import save_data

        # Weights first: what cannot be stored is refused before a byte is written.
        weights = {
            **codec.to_plain(self._checkpoint, self.checkpoint_id),
            "training_state_id": self.state_id,
            "training_state_present": self.state_id is not None,
        }
        if self._sharded is not None:
            weights[codec.SHARDS] = self._sharded.generation
        if self._fields is not None:
            assert self.state_id is not None
            state = codec.training_state(self._fields, self.state_id)
            digest, size = save_data(state, point.sidecar(self.state_id), self._flushes)
            self._digests["state"] = {"sha256": digest, "size": size}
        digest, size = save_data(weights, point.staged, self._flushes)
        self._digests["weights"] = {"sha256": digest, "size": size}

    def _share(self, source: PointFiles, target: PointFiles) -> None:
        if self.state_id is not None:
            fs.share_file(source.sidecar(self.state_id), target.sidecar(self.state_id))
        fs.share_file(source.staged, target.staged)

    def _refresh_compat(self, point: PointFiles) -> None:
        if self.state_id is None:
            with contextlib.suppress(FileNotFoundError):
                fs.disk.unlink(point.compat_sidecar)
            return
        temporary = fs.temporary_name(point.compat_sidecar)
        try:
            fs.share_file(point.sidecar(self.state_id), temporary)
            fs.disk.replace(temporary, point.compat_sidecar)
        except BaseException:
            fs.remove_quietly(temporary)
            raise

    def _document(self, point: PointFiles) -> dict[str, Any]:
        fields = self._fields or {}
        counters = fields.get("counters") or {}
        record = self._checkpoint.idp
        completed = fields.get("completed_epoch")
        files = {point.name: self._digests["weights"]}
        if self.state_id is not None:
            files[os.path.basename(point.sidecar(self.state_id))] = self._digests["state"]
        if self._sharded is not None:
            for name, digest in self._sharded.digests.items():
                files[point.shard_name(self._sharded.generation, name)] = dict(digest)
        return {
            "tag": point.tag,
            "generation": self._generations[point.tag].ordinal + 1,
            "checkpoint_id": self.checkpoint_id,
            "training_state_id": self.state_id,
            "position": {
                "completed_epoch": record.epoch_idx if completed is None else int(completed),
                "global_step": counters.get("global_step", counters.get("iter_idx")),
                "committed_updates": counters.get("committed_updates"),
                "planned_n_epochs": counters.get("planned_n_epochs"),
            },
            "files": files,
            "epoch_tag": any(p.tag == LAST for p in self._points),
            "record": record.state(),
            **({} if self._about is None else {"run": self._about}),
        }

    def _abandon(self) -> None:
        try:
            self._flushes.settle()
            # Once LAST is published the epoch stands, and what is staged of it is
            # completed by whoever comes next.
            keep = LAST in self.published
            for point in self._points:
                if point.tag in self.published or keep:
                    continue
                fs.remove_quietly(point.staged)
                fs.remove_quietly(point.staged_manifest)
                if self.state_id is not None:
                    fs.remove_quietly(point.sidecar(self.state_id))
                if self._sharded is not None:
                    shards.remove(point.shards(self._sharded.generation))
        finally:
            self._locks.close()


def settle(point: PointFiles) -> bool:
    """Complete or drop what a dead writer left of a tag; whether there was any.

    The caller holds the tag's lock.
    """
    if not (os.path.lexists(point.staged_manifest) or os.path.lexists(point.staged)):
        return False
    if is_complete(point):
        publish_staged(point)
        fs.disk.flush_directory(point.folder)
    else:
        for path in (point.staged, point.staged_manifest):
            if os.path.lexists(path):
                fs.disk.unlink(path)
    drop_old_sidecars(point)
    return True


def publish_staged(point: PointFiles) -> None:
    """Give what is staged of a tag its names; a Ctrl-C waits until both have theirs."""
    with hold_interrupts():
        if os.path.lexists(point.staged):
            fs.disk.replace(point.staged, point.checkpoint)
        fs.disk.replace(point.staged_manifest, point.manifest)


def is_complete(point: PointFiles) -> bool:
    """Whether what is staged of a tag is its point, and only waits for its names."""
    try:
        return manifest.locate(point).manifest_path == point.staged_manifest
    except ResumePointError:
        return False


def drop_old_sidecars(point: PointFiles) -> list[str]:
    """Remove state of generations that the tag's checkpoint no longer names."""
    try:
        current = manifest.locate(point).manifest
    except ResumePointError:
        return []
    if current is None:
        return []  # written before manifests: the checkpoint alone knows its sidecar
    removed = []
    for path in point.sidecars():
        if os.path.basename(path) not in current["files"]:
            fs.disk.unlink(path)
            removed.append(path)
    for path in point.shard_generations():
        if not point.names_shards(current, path):
            shards.remove(path)
            removed.append(path)
    return removed


def remove_point(files: PointFiles) -> None:
    """Delete a tag's files, its manifest first; the caller holds its lock."""
    for path in (files.manifest, files.checkpoint, files.compat_sidecar, *files.sidecars()):
        with contextlib.suppress(FileNotFoundError):
            fs.disk.unlink(path)
    for path in files.shard_generations():
        shards.remove(path)


def _current(point: PointFiles) -> Current:
    try:
        found = manifest.read(point.manifest)
    except ResumePointError:
        return Current()
    if found is None:
        return Current()
    state_id = found["training_state_id"]
    held = [path for path in point.shard_generations() if point.names_shards(found, path)]
    return Current(
        int(found["generation"]),
        None if state_id is None else point.sidecar(state_id),
        held[0] if held else None,
    )
