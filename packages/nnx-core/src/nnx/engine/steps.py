"""The four owners of a batch's update, behind one call.

A runner takes one batch and sees to its update and its record. It returns the
batch's loss for the progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nnx.engine.contexts import TrainerStepContext, TrainStepContext
from nnx.engine.owner import OwnerKind
from nnx.engine.supervised import supervised_step
from nnx.records import NNEvaluationDataPoint

if TYPE_CHECKING:
    from nnx.engine.session import FitSession


class StepRunner(Protocol):
    """One way to train on a batch."""

    def begin_epoch(self) -> None: ...

    def run(self, batch: Any, batch_idx: int, is_last: bool) -> float | None: ...

    def close(self, batch_idx: int) -> bool:
        """The epoch's batches are over: close an open window; was there an update?"""

    def window_state(self) -> dict[str, Any] | None:
        """The open window and the epoch's totals, for a point inside the epoch."""

    def resume_epoch(self, window: Any) -> None:
        """Go on with an epoch from :meth:`window_state`."""


class _EngineStep:
    """What the steps on the update engine share."""

    def __init__(self, session: FitSession) -> None:
        self.session = session
        self.engine = session.engine

    def begin_epoch(self) -> None:
        self.engine.begin_epoch()

    def window_state(self) -> dict[str, Any] | None:
        return self.engine.window_state()

    def resume_epoch(self, window: Any) -> None:
        self.engine.begin_epoch()
        self.engine.load_window_state(window)

    def close(self, batch_idx: int) -> bool:
        applied = self.engine.close(epoch_idx=self.session.epoch, batch_idx=batch_idx)
        if applied.committed:
            self.session.report_update()
        return applied.committed


class DefaultStep(_EngineStep):
    """The supervised step: forward, loss, backward, clip, update."""

    def __init__(self, session: FitSession) -> None:
        super().__init__(session)
        self.model = session.model
        self.precision = session.precision
        self.compiled = session.compiled
        self._add = session.recorder.add
        self._weighs = session.recorder.summarizes

    def run(self, batch: Any, batch_idx: int, is_last: bool) -> float | None:
        if self.compiled is not None:
            self.compiled.epoch, self.compiled.batch = self.session.epoch, batch_idx
        done = supervised_step(
            self.model, self.engine, batch, precision=self.precision, is_last=is_last,
            epoch_idx=self.session.epoch, batch_idx=batch_idx,
        )  # fmt: skip
        weight = done.weight if self._weighs else None
        self._add(done.output, done.target, done.valid, loss=done.loss, denominator=weight)
        if done.committed:
            self.session.report_update()
        return done.loss


class ObjectiveRunner(_EngineStep):
    """An objective's loss terms on the update engine."""

    def __init__(self, session: FitSession) -> None:
        from nnx.engine.objective_step import ObjectiveStep

        super().__init__(session)
        self.step = ObjectiveStep(
            session.model, session.plan.owner.function, session.engine, session.precision,
            session.params.extra_metrics,
        )  # fmt: skip

    def run(self, batch: Any, batch_idx: int, is_last: bool) -> float | None:
        session = self.session
        done = self.step(batch, epoch_idx=session.epoch, batch_idx=batch_idx, is_last=is_last)
        done.add_to(session.recorder, n_samples=samples(batch))
        session.report_events(done.applied.events)
        return done.applied.value

    def close(self, batch_idx: int) -> bool:
        applied = self.step.close(epoch_idx=self.session.epoch, batch_idx=batch_idx)
        self.session.report_events(applied.events)
        return applied.committed


class _Gradients:
    """The gradients a step function may be accumulating itself, by parameter name."""

    session: FitSession

    def gradients(self) -> dict[str, Any]:
        named = self.session.model.net.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    def load_gradients(self, saved: Mapping[str, Any]) -> None:
        for name, parameter in self.session.model.net.named_parameters():
            grad = saved.get(name)
            parameter.grad = None if grad is None else grad.to(parameter.device)


class FunctionStep(_EngineStep, _Gradients):
    """A ``train_step_fn``, which owns its update.

    One that delegates to ``default_train_step`` does so on the run's engine.
    """

    def __init__(self, session: FitSession) -> None:
        super().__init__(session)
        optim = session.params.optim
        self.fn = session.plan.owner.function
        self.fixed = {
            "model": session.model,
            "optimizer": session.primary_optimizer,
            "scaler": session.scaler,
            "grad_clip_norm": optim.grad_clip_norm,
            "extra_metrics": session.params.extra_metrics,
            "accumulate_grad_batches": optim.accumulate_grad_batches,
            "accumulation_state": session.engine,
            "epoch_summary": session.recorder,
            "precision": session.precision,
            "report_update": session.report_update,
        }

    def run(self, batch: Any, batch_idx: int, is_last: bool) -> float | None:
        ctx = TrainStepContext(
            batch=batch, batch_idx=batch_idx, epoch_idx=self.session.epoch,
            is_last_batch=is_last, **self.fixed,
        )  # fmt: skip
        record = checked_record(self.fn(ctx), "train_step_fn")
        self.session.recorder.add_record(record, n_samples=samples(batch))
        return record.loss

    def window_state(self) -> dict[str, Any] | None:
        return {"engine": self.engine.window_state(), "gradients": self.gradients()}

    def resume_epoch(self, window: Any) -> None:
        self.load_gradients(window["gradients"])
        super().resume_epoch(window["engine"])


class TrainerFunctionStep(_Gradients):
    """A ``trainer_step_fn``, which owns the updates of every named optimizer."""

    def __init__(self, session: FitSession) -> None:
        self.session = session
        self.fn = session.plan.owner.function
        self.fixed = {
            "model": session.model,
            "optimizers": session.optimizers,
            "schedulers": session.schedulers,
            "extra_metrics": session.params.extra_metrics,
            "report_update": self._report,
        }

    def _report(self, name: str) -> None:
        self.session.report_update(name)

    def begin_epoch(self) -> None:
        pass

    def run(self, batch: Any, batch_idx: int, is_last: bool) -> float | None:
        ctx = TrainerStepContext(
            batch=batch, batch_idx=batch_idx, epoch_idx=self.session.epoch, **self.fixed
        )
        record = checked_record(self.fn(ctx), "trainer_step_fn")
        self.session.recorder.add_record(record, n_samples=samples(batch))
        return record.loss

    def close(self, batch_idx: int) -> bool:
        return False

    def window_state(self) -> dict[str, Any] | None:
        return {"gradients": self.gradients()}

    def resume_epoch(self, window: Any) -> None:
        self.load_gradients(window["gradients"])


RUNNERS: Mapping[OwnerKind, Callable[[FitSession], StepRunner]] = {
    OwnerKind.DEFAULT: DefaultStep,
    OwnerKind.STEP_FUNCTION: FunctionStep,
    OwnerKind.TRAINER_STEP: TrainerFunctionStep,
    OwnerKind.OBJECTIVE: ObjectiveRunner,
}


def checked_record(record: Any, name: str) -> NNEvaluationDataPoint:
    """``record`` itself; ``TypeError`` when a step returned anything else."""
    if isinstance(record, NNEvaluationDataPoint):
        return record
    raise TypeError(
        f"{name} must return an NNEvaluationDataPoint, not {type(record).__name__}; "
        "for example NNEvaluationDataPoint(loss=float(loss))"
    )


def samples(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor or sequence."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        batch = batch[0] if batch else ()
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    graphs = getattr(batch, "num_graphs", None) or getattr(batch, "num_nodes", None)
    if graphs is not None:
        return int(graphs)
    try:
        return len(batch)
    except TypeError:
        return 1
