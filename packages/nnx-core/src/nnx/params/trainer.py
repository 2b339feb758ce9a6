"""How a model is trained by several optimizers under their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nnx.params.base import Converted, StateField, always, converted, optional, put
from nnx.params.builder import Builder
from nnx.params.monitor import MonitorSpec
from nnx.params.optim import (
    AnyOptimParams,
    NNOptimFactoryParams,
    NNOptimParams,
    optim_params_from_state,
)
from nnx.params.registered import MetricSpec
from nnx.params.scheduler import AnySchedulerParams, scheduler_from_state, scheduler_of
from nnx.params.training import LINEAGE, METRICS, Training, check_training
from nnx.utils import validation as check
from nnx.utils.jsonlike import FrozenDict


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name].state() for name in sorted(values)}


def _read_by_name(states: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(states, Mapping):
        raise ValueError(f"expected a mapping from names, not {check.show(states)}")
    return {name: read(state) for name, state in states.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NNTrainerParams(Training):
    """A training with several named optimizers, each over its own parameters.

    ``schedulers`` may name any of ``optims``; the others get the default
    plateau schedule. ``auto_step_schedulers=False`` leaves the stepping of all
    schedules to the step function. ``name`` and ``tags`` are for finding the run again.
    """

    n_epochs: int
    optims: Mapping[str, AnyOptimParams]
    schedulers: Converted[
        Mapping[str, AnySchedulerParams], Mapping[str, AnySchedulerParams | str | None]
    ] = converted(field(default_factory=FrozenDict))
    seed: int | None = None
    data_id: str | None = None
    save_phase_checkpoints: bool = True
    auto_step_schedulers: bool = True
    overwrite_existing: bool = False
    train_loader: Iterable[Any] | None = field(default=None, repr=False)
    val_loader: Iterable[Any] | None = field(default=None, repr=False)
    extra_metrics: Mapping[str, Callable[..., Any]] | None = None
    resume_from_run_id: str | None = None
    resume_from_checkpoint: str | None = "last"
    parent_run_id: str | None = None
    resume_mode: str = "auto"
    metrics: Sequence[MetricSpec] = ()
    monitor: MonitorSpec | None = None
    checkpoint_every: int | None = None
    name: str | None = None
    tags: Sequence[str] = ()

    _SECTION: ClassVar[str] = "trainer"
    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("n_epochs"),
        StateField(
            "optims",
            always=True,
            encode=_by_name,
            decode=lambda states: _read_by_name(states, optim_params_from_state),
        ),
        StateField(
            "schedulers",
            encode=_by_name,
            decode=lambda states: _read_by_name(states, scheduler_from_state),
        ),
        optional("seed"),
        optional("save_phase_checkpoints"),
        optional("data_id"),
        optional("auto_step_schedulers"),
        *LINEAGE,
        *METRICS,
        optional("checkpoint_every"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        kinds = (NNOptimParams, NNOptimFactoryParams)
        put(
            self,
            optims=_named(owner, "optims", self.optims, kinds),
            schedulers=_schedules(owner, self.schedulers),
        )
        if not self.optims:
            check.refuse(owner, "optims", {}, "at least one named optimizer")
        strangers = [name for name in self.schedulers if name not in self.optims]
        if strangers:
            raise ValueError(
                f"{owner}.schedulers names {', '.join(map(repr, strangers))}, which no optimizer "
                f"has{check.close(strangers[0], self.optims)} (optims: {', '.join(self.optims)})"
            )
        check_training(self)
        put(
            self,
            auto_step_schedulers=check.flag(
                owner, "auto_step_schedulers", self.auto_step_schedulers
            ),
        )

    @classmethod
    def builder(cls) -> NNTrainerParamsBuilder:
        """A builder that names optimizers and their schedules one by one."""
        return NNTrainerParamsBuilder()


def _schedules(owner: str, value: Any) -> FrozenDict[str, AnySchedulerParams]:
    named = _named(owner, "schedulers", value, (object,))
    return FrozenDict(
        {name: scheduler_of(owner, f"schedulers[{name!r}]", one) for name, one in named.items()}
    )


def _named(
    owner: str, field_name: str, value: Any, kinds: tuple[type, ...]
) -> FrozenDict[str, Any]:
    if not isinstance(value, Mapping):
        check.refuse(owner, field_name, value, "a mapping from names")
    for name, params in value.items():
        check.text(owner, f"{field_name} name", name)
        check.instance(owner, f"{field_name}[{name!r}]", params, kinds)
    return FrozenDict(value)


class NNTrainerParamsBuilder(Builder[NNTrainerParams]):
    """Names optimizers and their schedules one by one."""

    _builds = NNTrainerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "n_epochs": ".n_epochs(N)",
        "optims": ".optimizer(name, params)",
    }

    def build(self) -> NNTrainerParams:
        """The params value; every scheduler must belong to an optimizer."""
        optims = self._fields.get("optims", {})
        for name in self._fields.get("schedulers", {}):
            if name not in optims:
                known = ", ".join(map(repr, optims)) or "none"
                raise ValueError(
                    f".scheduler({name!r}, ...) has no optimizer of that name"
                    f"{check.close(name, optims)} (optimizers: {known}); "
                    f"call .optimizer({name!r}, ...) before .build()"
                )
        return super().build()

    def n_epochs(self, n: int) -> NNTrainerParamsBuilder:
        return self._set(n_epochs=n)

    def optimizer(self, name: str, params: AnyOptimParams) -> NNTrainerParamsBuilder:
        """Add or replace the optimizer ``name``."""
        return self._set(optims={**self._fields.get("optims", {}), name: params})

    def scheduler(
        self, name: str, params: AnySchedulerParams | str | None
    ) -> NNTrainerParamsBuilder:
        """Add or replace the schedule of the optimizer ``name``."""
        return self._set(schedulers={**self._fields.get("schedulers", {}), name: params})

    def train_loader(self, loader: Iterable[Any]) -> NNTrainerParamsBuilder:
        return self._set(train_loader=loader)

    def val_loader(self, loader: Iterable[Any]) -> NNTrainerParamsBuilder:
        return self._set(val_loader=loader)

    def seed(self, value: int) -> NNTrainerParamsBuilder:
        return self._set(seed=value)

    def data_id(self, value: str) -> NNTrainerParamsBuilder:
        return self._set(data_id=value)

    def save_phase_checkpoints(self, value: bool) -> NNTrainerParamsBuilder:
        return self._set(save_phase_checkpoints=value)

    def auto_step_schedulers(self, value: bool) -> NNTrainerParamsBuilder:
        """``False`` leaves the stepping of the schedules to the step function."""
        return self._set(auto_step_schedulers=value)

    def overwrite_existing(self, value: bool) -> NNTrainerParamsBuilder:
        return self._set(overwrite_existing=value)

    def checkpoint_every(self, updates: int) -> NNTrainerParamsBuilder:
        """Write a resume point inside the epoch after so many committed updates."""
        return self._set(checkpoint_every=updates)

    def extra_metrics(self, metrics: Mapping[str, Callable[..., Any]]) -> NNTrainerParamsBuilder:
        """Callables ``(y_true, y_pred)`` by name."""
        return self._set(extra_metrics=metrics)

    def metrics(self, *specs: MetricSpec) -> NNTrainerParamsBuilder:
        """Declare the metrics, replacing those declared before."""
        return self._set(metrics=specs)

    def monitor(self, spec: MonitorSpec) -> NNTrainerParamsBuilder:
        return self._set(monitor=spec)

    def resume_from(
        self, run_id: str, checkpoint: str = "last", mode: str = "auto"
    ) -> NNTrainerParamsBuilder:
        """Continue ``run_id`` from its ``checkpoint``; an earlier lineage is replaced."""
        return self._replace(
            ("parent_run_id",),
            resume_from_run_id=run_id,
            resume_from_checkpoint=checkpoint,
            resume_mode=mode,
        )
