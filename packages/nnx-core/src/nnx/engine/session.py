"""What is live during one fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nnx.engine import rng
from nnx.engine.callback_context import CallbackContext, overrides
from nnx.engine.clocks import SchedulerClock
from nnx.engine.contexts import takes_an_argument
from nnx.records import NNIterationDataPoint
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    import torch

    from nnx.engine.plan import FitPlan
    from nnx.engine.resume import Position
    from nnx.models import Model
    from nnx.objectives import UpdateEvent
    from nnx.records import NNEvaluationDataPoint
    from nnx.store import NNRun
    from nnx.store.writer import RunWriter


class FitSession:
    """The optimizers, clocks, records and counters of a fit in progress.

    The loop moves ``epoch``, ``global_step`` (batches), ``committed_updates`` and the
    pending batch rows; everything else is fixed when the session opens.
    """

    def __init__(self, plan: FitPlan, writer: RunWriter) -> None:
        self.plan = plan
        self.writer = writer
        self.model: Model = plan.model
        self.trainer = plan.trainer
        self.params = plan.params
        self.precision = plan.precision
        self.optimizers: Mapping[str, torch.optim.Optimizer] = plan.optimizers
        self.primary = min(plan.optimizers)
        self.primary_optimizer = plan.optimizers[self.primary]
        self.clocks: Mapping[str, SchedulerClock] = plan.clocks
        self.primary_clock = plan.clocks[self.primary]
        self.engine = plan.engine
        self.recorder = plan.recorder
        self.callbacks: Sequence[Any] = plan.callbacks
        self.loaders = {"train": plan.params.train_loader, "val": plan.params.val_loader}
        self.retention: int | None = None if plan.history is None else plan.history.retention
        # A history journal bounds what waits in memory; without one an epoch's rows wait.
        self._rows_at_most = None if plan.history is None else plan.history.chunk

        self.topology: Mapping[str, Any] = {}  # of the net, once the callbacks have begun
        self.epoch = plan.start_epoch
        self.global_step = plan.resume.start_step
        self.committed_updates = plan.resume.start_updates
        self.epoch_updates = 0
        self.updates_at_point = self.committed_updates
        self.position = plan.resume.position  # where a resumed epoch stood, until it is taken up
        self.resumed_batches = 0 if self.position is None else self.position.consumed
        self.epoch_rng: Any = None  # the streams at the epoch's start
        self.fetch_rng: Any = None  # and before the last batch that was fetched in advance
        self.rng_at_end: Any = None
        self.committed: NNIterationDataPoint | None = None
        self.discarded = False
        self.warned_unowned = False
        self._begun: list[Any] = []
        self._everything: Any = None  # the whole history, while a round of hooks reads it
        self._partial: list[NNIterationDataPoint] = []
        self._rows: list[tuple[Any, int, int, int, int | None]] = []
        self._bound: tuple[Callable[..., Any], ...] = ()
        self._listeners: list[Callable[[], Any]] = []
        self._update_hooks: list[Any] = []
        self._schedule_hooks: list[Any] = []
        self._objective_run = plan.objective is not None
        self._is_alone = plan.ranks.world_size == 1
        self.ctx = CallbackContext(self)

    def close(self) -> None:
        """The fit is over: let go of what refers back to the session.

        A cycle would keep the loaders, and their workers, until the next garbage
        collection. A callback that kept its context can go on reading it.
        """
        self.callbacks = ()
        for hooks in (self._begun, self._listeners, self._update_hooks, self._schedule_hooks):
            hooks.clear()
        self._bound = ()
        self.ctx.update_listeners = []
        del self.plan, self.ctx

    @property
    def run(self) -> NNRun:
        return self.writer.run

    @property
    def scheduler(self) -> Any:
        """The one scheduler of ``NNModel.train``; a ``Trainer`` has several."""
        return None if self.trainer is not None else self.primary_clock.scheduler

    @property
    def update_count(self) -> int | None:
        """Committed windows of the update engine, in an objective run."""
        return self.engine.updates if self._objective_run else None

    # Callbacks ---------------------------------------------------------------------------

    def dispatch(self, hook: str) -> None:
        """Call ``hook`` of every callback, in order."""
        self.ctx.idps = None
        try:
            for callback in self.callbacks:
                self._call(callback, hook)
        finally:
            self._everything = None

    def _call(self, callback: Any, hook: str) -> None:
        ctx, call = self.ctx, getattr(callback, hook)
        ctx.caller = callback
        held = ctx.held_idps
        whole = self.retention is not None and _reads_everything(callback, hook)
        if whole:
            ctx.idps = self._whole_history(callback, hook) or held
        try:
            call(ctx)
        finally:
            ctx.caller = None
            if whole:
                ctx.idps = held

    def _whole_history(self, callback: Any, hook: str) -> Any:
        """Every record, read back once for all callbacks of one round of hooks."""
        from nnx.history.journal import RecordWindow

        if self._everything is None:
            try:
                with self.writer.full_history() as records:
                    self._everything = RecordWindow(records)
            except (OSError, ValueError) as error:
                if hook != "on_train_end":
                    raise
                warn_caller(
                    f"{type(callback).__name__} gets the last records only: the history could "
                    f"not be read back ({error})",
                    RuntimeWarning,
                )
        return self._everything

    def begin(self) -> None:
        """Run every ``on_train_begin`` and take up what the callbacks registered."""
        for callback in self.callbacks:
            self._begun.append(callback)
            self._call(callback, "on_train_begin")
        listeners = self.ctx.update_listeners
        if listeners and self.trainer is not None:
            raise ValueError(
                "a callback registered an update listener, which only NNModel.train calls; "
                "use on_optimizer_update in Trainer.train(objective=...)"
            )
        self.bind_listeners()
        for callback in self.callbacks:
            if overrides(callback, "on_optimizer_update"):
                self._update_hooks.append(callback)
            if overrides(callback, "on_scheduler_step"):
                self._schedule_hooks.append(callback)

    def note_compilation(self) -> None:
        """Put what the compiler has done so far on the run, for the next commit to write."""
        if self.plan.compiled is not None:
            self.writer.run = self.writer.run.with_compile(self.plan.compiled.record)

    def end(self) -> None:
        """Run every ``on_train_end``; when one fails, the others still close."""
        self.ctx.idps = None
        try:
            while self._begun:
                self._call(self._begun.pop(0), "on_train_end")
        except BaseException:
            self.clean_up()
            raise
        finally:
            self._everything = None

    def clean_up(self) -> None:
        """After a failure: let the callbacks that began close what they opened.

        Their own errors become warnings, so that the failure stays the error raised.
        """
        self.ctx.failed = True
        while self._begun:
            callback = self._begun.pop(0)
            try:
                callback.on_train_end(self.ctx)
            except Exception as error:
                warn_caller(
                    f"{type(callback).__name__}.on_train_end failed while cleaning up: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                )

    def bind_listeners(self) -> None:
        """Read ``ctx.update_listeners`` again (the list may have grown)."""
        self._bound = tuple(self.ctx.update_listeners)
        self._listeners = [partial(f, self.ctx) if takes_an_argument(f) else f for f in self._bound]

    # Updates -----------------------------------------------------------------------------

    def report_update(self, name: str | None = None) -> None:
        """One optimizer took a committed step: move its clock, tell the listeners."""
        self.committed_updates += 1
        self.epoch_updates += 1
        self._step_clock(self.primary if name is None else name)
        self._tell_listeners()

    def report_events(self, events: Sequence[UpdateEvent]) -> None:
        """One committed window of the update engine, one event per stepped optimizer."""
        if not events:
            return
        for callback in self._update_hooks:
            self.ctx.caller = callback
            for event in events:
                callback.on_optimizer_update(self.ctx, event)
        self.ctx.caller = None
        self.committed_updates += 1
        self.epoch_updates += 1
        for event in events:
            self._step_clock(event.optimizer)
        self._tell_listeners()

    def _step_clock(self, name: str) -> None:
        clock = self.clocks.get(name)
        if clock is None:
            known = ", ".join(map(repr, self.clocks))
            raise ValueError(f"report_update({name!r}): no such optimizer; this run has {known}")
        if clock.after_update() and name == self.primary:
            for callback in self._schedule_hooks:
                self.ctx.caller = callback
                callback.on_scheduler_step(self.ctx, clock.position)

    def _tell_listeners(self) -> None:
        if len(self._bound) != len(self.ctx.update_listeners):
            self.bind_listeners()
        for registered, listener in zip(self._bound, self._listeners):
            self.ctx.caller = registered
            listener()
        self.ctx.caller = None

    # Records -----------------------------------------------------------------------------

    def row(self, lr: Any, batch_idx: int) -> None:
        """Count one batch; its scores are in the recorder."""
        self._rows.append((lr, self.global_step, self.epoch, batch_idx, self.update_count))
        self.global_step += 1
        if len(self._rows) == self._rows_at_most:
            self.flush()

    def flush(self) -> None:
        """Make the records of the batches since the last flush."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        # A hook that reads in the middle of a batch finds its scores there already, its row not.
        scores = self.recorder.take(len(rows))
        records = [
            NNIterationDataPoint(
                lr=float(lr),
                iter_idx=step,
                epoch_idx=epoch,
                batch_idx=batch,
                train_edp=edp,
                update_count=updates,
            )
            for (lr, step, epoch, batch, updates), edp in zip(rows, scores)
        ]
        self.writer.extend(records)
        if self.params.checkpoint_every:
            self._partial += records

    def amend_update_count(self) -> None:
        """The last batch's window was closed after it was recorded: count that update."""
        self.flush()
        last = self.writer.idps[-1]
        if last.update_count != self.update_count:
            self.writer.replace_last(replace(last, update_count=self.update_count))

    def records(self) -> Any:
        """Every record so far (with a history journal, its window).

        Of several processes, those of whole epochs: an exchange needs all of them.
        """
        if self._is_alone:
            self.flush()
        return self.writer.idps

    def note_fetch(self) -> None:
        """Remember the random streams before a batch is fetched in advance."""
        self.fetch_rng = rng.capture(self.loaders)

    def partial_records(self) -> list[NNIterationDataPoint]:
        """The records of the epoch in progress, for a point inside it."""
        self.flush()
        return list(self._partial)

    @property
    def updates_since_point(self) -> int:
        """Updates committed since the last resume point was written."""
        return self.committed_updates - self.updates_at_point

    def take_position(self) -> Position | None:
        """Where the resumed epoch stood; ``None`` for an epoch that starts at its start."""
        position, self.position = self.position, None
        self.fetch_rng = None
        self._partial = []
        if position is None:
            self.recorder.begin_epoch()
            return None
        self.epoch_updates = position.epoch_updates
        self.recorder.begin_epoch()
        self.recorder.load_state(dict(position.recorder))
        self._partial = list(position.records)
        self.writer.extend(self._partial)
        return position

    def epoch_summary(self) -> NNEvaluationDataPoint | None:
        """The whole-epoch training summary, in runs that declare metrics or a monitor."""
        if self.plan.objective is None:
            return self.recorder.summary()
        return self.recorder.summary(loss=self.engine.epoch_loss())

    def discard_epoch(self) -> None:
        """Drop the epoch in progress: it was stopped inside and is never committed."""
        self.discarded = True
        self._rows.clear()
        self.recorder.take()
        self.engine.discard()
        self.writer.discard_epoch()


def _reads_everything(callback: Any, hook: str) -> bool:
    return hook in ("on_epoch_end", "on_train_end") and (
        getattr(callback, "history_access", "window") == "full"
    )
