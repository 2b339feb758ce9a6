"""What nnx-eval contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl

_RANKING = ("mrr", "recall", "ndcg", "map", "err", "precision", "hit_rate")


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {"ExperimentPlan": "nnx.plans:ExperimentPlan", "FitResult": "nnx.plans:FitResult"}


@hookimpl
def nnx_metrics() -> Mapping[tuple[str, int], Any]:
    return {(f"ranking.{name}", 1): f"nnx.ranking.monitored:{name.upper()}" for name in _RANKING}


@hookimpl
def nnx_commands() -> Mapping[str, Any]:
    return {
        "bench": "nnx.benchmarking.commands:bench",
        "calibrate": "nnx.decisions.commands:calibrate",
        "decide": "nnx.decisions.commands:decide",
        "sweep": "nnx.search.commands:sweep",
    }
