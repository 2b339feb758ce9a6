"""What nnx-paradigms contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl

_METRICS = (
    "deviation_mean",
    "deviation_min",
    "effective_rank",
    "knn_accuracy",
    "linear_accuracy",
    "moe_dead_experts",
    "moe_dropped",
    "moe_entropy",
    "moe_max_load",
)
_NAMES = {
    "nnx.paradigms": (
        "FeedFwdMoENN",
        "JEPAObjective",
        "JEPAPredictor",
        "JEPATrainStep",
        "MoELinear",
        "ViTBlock",
        "ViTNN",
        "born_again_train",
        "build_target_encoder",
        "cutmix_train_step_factory",
        "feature_kd_train_step_factory",
        "jepa_objective",
        "jepa_train_step_factory",
        "kd_train_step_factory",
        "mixup_train_step_factory",
        "moe_train_step_factory",
        "nt_xent_loss",
        "random_block_mask",
        "simclr_train_step_factory",
        "update_ema",
    ),
    "nnx.diffusion": (
        "DiffusionMLP",
        "DiffusionObjective",
        "NoiseSchedule",
        "NoiseSchedulers",
        "diffusion_objective",
        "diffusion_train_step_factory",
        "sample",
    ),
}


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {name: f"{room}:{name}" for room, names in _NAMES.items() for name in names}


@hookimpl
def nnx_nets() -> Mapping[str, Any]:
    return {
        "feed_fwd_moe": "nnx.paradigms.experts:FeedFwdMoENN",
        "vit": "nnx.paradigms.vit:build",
    }


@hookimpl
def nnx_objectives() -> Mapping[tuple[str, int], Any]:
    return {
        ("diffusion.noise", 1): "nnx.diffusion.training:of_config",
        ("paradigms.mixing", 1): "nnx.paradigms.augmentation:of_config",
        ("paradigms.moe", 1): "nnx.paradigms.moe:of_config",
        ("paradigms.simclr", 1): "nnx.paradigms.contrastive:of_config",
        ("paradigms.vicreg", 1): "nnx.paradigms.vicreg:of_config",
    }


@hookimpl
def nnx_model_factories() -> Mapping[tuple[str, int], Any]:
    return {
        ("diffusion.mlp", 1): "nnx.diffusion.nets:build",
        ("diffusion.unet", 1): "nnx.diffusion.unet:build",
    }


@hookimpl
def nnx_transforms() -> Mapping[tuple[str, int], Any]:
    return {("upcycle", 1): "nnx.paradigms.upcycling:UPCYCLE_OPERATION"}


@hookimpl
def nnx_metrics() -> Mapping[tuple[str, int], Any]:
    return {
        (f"paradigms.{name}", 1): f"nnx.paradigms.monitored:{name.upper()}" for name in _METRICS
    }
