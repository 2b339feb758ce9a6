"""What is live during one fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nnx.callbacks.context import CallbackContext
from nnx.engine import build, rng
from nnx.engine.compiled import compiled_forward
from nnx.engine.decision import Judge
from nnx.engine.hooks import Hooks
from nnx.engine.rows import Rows
from nnx.models import current_net_params
from nnx.objectives import check_objective_run
from nnx.store import NNCheckpoint

if TYPE_CHECKING:
    import torch

    from nnx.engine.plan import FitPlan
    from nnx.engine.ranks.base import Ranks
    from nnx.engine.resume.point import FitStart, Position
    from nnx.models import Model
    from nnx.objectives import UpdateEvent
    from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
    from nnx.store import NNRun
    from nnx.store.writer import RunWriter


class FitSession:
    """The optimizers, clocks and counters of a fit in progress.

    To make one refuses what can only be seen of the live parts, such as a checkpoint that
    does not fit them. The loop moves ``epoch``, ``global_step`` (batches) and
    ``committed_updates``; ``hooks`` calls the callbacks, ``rows`` makes the records.
    """

    writer: RunWriter
    start: FitStart

    def __init__(self, plan: FitPlan, ranks: Ranks) -> None:
        self.plan = plan
        self.ranks = ranks
        self.model: Model = plan.model
        self.params = plan.params
        self.precision = plan.precision
        self.naming = plan.request.optimizers
        self.loaders = {"train": plan.params.train_loader, "val": plan.params.val_loader}
        self._build()
        self.primary = min(self.optimizers)
        self.primary_optimizer = self.optimizers[self.primary]
        self.schedulers = {name: clock.scheduler for name, clock in self.clocks.items()}

        history = plan.request.history
        self.retention: int | None = None if history is None else history.retention
        # A history journal bounds what waits in memory; without one an epoch's rows wait.
        at_most = None if history is None else history.chunk
        self.rows = Rows(
            self.recorder, at_most=at_most, keep=self.params.checkpoint_every is not None
        )
        self.ctx = CallbackContext(self)
        self.hooks = Hooks(plan.callbacks, self.ctx)

    def _build(self) -> None:
        plan, ranks = self.plan, self.ranks
        ranks.shard(self.model)
        self.optimizers = build.build_optimizers(plan)
        self.found = ranks.find(plan.request, self.optimizers)
        self.judge = Judge.of(plan.monitor)
        self.clocks = build.build_clocks(plan, self.optimizers)
        if plan.owner.objective is not None:
            check_objective_run(
                plan.owner.objective, self.model,
                optimizers=self.optimizers, callbacks=plan.callbacks,
            )  # fmt: skip
        self.scaler = build.build_scaler(plan)
        self.engine = build.build_engine(
            plan, self.optimizers, scaler=self.scaler, synchronize=ranks.synchronizer
        )
        self.recorder = ranks.recorder(build.build_recorder(plan))
        self.registry = build.discover_components(plan, self.engine, self.judge, self.clocks)
        self.compiled = compiled_forward(plan.request)
        if self.compiled is not None:
            self.engine.on_backward_error = self.compiled.backward_failed

    def begin_at(self, start: FitStart) -> None:
        """Set the counters to where the fit begins."""
        self.start, self.found = start, None
        self.topology: Mapping[str, Any] = {}  # of the net, once the callbacks have begun
        self.epoch = start.start_epoch
        self.global_step = start.start_step
        self.committed_updates = start.start_updates
        self.epoch_updates = 0
        self.updates_at_point = self.committed_updates
        self.position = start.position  # where a resumed epoch stood, until it is taken up
        self.resumed_batches = 0 if self.position is None else self.position.consumed
        self.epoch_rng: Any = None  # the streams at the epoch's start
        self.fetch_rng: Any = None  # and before the last batch that was fetched in advance
        self.rng_at_end: Any = None
        self.committed: NNIterationDataPoint | None = None
        self.discarded = False
        self.warned_unowned = False
        self._counts_windows = self.plan.owner.objective is not None

    def open(self, writer: RunWriter) -> None:
        """The run is reserved: ``writer`` takes what is made from now on."""
        writer.run = writer.run.with_resume_status(self.start.status())
        self.writer = self.rows.writer = writer
        self.hooks.journal = writer if self.retention is not None else None

    def close(self) -> None:
        """The fit is over: let go of what refers back to the session.

        A cycle would keep the loaders, and their workers, until the next garbage
        collection. A callback that kept its context can go on reading it.
        """
        self.ctx.update_listeners = []
        del self.plan, self.ctx, self.hooks

    # What callbacks see, beside the public attributes --------------------------------------

    @property
    def run(self) -> NNRun:
        return self.writer.run

    @property
    def trainer(self) -> Any:
        return self.naming.trainer

    @property
    def named_optimizers(self) -> Mapping[str, torch.optim.Optimizer] | None:
        return self.naming.several(self.optimizers)

    @property
    def scheduler(self) -> Any:
        return self.naming.single(self.schedulers)

    @property
    def update_count(self) -> int | None:
        """Committed windows of the update engine, in an objective run."""
        return self.engine.updates if self._counts_windows else None

    def records(self) -> Any:
        """Every record so far (with a history journal, its window).

        Of several processes, those of whole epochs: an exchange needs all of them.
        """
        if self.ranks.world_size == 1:
            self.rows.flush()
        return self.writer.idps

    def snapshot(self) -> Callable[..., NNCheckpoint]:
        """The model as it is now, a checkpoint that only lacks its record ``idp``."""
        model = self.model
        return partial(
            NNCheckpoint,
            net_params=current_net_params(model),
            net_state=copy.deepcopy(model.net.state_dict()),
            model_params=model.params,
            transforms=tuple(model.transforms),
        )

    # Updates and batches -------------------------------------------------------------------

    def report_update(self, name: str | None = None) -> None:
        """One optimizer took a committed step: move its clock, tell the listeners."""
        self.committed_updates += 1
        self.epoch_updates += 1
        self._step_clock(self.primary if name is None else name)
        self.hooks.tell_listeners()

    def report_events(self, events: Sequence[UpdateEvent]) -> None:
        """One committed window of the update engine, one event per stepped optimizer."""
        if not events:
            return
        self.hooks.updated(events)
        self.committed_updates += 1
        self.epoch_updates += 1
        for event in events:
            self._step_clock(event.optimizer)
        self.hooks.tell_listeners()

    def _step_clock(self, name: str) -> None:
        clock = self.clocks.get(name)
        if clock is None:
            known = ", ".join(map(repr, self.clocks))
            raise ValueError(f"report_update({name!r}): no such optimizer; this run has {known}")
        if clock.after_update() and name == self.primary:
            self.hooks.scheduled(clock.position)

    def row(self, lr: Any, batch_idx: int) -> None:
        """Count one batch."""
        self.rows.add(lr, self.global_step, self.epoch, batch_idx, self.update_count)
        self.global_step += 1

    @property
    def updates_since_point(self) -> int:
        """Updates committed since the last resume point was written."""
        return self.committed_updates - self.updates_at_point

    # Epochs --------------------------------------------------------------------------------

    def note_fetch(self) -> None:
        """Remember the random streams before a batch is fetched in advance."""
        self.fetch_rng = rng.capture(self.loaders)

    def take_position(self) -> Position | None:
        """Where the resumed epoch stood; ``None`` for an epoch that starts at its start."""
        position, self.position = self.position, None
        self.fetch_rng = None
        self.recorder.begin_epoch()
        if position is None:
            self.rows.begin_epoch()
            return None
        self.epoch_updates = position.epoch_updates
        self.recorder.load_state(dict(position.recorder))
        self.rows.begin_epoch(position.records)
        return position

    def epoch_summary(self) -> NNEvaluationDataPoint | None:
        """The whole-epoch training summary, in runs that declare metrics or a monitor."""
        if self._counts_windows:
            return self.recorder.summary(loss=self.engine.epoch_loss())
        return self.recorder.summary()

    def discard_epoch(self) -> None:
        """Drop the epoch in progress: it was stopped inside and is never committed."""
        self.discarded = True
        self.engine.discard()
        self.rows.discard()

    def note_compilation(self) -> None:
        """Put what the compiler has done so far on the run, for the next commit to write."""
        if self.compiled is not None:
            self.writer.run = self.writer.run.with_compile(self.compiled.record)
