"""Data-parallel training: every process holds the model and trains on its share of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nnx.distributed.partition import ShardedLoader
from nnx.distributed.roles import EVERY, WRITER, behaviour_of
from nnx.engine.ranks.base import Ranks
from nnx.engine.ranks.gradients import GradientSum
from nnx.engine.ranks.records import RankRecorder, merged_record
from nnx.engine.ranks.writer import RankWriter
from nnx.engine.resume.point import find_point
from nnx.store.writer import RunWriter

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext
    from nnx.distributed.group import Group
    from nnx.distributed.spec import DDP, FSDP
    from nnx.engine.owner import UpdateOwner
    from nnx.engine.request import FitRequest
    from nnx.prediction.inference import EvaluationTotals
    from nnx.records import NNEvaluationDataPoint
    from nnx.store import NNRun
    from nnx.store.points import ResumePoint
    from nnx.tasks.recorder import EpochRecorder

T = TypeVar("T")


class DataParallel(Ranks):
    """Data-parallel training under ``distributed=DDP()``."""

    writer = RankWriter

    def __init__(self, group: Group, spec: DDP | FSDP) -> None:
        self.group = group
        self.spec = spec
        self.loaders: list[ShardedLoader] = []
        self.is_writer = group.is_writer
        self.world_size = group.world_size
        self.synchronizer: Any = GradientSum(group, find_unused=spec.find_unused_parameters)
        self._asks_each_batch = False

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        return self.group.guarded()

    def check(self, request: FitRequest) -> None:
        params = request.params
        _check_loaders(params, self.group.rank, self.world_size)
        self.loaders = [x for x in (params.train_loader, params.val_loader) if x is not None]
        if request.compile is not None:
            raise ValueError("compile= and distributed= do not go together; choose one")
        if params.checkpoint_every is not None:
            raise ValueError(
                "checkpoint_every writes points inside an epoch, which distributed training does "
                "not do: its epochs commit as a whole. Leave it None"
            )

    def callbacks(self, callbacks: tuple[Any, ...], *, bounded: bool) -> tuple[Any, ...]:
        for callback in callbacks:
            if self.world_size > 1 and behaviour_of(callback) is None:
                raise ValueError(
                    f"{type(callback).__name__} does not say in which processes it runs. Set its "
                    f'rank_behaviour to "{EVERY}" (each process keeps its own, all see the same '
                    f'records) or "{WRITER}", or build it with '
                    "nnx.distributed.writer_only(lambda: ...)"
                )
            everywhere = behaviour_of(callback) != WRITER
            if everywhere and bounded and getattr(callback, "history_access", "") == "full":
                raise ValueError(
                    f"{type(callback).__name__} reads the full history, which a history journal "
                    f'keeps in the writer alone: set its rank_behaviour to "{WRITER}"'
                )
        return tuple(c for c in callbacks if self.is_writer or behaviour_of(c) != WRITER)

    def from_writer(self, make: Callable[[], T]) -> T:
        return self.group.from_writer(make)

    def find(self, request: FitRequest, optimizers: Mapping[str, Any]) -> ResumePoint | None:
        return self.group.from_writer(lambda: find_point(request))

    def any(self, flag: bool) -> bool:
        return self.group.any(flag)

    @contextlib.contextmanager
    def open_writer(self, run: NNRun, **options: Any) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            held: list[RunWriter] = []

            def open_it() -> None:
                held.append(stack.enter_context(RunWriter.open(run, **options)))

            self.group.from_writer(open_it)
            self.reserved()
            inner = held[0] if held else None
            yield self.writer(self.group, inner, run, options["history"])

    def reserved(self) -> None:
        """The run is reserved: nothing is refused any more."""

    def recorder(self, recorder: EpochRecorder) -> Any:
        return RankRecorder(self.group, recorder)

    def seed(self, seed: int) -> int:
        """Rank 0 keeps the seed; the others' streams are derived from it."""
        return (seed + self.group.rank * 0x9E3779B1) % (1 << 32)

    def begin(self, run_id: str, net: torch.nn.Module, ctx: CallbackContext) -> None:
        self._check_equal_plans(run_id, net)
        self.group.broadcast(self._replicated(net))
        self._asks_each_batch = self.group.any(bool(ctx.update_listeners))

    def _replicated(self, net: torch.nn.Module) -> list[torch.Tensor]:
        """What of the network every process holds alike."""
        return [t.data for t in (*net.parameters(), *net.buffers())]

    def _check_equal_plans(self, run_id: str, net: torch.nn.Module) -> None:
        """The same run, the same model and the same data plan in every process."""
        plans = [loader.descriptor() for loader in self.loaders]
        self._check_equal(
            {
                "run": run_id,
                "parameters": layout(net),
                "loaders": plans,
            }
        )

    def _check_equal(self, mine: Mapping[str, Any]) -> None:
        for rank, other in enumerate(self.group.gather(mine)):
            differing = [key for key in mine if other[key] != mine[key]]
            if differing:
                raise ValueError(
                    f"rank {rank} trains with other {' and '.join(differing)} than rank "
                    f"{self.group.rank}: "
                    + "; ".join(f"{other[key]} against {mine[key]}" for key in differing)
                )

    def stops_now(self, ctx: CallbackContext) -> bool:
        if not self._asks_each_batch:
            return False
        ctx.stop_at_update = self.group.any(ctx.stop_at_update)
        return ctx.stop_at_update

    def stops_after_epoch(self, ctx: CallbackContext) -> bool:
        return self.group.any(ctx.should_stop or ctx.stop_at_update)

    def merge(self, totals: EvaluationTotals) -> EvaluationTotals:
        whole = totals.emptied()
        for parts in self.group.gather(totals.parts()):  # in the same order everywhere
            whole.add_parts(parts)
        return whole

    def merge_record(self, record: NNEvaluationDataPoint, loader: Any) -> NNEvaluationDataPoint:
        share = {"record": record.state(), "n_samples": len(loader.ids())}
        return merged_record(self.group.gather(share))[0]

    def complete(self, state: dict[str, Any]) -> dict[str, Any]:
        state["distributed"] = {
            "world_size": self.world_size,
            "plans": [loader.descriptor() for loader in self.loaders],
            "ranks": self.group.gather(state["rng_state"]),
        }
        return state

    def streams(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        saved = state.get("distributed")
        return state.get("rng_state") if saved is None else saved["ranks"][self.group.rank]

    def components(self, saved: Mapping[str, Any] | None, known: Sequence[str]) -> Any:
        if saved is None or self.is_writer:
            return saved
        return {name: state for name, state in saved.items() if name in known}

    def resume_problems(self, state: Mapping[str, Any]) -> list[str]:
        saved = state.get("distributed")
        if saved is None:
            return ["the checkpoint was trained by one process, this run is distributed"]
        if saved["world_size"] != self.world_size:
            return [
                f"the checkpoint was trained by {saved['world_size']} processes, this run has "
                f"{self.world_size}; start as many, or resume with resume_mode='weights_only'"
            ]
        plans = [loader.descriptor() for loader in self.loaders]
        if saved["plans"] != plans:
            return [f"the checkpoint's data plan is {saved['plans']}, this run's {plans}"]
        return []

    def after_epoch(self, net: torch.nn.Module, owner: UpdateOwner, updates: int) -> None:
        """A step function must have left the updates to the engine.

        Buffers that training moved (batch statistics) become the writer's, in whose
        checkpoint they are.
        """
        buffers = list(net.buffers())
        if buffers:
            self.group.broadcast(buffers)
        if owner.step_fn is not None and updates == 0:
            raise ValueError(
                "the train_step_fn took no update through the engine, so the processes' models "
                "drift apart: call default_train_step(ctx) inside it, or pass objective="
            )


def layout(net: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Names, shapes and dtypes of the parameters."""
    return [(n, tuple(p.shape), str(p.dtype)) for n, p in net.named_parameters()]


def _check_loaders(params: Any, rank: int, world: int) -> None:
    for name, kind, maker in (
        ("train_loader", "train", "train_loader"),
        ("val_loader", "validation", "validation_loader"),
    ):
        loader = getattr(params, name)
        if loader is None:
            continue
        if not isinstance(loader, ShardedLoader):
            raise ValueError(
                f"{name} must come from nnx.distributed.{maker}(dataset, batch_size) under "
                f"distributed=, not {type(loader).__name__}: every process needs its own share"
            )
        plan = loader.partition
        if (plan.kind, plan.rank, plan.world_size) != (kind, rank, world):
            raise ValueError(
                f"{name} deals {plan.kind} rows to rank {plan.rank} of {plan.world_size}, and this "
                f"is rank {rank} of {world}: make it with nnx.distributed.{maker} after "
                "init_process_group()"
            )
