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


@hookimpl
def nnx_losses() -> Mapping[tuple[str, int], str]:
    return {
        ("binary_cross_entropy", 1): "nnx.tasks.loss_functions:binary_cross_entropy",
        ("cross_entropy", 1): "nnx.tasks.loss_functions:cross_entropy",
        ("ctc", 1): "nnx.tasks.loss_functions:ctc",
        ("focal", 1): "nnx.tasks.loss_functions:focal",
        ("gaussian_nll", 1): "nnx.tasks.loss_functions:gaussian_nll",
        ("huber", 1): "nnx.tasks.loss_functions:huber",
        ("l1", 1): "nnx.tasks.loss_functions:l1",
        ("mean_squared_error", 1): "nnx.tasks.loss_functions:mean_squared_error",
        ("negative_log_likelihood", 1): "nnx.tasks.loss_functions:negative_log_likelihood",
        ("poisson", 1): "nnx.tasks.loss_functions:poisson",
        ("smooth_l1", 1): "nnx.tasks.loss_functions:smooth_l1",
        ("triplet", 1): "nnx.tasks.loss_functions:triplet",
    }


@hookimpl
def nnx_schedulers() -> Mapping[tuple[str, int], str]:
    return {
        ("constant", 1): "nnx.registered_schedulers:constant",
        ("cosine_restarts", 1): "nnx.registered_schedulers:cosine_restarts",
        ("exponential", 1): "nnx.registered_schedulers:exponential",
        ("polynomial", 1): "nnx.registered_schedulers:polynomial",
        ("warmup_cosine", 1): "nnx.registered_schedulers:warmup_cosine",
        ("wsd", 1): "nnx.registered_schedulers:wsd",
    }
