"""The figures of a ranking as metrics that can be declared and monitored by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.monitors import MetricDefinition
from nnx.ranking.metrics import METRICS, RankingError, check_k


def _check(config: Mapping[str, Any]) -> None:
    if set(config) != {"k"}:
        raise RankingError(f'a ranking metric takes config={{"k": ...}}, not {dict(config)!r}')
    check_k(config["k"])


def _refuse(config: Mapping[str, Any]) -> Any:
    raise RankingError("a ranking metric is computed by RankingTask.eval_step() alone")


def _definition(name: str) -> MetricDefinition:
    return MetricDefinition(
        id=f"ranking.{name}", version=1, input="continuous", mode="max", factory=_refuse,
        check_config=_check, reported="RankingTask.eval_step()",
    )  # fmt: skip


DEFINITIONS = {name: _definition(name) for name in METRICS}


def __getattr__(name: str) -> Any:  # "nnx.ranking.monitored:NDCG", one name for each
    try:
        return DEFINITIONS[name.lower()]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
