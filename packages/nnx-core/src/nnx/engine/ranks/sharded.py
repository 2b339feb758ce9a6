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
from nnx.distributed.group import FORWARD, Group
from nnx.distributed.partition import RankPartition, ShardedLoader
from nnx.distributed.sharding import ShardedNet, check_torch
from nnx.distributed.spec import FSDP
from nnx.engine import rng
from nnx.engine.ranks.data_parallel import DataParallel, layout
from nnx.engine.ranks.sharded_gradients import ShardedSum
from nnx.engine.ranks.sharded_writer import ShardedWriter, told_by
from nnx.engine.resume.point import find_point
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


class Sharded(DataParallel):
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
        point = self.group.from_writer(lambda: find_point(request, whole=False))
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
        with told_by(self.group):
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

    def extra_batches(self, loader: Any) -> Iterable[Any]:
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
