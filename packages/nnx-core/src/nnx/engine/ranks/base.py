"""The processes of a fit, as the rest of the engine asks them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nnx.engine.resume.point import find_point
from nnx.store.writer import RunWriter

if TYPE_CHECKING:
    import torch

    from nnx.callbacks.context import CallbackContext
    from nnx.engine.owner import UpdateOwner
    from nnx.engine.request import FitRequest
    from nnx.engine.window import WindowSynchronizer
    from nnx.models import Model
    from nnx.prediction.inference import EvaluationTotals
    from nnx.records import NNEvaluationDataPoint
    from nnx.store import NNRun
    from nnx.store.points import ResumePoint
    from nnx.tasks.recorder import EpochRecorder

T = TypeVar("T")


class Ranks:
    """The processes that train one model.

    As it is, it is the only process, where nothing is exchanged. What several do
    otherwise is in its subclasses; the engine calls them without asking which it has.
    """

    is_writer = True
    world_size = 1
    synchronizer: WindowSynchronizer | None = None

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self, request: FitRequest) -> None:
        """Refuse what these processes cannot train together."""

    def shard(self, model: Model) -> None:
        """Before optimizers are built: spread the parameters over the processes."""

    def find(self, request: FitRequest, optimizers: Mapping[str, Any]) -> ResumePoint | None:
        """The point that the request resumes, with the tensors this process restores."""
        return find_point(request)

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

    def begin(self, run_id: str, net: torch.nn.Module, ctx: CallbackContext) -> None:
        """After the callbacks have begun, before the first epoch."""

    def stops_now(self, ctx: CallbackContext) -> bool:
        """Whether training ends after the batch just trained on."""
        return ctx.stop_at_update

    def stops_after_epoch(self, ctx: CallbackContext) -> bool:
        return ctx.should_stop or ctx.stop_at_update

    def extra_batches(self, loader: Any) -> Iterable[Any]:
        """Batches to run after this process's own validation batches, for the others' sake."""
        return ()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Around an evaluation by the caller's own function."""
        return contextlib.nullcontext()

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
        way_out = "resume with the same number"
        if saved.get("sharded"):
            way_out += ", or make it an ordinary one with nnx.distributed.gather_checkpoint"
        return [
            f"the checkpoint was trained by {saved['world_size']} processes, this run is one "
            f"process; {way_out}"
        ]

    def after_epoch(self, net: torch.nn.Module, owner: UpdateOwner, updates: int) -> None:
        """Between an epoch's last batch and its validation."""
