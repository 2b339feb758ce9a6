"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from nnx.enums import Schedulers
from nnx.params.base import (
    Converted,
    Params,
    StateField,
    always,
    converted,
    encode_enum,
    field_names,
    member,
    optional,
    put,
)
from nnx.params.builder import Builder
from nnx.params.registered import _read, _Registered
from nnx.utils import validation as check
from nnx.utils.jsonlike import thaw

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
    kind: Converted[Schedulers | None, str] = converted(None)
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
            put(self, kind=check.member(owner, "kind", self.kind, Schedulers))
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
        return NNSchedulerParamsBuilder()


class NNSchedulerParamsBuilder(Builder[NNSchedulerParams]):
    """One method per schedule; the clock survives a change of schedule."""

    _builds = NNSchedulerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "min_lr": "one of .reduce_on_plateau(...), .step(...), .cosine_annealing(...), "
        ".one_cycle(...), .linear_warmup_decay(...)"
    }
    _VARIANT = tuple(n for n in field_names(NNSchedulerParams) if n != "clock")

    def reduce_on_plateau(
        self, *, min_lr: float, factor: float, patience: int, cooldown: int, threshold: float
    ) -> NNSchedulerParamsBuilder:
        """Cut the rate by ``factor`` when the watched number stops improving.

        ``kind`` stays ``None``, which is how this schedule is stored.
        """
        return self._schedule(None, min_lr, factor, patience, cooldown, threshold)

    def step(
        self,
        *,
        step_size: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Multiply the rate by ``factor`` every ``step_size`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(Schedulers.STEP, *plateau, step_size=step_size)

    def cosine_annealing(
        self,
        *,
        T_max: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Anneal to ``min_lr`` along half a cosine of ``T_max`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(Schedulers.COSINE_ANNEALING, *plateau, T_max=T_max)

    def one_cycle(
        self,
        *,
        max_lr: float,
        total_steps: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Rise to ``max_lr`` and fall again within ``total_steps`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(
            Schedulers.ONE_CYCLE, *plateau, max_lr=max_lr, total_steps=total_steps
        )

    def linear_warmup_decay(
        self,
        *,
        warmup_steps: int,
        total_steps: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Rise linearly over ``warmup_steps``, then fall linearly to 0 at ``total_steps``."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(
            Schedulers.LINEAR_WARMUP_DECAY,
            *plateau,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
        )

    def clock(self, clock: str) -> NNSchedulerParamsBuilder:
        """What one step counts: "epoch" or "optimizer_update"."""
        return self._set(clock=clock)

    def _schedule(
        self,
        kind: Schedulers | None,
        min_lr: Any,
        factor: Any,
        patience: Any,
        cooldown: Any,
        threshold: Any,
        **own: Any,
    ) -> NNSchedulerParamsBuilder:
        named = {} if kind is None else {"kind": kind}
        return self._replace(
            self._VARIANT,
            min_lr=min_lr,
            factor=factor,
            patience=patience,
            cooldown=cooldown,
            threshold=threshold,
            **named,
            **own,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerSpec(_Registered):
    """A schedule that a registered factory builds from ``config``.

    Built in are ``constant``, ``warmup_cosine``, ``polynomial``, ``exponential``,
    ``cosine_restarts`` and ``wsd``; :mod:`nnx.registered_schedulers` says what each takes.
    ``clock`` is what one step counts.
    """

    id: str
    version: int = 1
    config: Mapping[str, Any] = None  # type: ignore[assignment]
    clock: SchedulerClockUnit = field(default="epoch", kw_only=True)

    # What the engine asks of either kind of schedule.
    kind: ClassVar[None] = None
    T_max: ClassVar[None] = None
    is_plateau: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _Registered._check(self)
        put(self, clock=check.choice("SchedulerSpec", "clock", self.clock, CLOCK_UNITS))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"id": self.id, "version": self.version}
        if self.config:
            state["config"] = thaw(self.config)
        if self.clock != "epoch":
            state["clock"] = self.clock
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> SchedulerSpec:
        return SchedulerSpec(**_read("SchedulerSpec", state, ("id", "version", "config", "clock")))


AnySchedulerParams: TypeAlias = NNSchedulerParams | SchedulerSpec

DEFAULT_SCHEDULER = NNSchedulerParams(
    min_lr=1e-7, factor=0.95, patience=8, cooldown=2, threshold=1e-3
)


def scheduler_of(owner: str, field: str, value: Any) -> AnySchedulerParams:
    """A schedule, the name of one, or ``None`` for a constant rate, as what is stored.

    "plateau" is the default plateau schedule; the other members of ``Schedulers`` have its
    numbers beside their own defaults.
    """
    if value is None:
        return SchedulerSpec("constant")
    if not isinstance(value, str):
        kinds = (NNSchedulerParams, SchedulerSpec)
        found: AnySchedulerParams = check.instance(owner, field, value, kinds)
        return found
    words = {"plateau": Schedulers.REDUCE_LR_ON_PLATEAU, **check.member_words(Schedulers)}
    kind = words.get(value.lower())
    if kind is Schedulers.REDUCE_LR_ON_PLATEAU:
        return DEFAULT_SCHEDULER
    if kind is not None:
        return replace(DEFAULT_SCHEDULER, kind=kind)
    from nnx.plugins import manager

    registered = {id for id, version in manager.registry("scheduler") if version == 1}
    for word in (value, value.lower()):
        if word in registered:
            return SchedulerSpec(word)
    known = sorted({*registered, "plateau", *(one.value for one in Schedulers)})
    raise ValueError(
        f"{owner}.{field} must be one of {', '.join(known)}, not {check.show(value)}"
        f"{check.close(value.lower(), known)}"
    )


def scheduler_from_state(state: Any) -> AnySchedulerParams:
    """Rebuild a built-in or a registered schedule; nothing has to be registered."""
    if isinstance(state, Mapping) and "id" in state:
        return SchedulerSpec.from_state(state)
    return NNSchedulerParams.from_state(state)
