"""What nnx-peft contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl

_NAMES = {
    "nnx.peft": (
        "AdapterLayer",
        "DoRALinear",
        "IA3Linear",
        "LoRALinear",
        "PrefixTuner",
        "PromptTuner",
        "apply_dora_to",
        "apply_ia3_to",
        "apply_lora_to",
        "load_ia3_weights",
        "load_lora_weights",
        "load_prefix_weights",
        "load_prompt_weights",
        "save_ia3_weights",
        "save_lora_weights",
        "save_prefix_weights",
        "save_prompt_weights",
    ),
    "nnx.quantize": ("QATLifecycleCallback", "qat_train_step_factory", "quantize_int8"),
    "nnx.surgery": (
        "deepen",
        "drop_layer",
        "expand_embedding",
        "low_rank_factorize",
        "widen",
    ),
}


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {name: f"{room}:{name}" for room, names in _NAMES.items() for name in names}


@hookimpl
def nnx_transforms() -> Mapping[tuple[str, int], Any]:
    return {
        ("lora", 1): "nnx.transforms.operations:LORA_OPERATION",
        ("low_rank", 1): "nnx.transforms.operations:LOW_RANK_OPERATION",
        ("torchao_qat", 1): "nnx.quantize.qat:replay",
    }
