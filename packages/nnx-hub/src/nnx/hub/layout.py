"""The files of a model in the Hub's layout, and what its ``config.json`` may say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nnx.errors import NNxError
from nnx.utils.strict import parse_json, read_regular

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FILES = (WEIGHTS, CARD, CONFIG)
MAX_CONFIG_BYTES = 16 << 20
_KEYS = {"net_params", "params", "transforms"}


class PretrainedError(ValueError, NNxError):
    """A folder or repository that holds no model of NNx, or one that cannot be true."""


def config_of(model: Any) -> dict[str, Any]:
    """What rebuilds a model but its weights: the public states of its parts."""
    config = {
        "params": model.params.state(),
        "transforms": [transform.state() for transform in model.transforms],
    }
    net_params = getattr(model.net, "params", None) if not model.transforms else None
    if model.net_params is not None:
        kept = net_params if isinstance(net_params, type(model.net_params)) else model.net_params
        config["net_params"] = kept.state()
    return config


def to_bytes(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, sort_keys=True, allow_nan=False).encode("utf-8")


def read_config(path: str) -> dict[str, Any]:
    """The checked ``config.json`` at ``path``."""
    data = read_regular(path, limit=MAX_CONFIG_BYTES, error=PretrainedError)
    config = parse_json(data, path, error=PretrainedError)
    if not isinstance(config, dict) or not isinstance(config.get("params"), dict):
        raise PretrainedError(f"{path} describes no model of NNx: it has no params")
    unknown = sorted(config.keys() - _KEYS)
    if unknown:
        raise PretrainedError(
            f"{path} says {', '.join(unknown[:3])}, which this NNx does not know; a model saved by "
            "another library, or by a later version?"
        )
    transforms = config.setdefault("transforms", [])
    if not isinstance(transforms, list) or not all(isinstance(t, dict) for t in transforms):
        raise PretrainedError(f"{path}: transforms must be a list of records")
    if config.setdefault("net_params", None) is not None and not isinstance(
        config["net_params"], dict
    ):
        raise PretrainedError(f"{path}: net_params must be a mapping")
    return config
