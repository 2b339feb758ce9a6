"""What nnx-hub contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl


@hookimpl
def nnx_exporters() -> Mapping[str, Any]:
    return {
        "hub.save_pretrained": "nnx.hub.saving:save_pretrained",
        "hub.from_pretrained": "nnx.hub.loading:from_pretrained",
        "hub.push_to_hub": "nnx.hub.publishing:push_to_hub",
        "onnx": "nnx.hub.exporting:to_onnx",
        "pt2": "nnx.hub.exporting:to_pt2",
        "safetensors": "nnx.hub.exporting:to_safetensors",
    }


@hookimpl
def nnx_commands() -> Mapping[str, Any]:
    return {"export": "nnx.hub.commands:export", "hub": "nnx.hub.commands:hub"}
