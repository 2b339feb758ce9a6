"""What nnx-lm contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl

_NAMES = {
    "nnx.lm": (
        "GenerativeNNModel",
        "NNPreferenceDataset",
        "TransformerNN",
        "dpo_train_step_factory",
        "train_bpe",
    ),
    "nnx.generation": (
        "CustomStage",
        "LogitsChain",
        "LogitsChainBuilder",
        "LogitsProcessor",
        "LogitsStage",
        "LogitsStageCodec",
        "OrderedLogitsPipeline",
        "RepetitionPenalty",
        "TemperatureScaling",
        "TopKFilter",
        "TopPFilter",
        "apply_chain",
        "register_logits_stage_codec",
        "registered_logits_stage_codecs",
        "sample_next_token",
        "unregister_logits_stage_codec",
    ),
    "nnx.embeddings": ("text_contrastive_train_step_factory",),
}


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {name: f"{room}:{name}" for room, names in _NAMES.items() for name in names}


@hookimpl
def nnx_nets() -> Mapping[str, Any]:
    return {"transformer": "nnx.lm:TransformerNN"}


@hookimpl
def nnx_objectives() -> Mapping[tuple[str, int], Any]:
    return {("lm.causal", 1): "nnx.lm_tasks:causal_lm", ("lm.dpo", 1): "nnx.lm.dpo:dpo"}


@hookimpl
def nnx_commands() -> Mapping[str, Any]:
    return {"lm": "nnx.lm.commands:lm"}
