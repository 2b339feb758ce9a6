"""What core contributes through the hooks that every plugin uses."""

from __future__ import annotations

from collections.abc import Mapping

from nnx.plugins.hookspecs import hookimpl


@hookimpl
def nnx_metrics() -> Mapping[tuple[str, int], str]:
    return {
        ("accuracy", 1): "nnx.monitors.builtin:ACCURACY",
        ("auroc", 1): "nnx.monitors.ranked:AUROC",
        ("average_precision", 1): "nnx.monitors.ranked:AVERAGE_PRECISION",
        ("brier", 1): "nnx.monitors.builtin:BRIER",
        ("f1", 1): "nnx.monitors.builtin:F1_SCORE",
        ("mae", 1): "nnx.monitors.builtin:MAE",
        ("mse", 1): "nnx.monitors.builtin:MSE",
        ("nll", 1): "nnx.monitors.builtin:NLL",
    }


@hookimpl
def nnx_objectives() -> Mapping[tuple[str, int], str]:
    return {("supervised", 1): "nnx.objectives.registered:supervised"}
