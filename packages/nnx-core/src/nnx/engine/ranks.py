"""What a fit does differently when several processes train one model.

:class:`Alone` is the single process, where nothing is exchanged;
:class:`Together` is data-parallel training. The rest of the engine calls them
without asking which it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nnx.distributed.group import Group
from nnx.distributed.partition import ShardedLoader
from nnx.distributed.process import rank_and_world
from nnx.distributed.roles import EVERY, WRITER
from nnx.distributed.spec import DDP
from nnx.engine.rank_records import RankRecorder, RankWriter, merged_record
from nnx.engine.window import TermTotals, WindowTotals
from nnx.store.writer import RunWriter

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.engine.session import FitSession
    from nnx.engine.window import WindowSynchronizer
    from nnx.prediction.inference import EvaluationTotals
    from nnx.records import NNEvaluationDataPoint
    from nnx.store import NNRun
    from nnx.tasks.recorder import EpochRecorder

T = TypeVar("T")


class Alone:
    """One process: every question is answered here."""

    is_writer = True
    world_size = 1
    synchronizer: WindowSynchronizer | None = None

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self, request: FitRequest) -> None:
        """Refuse what these processes cannot train together."""

    def callbacks(self, callbacks: tuple[Any, ...], *, bounded: bool) -> tuple[Any, ...]:
        """The callbacks that run in this process."""
        return callbacks

    def from_writer(self, make: Callable[[], T]) -> T:
        return make()

    def any(self, flag: bool) -> bool:
        """Whether it holds in some process."""
        return flag

    def open_writer(self, run: NNRun, **options: Any) -> contextlib.AbstractContextManager[Any]:
        return RunWriter.open(run, **options)

    def recorder(self, recorder: EpochRecorder) -> Any:
        return recorder

    def seed(self, seed: int) -> int:
        return seed

    def begin(self, session: FitSession) -> None:
        """After the callbacks have begun, before the first epoch."""

    def stops_now(self, session: FitSession) -> bool:
        """Whether training ends after the batch just trained on."""
        return session.ctx.stop_at_update

    def stops_after_epoch(self, session: FitSession) -> bool:
        return session.ctx.should_stop or session.ctx.stop_at_update

    def merge(self, totals: EvaluationTotals) -> EvaluationTotals:
        """The evaluation of all processes' validation rows."""
        return totals

    def merge_record(self, record: NNEvaluationDataPoint, loader: Any) -> NNEvaluationDataPoint:
        """One record of the processes' own records of their validation rows."""
        return record

    def complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add what a resume of several processes needs to a training state."""
        return state

    def streams(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The random streams of this process in a training state."""
        return state.get("rng_state")

    def components(self, saved: Mapping[str, Any] | None, known: Sequence[str]) -> Any:
        """The saved components that concern this process, which knows the names ``known``."""
        return saved

    def resume_problems(self, state: Mapping[str, Any]) -> list[str]:
        """Why a training state cannot be continued by these processes."""
        saved = state.get("distributed")
        if saved is None:
            return []
        return [
            f"the checkpoint was trained by {saved['world_size']} processes, this run is one "
            "process; resume with the same number"
        ]

    def after_epoch(self, session: FitSession) -> None:
        """Between an epoch's last batch and its validation."""


class Together(Alone):
    """Data-parallel training under ``distributed=DDP()``."""

    def __init__(self, group: Group, spec: DDP) -> None:
        self.group = group
        self.spec = spec
        self.loaders: list[ShardedLoader] = []
        self.is_writer = group.is_writer
        self.world_size = group.world_size
        self.synchronizer = GradientSum(group, find_unused=spec.find_unused_parameters)
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
            if self.world_size > 1 and getattr(callback, "rank_behaviour", None) not in (
                EVERY,
                WRITER,
            ):
                raise ValueError(
                    f"{type(callback).__name__} does not say in which processes it runs. Set its "
                    f'rank_behaviour to "{EVERY}" (each process keeps its own, all see the same '
                    f'records) or "{WRITER}", or build it with '
                    "nnx.distributed.writer_only(lambda: ...)"
                )
            everywhere = getattr(callback, "rank_behaviour", None) != WRITER
            if everywhere and bounded and getattr(callback, "history_access", "") == "full":
                raise ValueError(
                    f"{type(callback).__name__} reads the full history, which a history journal "
                    f'keeps in the writer alone: set its rank_behaviour to "{WRITER}"'
                )
        return tuple(
            c for c in callbacks if self.is_writer or getattr(c, "rank_behaviour", None) != WRITER
        )

    def from_writer(self, make: Callable[[], T]) -> T:
        return self.group.from_writer(make)

    def any(self, flag: bool) -> bool:
        return self.group.any(flag)

    @contextlib.contextmanager
    def open_writer(self, run: NNRun, **options: Any) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            held: list[RunWriter] = []

            def open_it() -> None:
                held.append(stack.enter_context(RunWriter.open(run, **options)))

            self.group.from_writer(open_it)
            inner = held[0] if held else None
            yield RankWriter(self.group, inner, run, options["history"])

    def recorder(self, recorder: EpochRecorder) -> Any:
        return RankRecorder(self.group, recorder)

    def seed(self, seed: int) -> int:
        """Rank 0 keeps the seed; the others' streams are derived from it."""
        return (seed + self.group.rank * 0x9E3779B1) % (1 << 32)

    def begin(self, session: FitSession) -> None:
        net = session.model.net
        self._check_equal_plans(session)
        self.group.broadcast([t.data for t in (*net.parameters(), *net.buffers())])
        self._asks_each_batch = self.group.any(bool(session.ctx.update_listeners))

    def _check_equal_plans(self, session: FitSession) -> None:
        """The same run, the same model and the same data plan in every process."""
        plans = [loader.descriptor() for loader in self.loaders]
        layout = [
            (n, tuple(p.shape), str(p.dtype)) for n, p in session.model.net.named_parameters()
        ]
        mine = {"run": session.plan.run.id, "parameters": layout, "loaders": plans}
        for rank, other in enumerate(self.group.gather(mine)):
            differing = [key for key in mine if other[key] != mine[key]]
            if differing:
                raise ValueError(
                    f"rank {rank} trains with other {' and '.join(differing)} than rank "
                    f"{self.group.rank}: "
                    + "; ".join(f"{other[key]} against {mine[key]}" for key in differing)
                )

    def stops_now(self, session: FitSession) -> bool:
        if not self._asks_each_batch:
            return False
        session.ctx.stop_at_update = self.group.any(session.ctx.stop_at_update)
        return session.ctx.stop_at_update

    def stops_after_epoch(self, session: FitSession) -> bool:
        return self.group.any(session.ctx.should_stop or session.ctx.stop_at_update)

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

    def after_epoch(self, session: FitSession) -> None:
        """A step function must have left the updates to the engine."""
        if session.plan.step_fn is not None and session.engine.updates == 0:
            raise ValueError(
                "the train_step_fn took no update through the engine, so the processes' models "
                "drift apart: call default_train_step(ctx) inside it, or pass objective="
            )


class GradientSum:
    """Joins the windows of the processes: sums of the totals, then of the gradients."""

    def __init__(self, group: Group, *, find_unused: bool) -> None:
        self._group = group
        self._find_unused = find_unused
        self._terms: dict[str, str] = {}  # name -> reduction, as all processes know them

    def totals(self, totals: WindowTotals) -> WindowTotals:
        """One message of numbers, as long as the terms have the names of the last window."""
        mine = {name: term.reduction for name, term in totals.terms.items()}
        numbers = [float(mine != self._terms), float(totals.nonfinite), float(totals.microbatches)]
        for name, reduction in self._terms.items():
            term = totals.terms.get(name, TermTotals(reduction))
            numbers += [float(term.live), term.numerator, term.weighted, term.denominator]
        renamed, nonfinite, microbatches, *sums = self._group.add(numbers)
        if renamed:
            states = self._group.gather(totals.state())
            whole = WindowTotals.merged(map(WindowTotals.from_state, states))
            self._terms = {name: term.reduction for name, term in whole.terms.items()}
            return whole
        terms = {}
        for index, (name, reduction) in enumerate(self._terms.items()):
            live, numerator, weighted, denominator = sums[4 * index : 4 * index + 4]
            terms[name] = TermTotals(reduction, numerator, weighted, denominator, live > 0)
        return WindowTotals(terms, nonfinite > 0, int(microbatches))

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum them over the processes; one that is there in no process stays missing."""
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            return
        present = torch.tensor([float(p.grad is not None) for p in trained])
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        first = trained[0].grad
        assert first is not None
        present = present.to(first)  # travels with the first gradients
        self._group.sum([present, *(p.grad for p in trained if p.grad is not None)])
        counts = present.tolist()
        for parameter, count in zip(trained, counts):
            if not count:
                parameter.grad = None
        if not self._find_unused and not all(counts):
            unused = sum(1 for count in counts if not count)
            raise RuntimeError(
                f"{unused} of {len(counts)} parameters got no gradient in any process; pass "
                "DDP(find_unused_parameters=True) when that is meant"
            )


def join(request: FitRequest) -> Alone:
    """The processes of ``request``: this one, or all of its process group."""
    spec = request.distributed
    _, world = rank_and_world()
    if spec is None:
        return Alone()
    if not isinstance(spec, DDP):
        raise TypeError(f"distributed must be DDP() or None, not {type(spec).__name__}")
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            "distributed=DDP() needs a process group: call nnx.distributed.init_process_group() "
            "in a script started by torchrun"
        )
    if spec.writer_rank >= world:
        raise ValueError(f"DDP.writer_rank is {spec.writer_rank}, and the ranks end at {world - 1}")
    return Together(Group(spec.writer_rank), spec)


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
                f"distributed=DDP(), not {type(loader).__name__}: every process needs its own share"
            )
        plan = loader.partition
        if (plan.kind, plan.rank, plan.world_size) != (kind, rank, world):
            raise ValueError(
                f"{name} deals {plan.kind} rows to rank {plan.rank} of {plan.world_size}, and this "
                f"is rank {rank} of {world}: make it with nnx.distributed.{maker} after "
                "init_process_group()"
            )


__all__ = ["Alone", "Together", "join"]
