"""The figures of the probes as metrics that can be declared and monitored by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnx.monitors import MetricDefinition
from nnx.params import MetricSpec

EMBEDDING = {
    "knn_accuracy": "max",
    "linear_accuracy": "max",
    "effective_rank": "max",
    "deviation_mean": "max",
    "deviation_min": "max",
}
ROUTING = {
    "moe_dead_experts": "min",
    "moe_max_load": "min",
    "moe_entropy": "max",
    "moe_dropped": "min",
}


def specs(names: Iterable[str]) -> list[MetricSpec]:
    """What ``NNTrainParams(metrics=...)`` takes of the figures ``names``."""
    return [MetricSpec(f"paradigms.{name}", name=name) for name in names]


def _refuse(config: Mapping[str, Any]) -> Any:
    raise ValueError("a probe computes this metric: pass it as eval_step_fn")


def _definitions(names: Mapping[str, str], probe: str) -> dict[str, MetricDefinition]:
    return {
        name: MetricDefinition(
            id=f"paradigms.{name}", version=1, input="continuous", mode=mode, factory=_refuse,
            reported=probe,
        )
        for name, mode in names.items()
    }  # fmt: skip


DEFINITIONS = {
    **_definitions(EMBEDDING, "EmbeddingProbe(...)"),
    **_definitions(ROUTING, "RoutingProbe()"),
}


def __getattr__(name: str) -> Any:  # "nnx.paradigms.monitored:KNN_ACCURACY", one name for each
    try:
        return DEFINITIONS[name.lower()]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
