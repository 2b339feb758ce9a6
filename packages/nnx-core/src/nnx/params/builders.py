"""Builders: configuration by named variants, so that an invalid mix cannot be spelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from nnx.params.builder import Builder
from nnx.params.monitor import MonitorSpec
from nnx.params.optim import AnyOptimParams
from nnx.params.registered import MetricSpec
from nnx.params.scheduler import NNSchedulerParams
from nnx.params.training import NNTrainerParams
from nnx.utils import validation as check


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

    def scheduler(self, name: str, params: NNSchedulerParams) -> NNTrainerParamsBuilder:
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
