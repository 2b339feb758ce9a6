"""Schedulers at work: what one step counts, how far a schedule may go, what is saved of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nnx.components import ComponentSpec
from nnx.enums import Schedulers
from nnx.errors import NNxError
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.params import AnySchedulerParams
    from nnx.schedulers import Horizon

# Schedules with a last step.
BUDGETED = (Schedulers.ONE_CYCLE, Schedulers.LINEAR_WARMUP_DECAY)
EPOCH = "epoch"
UPDATE = "optimizer_update"


class ScheduleBudgetError(ValueError, NNxError):
    """A schedule was asked for more steps than it has."""


class SchedulerClock:
    """One scheduler of a fit and the events that step it.

    ``budget`` is the number of steps the schedule was built for (``total_steps``,
    ``T_max`` or ``step_size``; ``None`` for a plateau), ``limit`` the number past
    which it must not be stepped. An ``automatic`` clock is stepped by the loop; one
    that is not is stepped by a ``trainer_step_fn``. ``planned_updates`` is how many
    updates this fit means to commit, where that is known; with ``continues_plan`` they
    include those of the run it resumes.

    A clock of committed updates is a required component of every checkpoint.
    """

    def __init__(
        self,
        scheduler: Any,
        params: AnySchedulerParams,
        horizon: Horizon,
        *,
        owner: str | None = None,
        automatic: bool = True,
        planned_updates: int | None = None,
        continues_plan: bool = False,
    ) -> None:
        if params.clock == UPDATE and not hasattr(scheduler, "last_epoch"):
            raise ValueError(
                f"{type(scheduler).__name__} has no last_epoch, so its position on the "
                "optimizer_update clock is not known; use clock='epoch'"
            )
        self.scheduler = scheduler
        self.unit = params.clock
        self.owner = owner
        self.budget = horizon.steps
        self.limit = horizon.steps if params.kind in BUDGETED else None
        self.automatic = automatic
        self.planned_updates = planned_updates
        self.continues_plan = continues_plan
        self._chosen = params.T_max
        self._period = default_period(scheduler, params, horizon)
        self._follows_torch = params.kind is Schedulers.COSINE_ANNEALING and (
            getattr(scheduler, "T_max", None) == horizon.steps
        )

    @property
    def is_plateau(self) -> bool:
        """Whether the scheduler is stepped on a monitored value."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def position(self) -> int:
        """How many steps the schedule has taken."""
        return int(self.scheduler.last_epoch)

    def after_update(self) -> bool:
        """Take the step of one committed update; say whether there was one."""
        if self.unit != UPDATE or not self.automatic:
            return False
        if self.limit is not None and self.position + 1 > self.limit:
            raise ScheduleBudgetError(
                f"{self._name} has {self.limit} steps (total_steps) and the run has committed "
                f"update {self.position + 1}; set a larger total_steps in NNSchedulerParams, "
                "or train for fewer updates"
            )
        self.scheduler.step()
        self._warn_past_period()
        return True

    def after_epoch(self, plateau: float | None) -> None:
        """Take the step of one completed epoch; ``plateau`` is its monitored value."""
        if self.unit != EPOCH or not self.automatic:
            return
        if self.is_plateau:
            if plateau is not None and not math.isnan(plateau):
                self.scheduler.step(plateau)
            return
        self.scheduler.step()
        self._warn_past_period()

    def restored(self) -> None:
        """The scheduler's state was loaded: a cosine has the period of the checkpoint now."""
        if not self._follows_torch:
            return
        period = int(self.scheduler.T_max)
        passed = period == self._chosen or self.position > period
        self._period = None if passed else period

    def _warn_past_period(self) -> None:
        if self._period is not None and self.position > self._period:
            period, self._period = self._period, None
            warn_caller(
                f"{self._name} has passed its T_max of {period}; its learning rate climbs back up "
                "from here. Set T_max in NNSchedulerParams, in the run that starts the schedule, "
                "to choose the period.",
                RuntimeWarning,
            )

    @property
    def _name(self) -> str:
        kind = type(self.scheduler).__name__
        return f"the scheduler {kind} of optimizer {self.owner!r}" if self.owner else f"the {kind}"

    # A checkpointed component ------------------------------------------------------------

    def component_spec(self) -> ComponentSpec:
        name = "nnx.scheduler_clock"
        return ComponentSpec(f"{name}.{self.owner}" if self.owner else name, version=1)

    def component_state(self) -> dict[str, Any]:
        return {
            "clock": self.unit,
            "owner": self.owner,
            "budget": self.budget,
            "limit": self.limit,
            "position": self.position,
        }

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        problems = []
        if state.get("clock") != self.unit:
            problems.append(
                f"the checkpoint's scheduler counts {state.get('clock')!r}, this run's {self.unit!r}"
            )
        if state.get("owner") != self.owner:
            problems.append(
                f"the checkpoint's clock belongs to optimizer {state.get('owner')!r}, "
                f"this one to {self.owner!r}"
            )
        if state.get("budget") != self.budget:
            problems.append(
                f"the checkpoint's schedule was built for {state.get('budget')} updates, this "
                f"run's for {self.budget}; give both runs the same explicit budget "
                "(total_steps, T_max or step_size)"
            )
        elif self.limit is not None and self.planned_updates is not None:
            taken = int(state.get("position", 0))
            end = self.planned_updates + (0 if self.continues_plan else taken)
            if end > self.limit:
                problems.append(
                    f"the schedule has {self.limit} steps (total_steps); the checkpoint took "
                    f"{taken} and this run would bring them to {end}"
                )
        return problems

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        # The scheduler's own state has been restored already; the position must agree.
        saved = int(state["position"])
        if saved != self.position:
            raise ValueError(
                f"{self._name} is at step {self.position} after its state was loaded, "
                f"but the checkpoint's clock says {saved}"
            )


class UnreportedUpdates:
    """Warns when an epoch reported no update although something counts them."""

    def __init__(self, clocks: Mapping[str, SchedulerClock], checkpoint_every: int | None) -> None:
        self._idle = []
        if any(c.unit == UPDATE and c.automatic for c in clocks.values()):
            self._idle.append("the scheduler on the optimizer_update clock did not move")
        if checkpoint_every is not None:
            self._idle.append("no point inside the epoch was written (checkpoint_every)")

    def after_epoch(self, epoch: int, updates: int) -> None:
        if self._idle and updates == 0:
            warn_caller(
                f"epoch {epoch} reported no optimizer update, so "
                f"{' and '.join(self._idle)}: a step function that steps an optimizer itself "
                "must call ctx.report_update()",
                RuntimeWarning,
            )


def default_period(scheduler: Any, params: AnySchedulerParams, horizon: Horizon) -> int | None:
    """The ``T_max`` a cosine schedule got by default; ``None`` where the run chose its period."""
    if params.kind is not Schedulers.COSINE_ANNEALING or horizon.explicit:
        return None
    period = getattr(scheduler, "T_max", None)
    return period if period == horizon.steps else None
