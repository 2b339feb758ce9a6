"""Learning-rate schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nnx.enums import Schedulers
from nnx.params.base import Params, StateField, always, encode_enum, member, optional, put
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.params.builders import NNSchedulerParamsBuilder

SchedulerClockUnit = Literal["epoch", "optimizer_update"]
CLOCK_UNITS = ("epoch", "optimizer_update")
_COUNTS = ("step_size", "T_max", "total_steps", "warmup_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class NNSchedulerParams(Params):
    """A schedule; ``kind=None`` is the plateau schedule.

    ``factor`` multiplies the rate of a plateau or step schedule; ``patience``,
    ``cooldown`` (epochs) and ``threshold`` belong to the plateau. ``clock`` says
    what one step counts, and with it the unit of ``step_size``, ``T_max``,
    ``total_steps`` and ``warmup_steps``.
    """

    min_lr: float
    factor: float
    patience: int
    cooldown: int
    threshold: float
    kind: Schedulers | None = None
    step_size: int | None = None
    T_max: int | None = None
    max_lr: float | None = None
    total_steps: int | None = None
    warmup_steps: int | None = None
    clock: SchedulerClockUnit = "epoch"

    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("min_lr"),
        always("factor"),
        always("cooldown"),
        always("patience"),
        always("threshold"),
        optional("kind", encode=encode_enum, decode=lambda v: v and member(Schedulers)(v)),
        optional("step_size"),
        optional("T_max"),
        optional("max_lr"),
        optional("total_steps"),
        optional("warmup_steps"),
        optional("clock"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.kind is not None:
            check.instance(owner, "kind", self.kind, Schedulers)
        plateau = self.is_plateau
        put(
            self,
            min_lr=check.real(owner, "min_lr", self.min_lr, at_least=0),
            factor=check.real(owner, "factor", self.factor, above=0, below=1 if plateau else None),
            patience=check.count(owner, "patience", self.patience, at_least=0),
            cooldown=check.count(owner, "cooldown", self.cooldown, at_least=0),
            threshold=check.real(owner, "threshold", self.threshold, at_least=0),
            clock=check.choice(owner, "clock", self.clock, CLOCK_UNITS),
        )
        if self.max_lr is not None:
            put(self, max_lr=check.real(owner, "max_lr", self.max_lr, above=0))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None:
                put(self, **{name: check.count(owner, name, value)})
        if plateau and self.clock == "optimizer_update":
            check.refuse(
                owner, "clock", self.clock, "'epoch' for a plateau schedule, which reads a metric"
            )

    @property
    def is_plateau(self) -> bool:
        """Whether this is the metric-driven schedule (``kind`` left out or named)."""
        return self.kind is None or self.kind is Schedulers.REDUCE_LR_ON_PLATEAU

    @classmethod
    def builder(cls) -> NNSchedulerParamsBuilder:
        """A builder with one method per schedule."""
        from nnx.params.builders import NNSchedulerParamsBuilder

        return NNSchedulerParamsBuilder()
