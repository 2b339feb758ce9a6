"""A fit whose parameters and optimizer state are sharded over its processes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nnx.callbacks.base import overrides
from nnx.distributed.group import BACKWARD, FORWARD, Group
from nnx.distributed.partition import RankPartition, ShardedLoader
from nnx.distributed.sharding import ShardedNet, check_torch
from nnx.distributed.spec import FSDP
from nnx.engine import rng
from nnx.engine.rank_gradients import GradientSum
from nnx.engine.rank_records import RankWriter
from nnx.engine.ranks import Together, layout
from nnx.engine.resume.point import find_point
from nnx.engine.window import BackwardShare
from nnx.objectives import LossTerm
from nnx.precision import resolve_precision
from nnx.seeding import isolated_rng
from nnx.store import shards

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.models import Model
    from nnx.store.points import ResumePoint

_OUTSIDE = (
    "a parameter was used outside the forward of its block, while it was sharded; name the "
    "blocks so that their own forward uses their parameters, FSDP(blocks=...), or gather all with "
    "the whole network, FSDP(blocks=()) ({})"
)


class Sharded(Together):
    """Data-parallel training under ``distributed=FSDP()``.

    A forward and a backward take all processes, so each begins with an agreement, and
    every process runs as many of them as the others.
    """

    spec: FSDP

    def __init__(self, group: Group, spec: FSDP) -> None:
        super().__init__(group, spec)
        self.writer = ShardedWriter
        self.synchronizer = ShardedSum(group, find_unused=spec.find_unused_parameters)
        self._net: ShardedNet | None = None
        self._together = True  # whether a forward takes all processes

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            with self.group.guarded():
                try:
                    yield
                except Exception as error:
                    if self._net is not None and self._together:
                        self._net.finish_forward()
                    if "mixed torch.Tensor and DTensor" in str(error):
                        raise RuntimeError(_OUTSIDE.format(error)) from error
                    raise
                self._restore(together=True)
        except BaseException:
            with contextlib.suppress(Exception):  # the first failure is the one to tell
                self._restore(together=self.group.agreed and self.group.is_whole)
            raise

    def _restore(self, *, together: bool) -> None:
        if self._net is not None:
            self._net.restore(together=together)

    # -- before the run is reserved -------------------------------------------

    def check(self, request: FitRequest) -> None:
        check_torch()
        super().check(request)
        model = request.model
        if resolve_precision(model.params, model.device).effective == "fp16":
            raise ValueError(
                "distributed=FSDP() does not scale FP16 losses; use PrecisionPolicy('bf16') or "
                "'fp32', or distributed=DDP()"
            )

    def callbacks(self, callbacks: tuple[Any, ...], *, bounded: bool) -> tuple[Any, ...]:
        for callback in callbacks:
            if overrides(callback, "checkpoint_transforms"):
                raise ValueError(
                    f"{type(callback).__name__} changes the network's layers, which "
                    "distributed=FSDP() has sharded; use distributed=DDP()"
                )
        return super().callbacks(callbacks, bounded=bounded)

    def shard(self, model: Model) -> None:
        self._check_equal({"parameters": layout(model.net), "blocks": self.spec.blocks})
        net = ShardedNet(
            model.net, self.group, self.spec.blocks, unused=self.spec.find_unused_parameters
        )
        self._net = self.synchronizer.net = net
        net.before_forward(self._before_forward)
        net.after_forward(self.synchronizer.note_output)

    def _before_forward(self) -> None:
        if self._together:
            self.group.agree(FORWARD)

    def reserved(self) -> None:
        assert self._net is not None
        self._net.take_writers_weights()

    def _replicated(self, net: torch.nn.Module) -> list[torch.Tensor]:
        return list(net.buffers())

    # -- resuming -------------------------------------------------------------

    def find(self, request: FitRequest, optimizers: Mapping[str, Any]) -> ResumePoint | None:
        """Each process reads its own part, however many wrote the point."""
        point = self.group.from_writer(lambda: find_point(request.params, whole=False))
        if point is None:
            return None
        state = None if request.params.resume_mode == "weights_only" else point.training_state
        if point.shards is not None:
            return self._read(point, state)
        return self._spread(point, state, request.model.net, next(iter(optimizers.values())))

    def _read(self, point: ResumePoint, state: dict[str, Any] | None) -> ResumePoint:
        from torch.distributed.checkpoint.state_dict_loader import load
        from torch.distributed.tensor import Replicate, Shard, zeros

        from nnx.store.dcp import ShardReader, load_planner
        from nnx.store.points import check_shards

        assert self._net is not None
        assert point.shards is not None
        mesh = self._net.mesh
        check_shards(point, share=self.group.rank, of=self.group.world_size)
        self.group.agree()
        weights = point.checkpoint.net_state
        reader = ShardReader(point.shards)
        tensors: dict[str, Any] = {
            name: reader.empty(
                name,
                lambda shape, dtype: zeros(
                    *shape,
                    dtype=dtype,
                    device_mesh=mesh,
                    placements=[Shard(0) if shape else Replicate()],
                ),
            )
            for name in dict.fromkeys([*shards.references(weights), *shards.references(state)])
        }
        with _told_by(self.group):
            load(
                tensors, storage_reader=reader, planner=load_planner(),
                process_group=self.group.talk,
            )  # fmt: skip
        return replace(
            point,
            checkpoint=replace(point.checkpoint, net_state=shards.put_back(weights, tensors)),
            training_state=None if state is None else shards.put_back(state, tensors),
        )

    def _spread(
        self, point: ResumePoint, state: dict[str, Any] | None, net: Any, optimizer: Any
    ) -> ResumePoint:
        """A point of whole tensors, of which each process keeps its part."""
        assert self._net is not None
        parameters = dict(net.named_parameters(remove_duplicate=False))
        part = self._net.part_of

        def weights_of(state: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: part(value) if name in parameters else value for name, value in state.items()
            }

        checkpoint = replace(point.checkpoint, net_state=weights_of(point.checkpoint.net_state))
        if state is None or state.get("optimizer_state") is None:
            return replace(point, checkpoint=checkpoint, training_state=state)
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        saved = state["optimizer_state"]
        spread = {
            index: {
                key: part(value) if _shaped(value, owned, index) else value
                for key, value in entries.items()
            }
            for index, entries in saved["state"].items()
        }
        state = {**state, "optimizer_state": {**saved, "state": spread}}
        return replace(point, checkpoint=checkpoint, training_state=state)

    def resume_problems(self, state: Mapping[str, Any]) -> list[str]:
        saved = state.get("distributed")
        if saved is None:
            return []
        if saved["world_size"] == self.world_size:
            return super().resume_problems(state)
        # Other processes read other shares, of the same rows in the same order.
        plans = [_order_of(loader.descriptor()) for loader in self.loaders]
        before = [_order_of(plan) for plan in saved["plans"]]
        if before != plans:
            return [f"the checkpoint's data plan is {before}, this run's {plans}"]
        return []

    def streams(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The process's own stream; one derived from the writer's in another world."""
        saved = state.get("distributed")
        if saved is not None and saved["world_size"] == self.world_size:
            return super().streams(state)
        stream = (state.get("rng_state") or {}).get("process")
        if stream is None:
            return None
        digest = hashlib.sha256(stream["torch"].cpu().numpy().tobytes()).digest()
        with isolated_rng(self.seed(int.from_bytes(digest[:4], "little"))):
            return rng.capture({})

    def complete(self, state: dict[str, Any]) -> dict[str, Any]:
        state = super().complete(state)
        state["distributed"]["sharded"] = True
        return state

    # -- evaluation -----------------------------------------------------------

    def company(self, loader: Any) -> Iterable[Any]:
        """A process with fewer validation batches runs one again, for the others."""
        whole = loader.partition
        rows = -(-whole.n // self.world_size)
        missing = -(-rows // loader.batch_size) - len(loader)
        if not missing:
            return ()
        return itertools.repeat(_first_batch(loader), missing)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        assert self._net is not None
        with self._net.gathered():
            self._together = False
            try:
                yield
            finally:
                self._together = True


class ShardedSum(GradientSum):
    """Sums over the processes that the backward pass itself takes.

    The processes divide a term by one reference, the denominators of them all. Of a
    window of several microbatches with one term, only the last one exchanges gradients.
    """

    owner = "FSDP"
    net: ShardedNet

    def __init__(self, group: Group, *, find_unused: bool) -> None:
        super().__init__(group, find_unused=find_unused)
        self._names: list[str] = []  # terms, as all processes know them
        self._outputs: list[torch.Tensor] = []  # of the forwards since the last backward
        self._kept: str | None = None  # the term whose gradients are not exchanged yet

    def note_output(self, output: Any) -> None:
        """Remember what a forward returned, to take part in a backward without a term."""
        self._outputs += [t for t in _tensors(output) if t.requires_grad]

    def shares(self, terms: Sequence[LossTerm], *, closes: bool) -> list[BackwardShare] | None:
        mine = {term.name: term for term in terms}
        references = self._agreed(mine)
        names = list(references)
        if self._kept is not None:
            names = [self._kept, *(name for name in names if name != self._kept)]
        keep = len(names) == 1 and not closes
        self.net.synchronize_gradients(not keep)
        self._kept = names[0] if keep else None
        nothing = self._nothing() if any(name not in mine for name in names) else None
        self._outputs.clear()
        return [
            BackwardShare(name, references.get(name, 1.0), mine.get(name), nothing)
            for name in names
        ]

    def _agreed(self, mine: Mapping[str, LossTerm]) -> dict[str, float]:
        """The terms that some process has, with the sum of their denominators."""
        numbers = [float(any(name not in self._names for name in mine))]
        for name in self._names:
            term = mine.get(name)
            numbers += [0.0, 0.0] if term is None else [1.0, float(term.denominator or 0.0)]
        unknown, *sums = self._group.add(numbers, about=BACKWARD)
        if unknown:
            others = self._group.gather(list(mine))
            new = sorted({name for names in others for name in names} - set(self._names))
            self._names += new
            return self._agreed(mine)
        pairs = zip(self._names, sums[::2], sums[1::2])
        return {name: weight or 1.0 for name, active, weight in pairs if active}

    def _nothing(self) -> torch.Tensor:
        if not self._outputs:
            raise RuntimeError(
                "this process has nothing to back-propagate: it ran no forward of the network that "
                "the other processes did. Under distributed=FSDP() every process runs the network "
                "on each of its batches, by calling the model's net"
            )
        zeros = [torch.where(torch.isfinite(t), t, 0).sum() * 0 for t in self._outputs]
        return torch.stack(zeros).sum()

    def all_finite(self, finite: bool) -> bool:
        return not self._group.any(not finite)

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """They are summed already."""
        trained = [p for p in parameters if p.requires_grad]
        self.check_unused(sum(1 for p in trained if p.grad is None), len(trained))


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
        with _told_by(self._group):
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
def _told_by(group: Group) -> Iterator[None]:
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


def _first_batch(loader: ShardedLoader) -> Any:
    if len(loader):
        return next(iter(loader))
    plan = loader.partition
    first = RankPartition(plan.n, rank=0, world_size=plan.world_size, kind=plan.kind)
    collate = loader.collate_fn
    return next(iter(ShardedLoader(loader.dataset, 1, first, collate_fn=collate)))


def _order_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plan[key] for key in ("n", "kind", "policy", "shuffle", "seed")}


def _shaped(value: Any, owned: Sequence[torch.Tensor], index: int) -> bool:
    known = index < len(owned)  # what differs is told by the resume's own checks
    return known and isinstance(value, torch.Tensor) and value.shape == owned[index].shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
