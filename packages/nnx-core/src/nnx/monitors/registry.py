"""The metrics that can be declared, by id and version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nnx.params.monitor import MODES
from nnx.plugins.manager import registry

if TYPE_CHECKING:
    import numpy as np

METRIC_INPUTS = ("labels", "probabilities", "continuous")
"""What a metric can read: decoded labels, probabilities, or raw continuous outputs."""

_KIND = "metric"


class MetricAccumulator(Protocol):
    """One pass of a metric over the data.

    Also optional: ``merge(other)``, which adds another accumulator in place and
    keeps nothing of it, makes the metric mergeable and bounded; the attribute
    ``stores_scores = True`` says that it keeps every score nevertheless;
    ``state()`` and ``load_state(state)`` (tensors, numbers and strings) let a
    run continue it from the middle of an epoch.
    """

    def update(self, target: np.ndarray, prediction: np.ndarray) -> None:
        """Add the valid samples of a batch.

        "labels": class indices or 0/1 decisions, ``(n,)`` and ``(n,)``.
        "probabilities": targets ``(n,)`` and ``(n, C)``, or ``(n,)`` of
        independent outputs. "continuous": ``(n,)`` and ``(n,)``.
        """

    def result(self) -> float | None:
        """The value over everything added; ``None`` when there is none."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A registered metric: what it reads, which direction is better, how it is made.

    ``reported`` names the evaluation step that alone can compute it (from what outputs
    and targets do not hold); the built-in evaluation then refuses it.
    """

    id: str
    version: int
    input: str
    mode: str
    factory: Callable[[Mapping[str, Any]], MetricAccumulator]
    check_config: Callable[[Mapping[str, Any]], None] | None = None
    reported: str | None = None

    def __post_init__(self) -> None:
        name = f"metric {self.id!r}"
        if self.input not in METRIC_INPUTS:
            raise ValueError(
                f"{name}: input must be {', '.join(METRIC_INPUTS)}, not {self.input!r}"
            )
        if self.mode not in MODES:
            raise ValueError(f"{name}: mode must be 'min' or 'max', not {self.mode!r}")
        for field in ("factory", "check_config"):
            value = getattr(self, field)
            if not callable(value) and not (field == "check_config" and value is None):
                raise TypeError(f"{name}: {field} must be callable, not {type(value).__name__}")


def register_metric(
    id: str,
    version: int,
    factory: Callable[[Mapping[str, Any]], MetricAccumulator],
    *,
    input: str,
    mode: str,
    check_config: Callable[[Mapping[str, Any]], None] | None = None,
    replace: bool = False,
) -> None:
    """Register a metric for this process under ``(id, version)``.

    ``factory(config)`` returns a fresh :class:`MetricAccumulator`. ``input`` is
    one of :data:`METRIC_INPUTS`, ``mode`` "min" or "max". ``check_config``
    raises on a config the metric does not take; it runs before training. A
    taken key is refused unless ``replace`` is set.
    """
    definition = MetricDefinition(
        id=id, version=version, input=input, mode=mode, factory=factory, check_config=check_config
    )
    owner = f"{getattr(factory, '__module__', None)}.{getattr(factory, '__qualname__', factory)}"
    registry(_KIND).register(id, version, definition, owner=owner, replace=replace)


def unregister_metric(id: str, version: int) -> bool:
    """Remove a metric; say whether one was registered."""
    return registry(_KIND).unregister(id, version)


def registered_metrics() -> tuple[tuple[str, int], ...]:
    """The registered ``(id, version)`` pairs, sorted."""
    return registry(_KIND).keys()
