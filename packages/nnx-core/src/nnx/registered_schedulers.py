"""Schedules by id and version: registering them, building what a spec names, the built-in ones.

A built-in schedule multiplies the optimizer's own rate by a factor at most 1. Where a schedule
has an end it is ``total_steps`` steps of its clock long, by default the whole run, and keeps
its last factor from there on. ``floor`` is the least factor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nnx.errors import NNxError
from nnx.params.base import check_keys
from nnx.params.scheduler import SchedulerSpec
from nnx.plugins.manager import registry
from nnx.plugins.registry import UnknownIdError
from nnx.utils import validation as check

# Takes the optimizer, the spec's read-only config and, where it has an end, ``steps``.
SchedulerFactory = Callable[..., Any]
Config = Mapping[str, Any]

_KIND = "scheduler"
TOTAL_STEPS = "total_steps"  # the key of a config that sets how long the schedule is


class MissingSchedulerError(ValueError, NNxError):
    """No schedule is registered under the asked id and version."""


def register_scheduler(
    id: str, version: int, factory: SchedulerFactory, *, replace: bool = False
) -> None:
    """Register ``factory(optimizer, config)``, or ``factory(optimizer, config, steps)``.

    It returns a torch ``LRScheduler``, whose ``state_dict()`` is all that a resume restores.
    A schedule that has an end takes ``steps``: ``config["total_steps"]``, or how many steps of
    its clock the run plans. It raises ``ValueError`` for a config that it does not take.
    """
    if not callable(factory):
        raise ValueError(
            f"the schedule {id}@v{version} must be a callable factory, not {factory!r}"
        )
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    owner = f"{getattr(factory, '__module__', None)}.{name}"
    registry(_KIND).register(id, version, factory, owner=owner, replace=replace)


def unregister_scheduler(id: str, version: int) -> bool:
    """Forget a schedule; says whether it was registered."""
    return registry(_KIND).unregister(id, version)


def registered_schedulers() -> tuple[tuple[str, int], ...]:
    """The registered ``(id, version)`` pairs, sorted."""
    return registry(_KIND).keys()


def resolve_scheduler(spec: SchedulerSpec) -> SchedulerFactory:
    """The factory that ``spec`` names.

    Raises :class:`MissingSchedulerError`, which names close matches and what to install.
    """
    try:
        factory: SchedulerFactory = registry(_KIND).resolve(spec.id, spec.version)
    except UnknownIdError as error:
        raise MissingSchedulerError(
            f"{error}. Register it first: register_scheduler({spec.id!r}, {spec.version}, factory)"
        ) from None
    return factory


def has_end(spec: SchedulerSpec) -> bool:
    """Whether the schedule is made for a number of steps."""
    return "steps" in inspect.signature(resolve_scheduler(spec)).parameters


def build_registered(
    optimizer: torch.optim.Optimizer, spec: SchedulerSpec, steps: int | None
) -> LRScheduler:
    """The scheduler that ``spec`` names; ``steps`` is how long it is, where it has an end."""
    factory = resolve_scheduler(spec)
    more = {"steps": steps} if has_end(spec) else {}
    scheduler = factory(optimizer, spec.config, **more)
    if not isinstance(scheduler, LRScheduler):
        owner = registry(_KIND).owner(spec.id, spec.version)
        raise TypeError(
            f"the schedule {spec.versioned_id} of {owner} must be a torch LRScheduler, not "
            f"{type(scheduler).__name__}"
        )
    return scheduler


# The built-in schedules ------------------------------------------------------------------


@dataclass
class _Factor:
    """The factor at step ``s`` (from 0): ``(s + 1) / warmup`` first, then :meth:`after`.

    An object rather than a closure, so that ``LambdaLR`` saves its numbers.
    """

    floor: float = 0.0
    warmup: int = 0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        return max(self.floor, self.after(step - self.warmup))

    def after(self, step: int) -> float:
        return 1.0


@dataclass
class _Polynomial(_Factor):
    steps: int = 1
    power: float = 1.0

    def after(self, step: int) -> float:
        left = 1 - min(1.0, step / self.steps)
        return float(self.floor + (1 - self.floor) * left**self.power)


@dataclass
class _Cosine(_Factor):
    steps: int = 1

    def after(self, step: int) -> float:
        return _cosine(self.floor, min(1.0, step / self.steps))


@dataclass
class _Restarts(_Factor):
    period: int = 1
    growth: int = 1

    def after(self, step: int) -> float:
        period = self.period
        while step >= period:
            step, period = step - period, period * self.growth
            if self.growth == 1:
                step %= period
        return _cosine(self.floor, step / period)


@dataclass
class _Exponential(_Factor):
    gamma: float = 1.0

    def after(self, step: int) -> float:
        return float(self.gamma**step)


@dataclass
class _WarmupStableDecay(_Factor):
    stable: int = 0
    decay: int = 1

    def after(self, step: int) -> float:
        passed = min(1.0, max(0, step - self.stable) / self.decay)
        return self.floor + (1 - self.floor) * (1 - passed)


def _cosine(floor: float, passed: float) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * passed)) / 2


_count = check.count
_count_or_none = partial(check.count, at_least=0)
_floor = partial(check.real, at_least=0, at_most=1)


def _read(id: str, config: Config, takes: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    owner = f"the schedule {id!r}"
    check_keys(f"the config of {owner}", config, takes)
    return {key: takes[key](owner, key, value) for key, value in config.items()}


def _parts(id: str, steps: int | None, *parts: int) -> int:
    """What is left of ``steps`` beside ``parts``, at least one step."""
    if steps is None:
        raise ValueError(
            f"the schedule {id!r} needs total_steps in its config when the number of steps is "
            "not known in advance (a custom step, or a loader without a length)"
        )
    if sum(parts) > steps:
        raise ValueError(
            f"the schedule {id!r} is {steps} steps long, which its warm-up and decay "
            f"({' + '.join(map(str, parts))} steps) exceed"
        )
    return max(1, steps - sum(parts))


def _tenth(steps: int | None) -> int:
    return max(1, (steps or 0) // 10)


def constant(optimizer: torch.optim.Optimizer, config: Config) -> LRScheduler:
    """The optimizer's own rate, after ``warmup_steps`` (0)."""
    read = _read("constant", config, {"warmup_steps": _count_or_none})
    return LambdaLR(optimizer, _Factor(warmup=read.get("warmup_steps", 0)))


def exponential(optimizer: torch.optim.Optimizer, config: Config) -> LRScheduler:
    """Times ``gamma`` (0.95) at every step, not below ``floor``."""
    takes: dict[str, Callable[..., Any]] = {
        "gamma": partial(check.real, above=0, at_most=1),
        "floor": _floor,
    }
    read = {"gamma": 0.95, **_read("exponential", config, takes)}
    return LambdaLR(optimizer, _Exponential(**read))


def cosine_restarts(optimizer: torch.optim.Optimizer, config: Config) -> LRScheduler:
    """Cosines of ``period`` (10) steps, each ``growth`` (1) times as long as the one before."""
    takes: dict[str, Callable[..., Any]] = {"period": _count, "growth": _count, "floor": _floor}
    read = {"period": 10, **_read("cosine_restarts", config, takes)}
    return LambdaLR(optimizer, _Restarts(**read))


def polynomial(optimizer: torch.optim.Optimizer, config: Config, steps: int | None) -> LRScheduler:
    """From 1 to ``floor`` as ``(1 - s / steps) ** power`` (1.0), after ``warmup_steps`` (0)."""
    takes: dict[str, Callable[..., Any]] = {
        "power": partial(check.real, above=0), "floor": _floor,
        "warmup_steps": _count_or_none, "total_steps": _count,
    }  # fmt: skip
    read = _read("polynomial", config, takes)
    warmup = read.get("warmup_steps", 0)
    factor = _Polynomial(
        read.get("floor", 0.0), warmup, _parts("polynomial", steps, warmup), read.get("power", 1.0)
    )
    return LambdaLR(optimizer, factor)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, config: Config, steps: int | None
) -> LRScheduler:
    """Up over ``warmup_steps`` (a tenth), then half a cosine down to ``floor`` (0)."""
    takes: dict[str, Callable[..., Any]] = {
        "floor": _floor,
        "warmup_steps": _count_or_none,
        "total_steps": _count,
    }
    read = _read("warmup_cosine", config, takes)
    warmup = read.get("warmup_steps", _tenth(steps))
    factor = _Cosine(read.get("floor", 0.0), warmup, _parts("warmup_cosine", steps, warmup))
    return LambdaLR(optimizer, factor)


def wsd(optimizer: torch.optim.Optimizer, config: Config, steps: int | None) -> LRScheduler:
    """Warm-up, stable, decay (Hu et al., 2024): up over ``warmup_steps``, then 1, and over the
    last ``decay_steps`` straight down to ``floor`` (0). Both are a tenth by default.
    """
    takes: dict[str, Callable[..., Any]] = {
        "floor": _floor, "warmup_steps": _count_or_none, "decay_steps": _count,
        "total_steps": _count,
    }  # fmt: skip
    read = _read("wsd", config, takes)
    warmup = read.get("warmup_steps", _tenth(steps))
    decay = read.get("decay_steps", _tenth(steps))
    _parts("wsd", steps, warmup, decay)
    assert steps is not None
    factor = _WarmupStableDecay(read.get("floor", 0.0), warmup, steps - warmup - decay, decay)
    return LambdaLR(optimizer, factor)
