"""The files of a fit whose tensors are sharded: all processes write them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nnx.engine.ranks.writer import RankWriter
from nnx.store import shards

if TYPE_CHECKING:
    from nnx.distributed.group import Group


class ShardedWriter(RankWriter):
    """All processes write the sharded tensors of a point; the writer then commits it."""

    def commit_epoch(self, checkpoint: Any, training_state: Any, **options: Any) -> None:
        deferred = options.pop("deferred", None) or {}
        changed = self._changed(checkpoint, deferred)
        with self._sharded(checkpoint, training_state) as (weights, state, sharded):
            options["deferred"] = {tag: weights for tag in deferred if tag not in changed}
            super().commit_epoch(weights, state, sharded=sharded, **options)
        for tag in changed:
            self._commit_tag(tag, deferred[tag])

    def _changed(self, checkpoint: Any, deferred: Mapping[str, Any]) -> list[str]:
        """The tags whose weights are not those of ``checkpoint`` in some process."""
        mine = [
            t for t, kept in deferred.items() if not _alike(kept.net_state, checkpoint.net_state)
        ]
        return sorted(set().union(*self._group.gather(mine))) if deferred else []

    def _commit_tag(self, tag: str, checkpoint: Any) -> None:
        with self._sharded(checkpoint, None) as (weights, _, sharded):
            self._group.from_writer(
                lambda: self._write("commit_tag", tag, weights, sharded=sharded)
            )
        if self._inner is not None:
            self._inner.drop_shards(sharded.folder)  # the tag has its own names of the files

    def refresh_last(self, checkpoint: Any, training_state: Any, **options: Any) -> None:
        with self._sharded(checkpoint, training_state) as (weights, state, sharded):
            super().refresh_last(weights, state, sharded=sharded)

    @contextlib.contextmanager
    def _sharded(self, checkpoint: Any, training_state: Any) -> Iterator[tuple[Any, Any, Any]]:
        tensors: dict[str, Any] = {}
        weights = shards.take_out(checkpoint.net_state, "net", tensors)
        state = shards.take_out(training_state, "state", tensors)
        inner = self._inner
        folder = self._group.from_writer(lambda: inner.shard_folder())  # type: ignore[union-attr]
        try:
            sharded = self._write_shards(folder, tensors)
            yield replace(checkpoint, net_state=weights), state, sharded
        except BaseException:
            if inner is not None:
                inner.drop_shards(folder)
            raise

    def _write_shards(self, folder: str, tensors: dict[str, Any]) -> shards.Shards:
        from torch.distributed.checkpoint.state_dict_saver import save

        from nnx.store.dcp import ShardWriter, save_planner

        storage = ShardWriter(folder, self._group.rank)
        names = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
        if len(set(self._group.gather(names))) > 1:
            raise ValueError(
                "the processes hold different sharded tensors; a callback that keeps weights must "
                'run in every process (rank_behaviour = "every")'
            )
        with told_by(self._group):
            save(
                tensors, storage_writer=storage, planner=save_planner(),
                process_group=self._group.talk,
            )  # fmt: skip
        digests = next(found for found in self._group.gather(storage.digests) if found)
        return shards.Shards(folder, digests)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether this process's parts of two nets' weights are equal."""

    def part(value: Any) -> Any:
        return value.to_local() if shards.is_sharded(value) else value

    return one.keys() == other.keys() and all(
        torch.equal(part(value), part(other[name])) for name, value in one.items()
    )


@contextlib.contextmanager
def told_by(group: Group) -> Iterator[None]:
    """Raise what went wrong in this process, or the others' failure."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with group.answering():
            yield
    except CheckpointException as error:
        if group.rank in error.failures:
            raise error.failures[group.rank][0] from error
        group.agree()
        raise
