"""Weights from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nnx.utils.caller import warn_caller
from nnx.utils.modules import require_module, warn_unmatched
from nnx.utils.topology import tensor_shape

# Where other trainers keep the weights in a file that holds more than weights.
_WRAPPERS = ("state_dict", "model", "net", "model_state_dict", "module")


@dataclass(frozen=True, slots=True)
class LoadPretrainedResult:
    """What :func:`load_pretrained` did, as names of the target module.

    ``loaded_keys`` were applied, ``missing_keys`` of the target had no source,
    ``unexpected_keys`` of the source (renamed) had no target.
    """

    loaded_keys: list[str]
    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    module: nn.Module,
    source: str | Path | dict[str, Any] | nn.Module,
    *,
    key_map: dict[str, str] | None = None,
    strict: bool = False,
    prefix: str | None = None,
) -> LoadPretrainedResult:
    """Copy weights from ``source`` into ``module``, by name.

    ``source`` is a state dict, a module, or the path of a file that holds a
    state dict (``.pt`` read with ``weights_only=True``, or ``.safetensors``).
    ``prefix`` is stripped from the source names that start with it; then the
    first entry of ``key_map`` that a name starts with replaces that start.

    With ``strict``, a name without a partner on either side is a ``ValueError``.
    So is, always, a tensor of another shape, and two source names that become
    one. Nothing is copied in any of these cases. A ``prefix`` or ``key_map``
    entry that no source name starts with is warned about, and so is a source
    of which nothing was loaded.
    """
    state = _read(source)
    renamed = _rename(state, key_map or {}, prefix)
    target = require_module("load_pretrained", module).state_dict()
    loaded = [name for name in renamed if name in target]
    missing = [name for name in target if name not in renamed]
    unexpected = [name for name in renamed if name not in target]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_pretrained(strict=True): the target has no weights for {_some(missing)} and "
            f"the source has no target for {_some(unexpected)}; map the names with prefix= or "
            f"key_map=, or pass strict=False"
        )
    _check_shapes(target, {name: renamed[name] for name in loaded})
    _warn_without_effect(state, renamed, target, key_map or {}, prefix)
    module.load_state_dict({name: renamed[name] for name in loaded}, strict=False)
    return LoadPretrainedResult(loaded, missing, unexpected)


def _read(source: Any) -> Mapping[str, Any]:
    if isinstance(source, nn.Module):
        return source.state_dict()
    where = "the source"
    if isinstance(source, (str, os.PathLike)):
        where = str(source)
        if not Path(source).is_file():
            raise FileNotFoundError(f"load_pretrained: there is no file {where}")
        if Path(source).suffix == ".safetensors":
            from safetensors.torch import load_file

            source = load_file(source)
        else:
            source = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(source, Mapping):
        raise TypeError(
            f"load_pretrained takes a state dict, a module or a path of a state dict; "
            f"{where} is a {type(source).__name__}"
        )
    inner = [key for key in _WRAPPERS if isinstance(source.get(key), Mapping)]
    if inner:
        raise ValueError(
            f"{where} is a checkpoint that holds a state dict under {inner[0]!r}, not a state "
            f"dict itself; pass torch.load(path, weights_only=True)[{inner[0]!r}]"
        )
    strange = [str(k) for k, v in source.items() if not isinstance(v, torch.Tensor)]
    strange = [key for key in strange if not key.endswith("_extra_state")]
    if strange:
        raise ValueError(f"{where} is not a state dict: {_some(strange)} hold no tensor")
    return source


def _rename(
    state: Mapping[str, Any], key_map: Mapping[str, str], prefix: str | None
) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in state.items():
        name = key.removeprefix(prefix) if prefix else key
        start = next((old for old in key_map if name.startswith(old)), None)
        if start is not None:
            name = key_map[start] + name[len(start) :]
        if name in renamed:
            raise ValueError(
                f"load_pretrained: {origin[name]!r} and {key!r} both become {name!r}; "
                f"make prefix= or key_map= more specific"
            )
        renamed[name], origin[name] = value, key
    return renamed


def _warn_without_effect(
    state: Mapping[str, Any],
    renamed: Mapping[str, Any],
    target: Mapping[str, Any],
    key_map: Mapping[str, str],
    prefix: str | None,
) -> None:
    """Say which of the caller's words met nothing."""
    stripped = [name.removeprefix(prefix) if prefix else name for name in state]
    starts = [f"{prefix}*"] if prefix else []
    said = warn_unmatched(
        "load_pretrained(prefix=...)", starts, state, "name of the source",
        consequence="Nothing was stripped",
    )  # fmt: skip
    said |= warn_unmatched(
        "load_pretrained(key_map=...)", [f"{start}*" for start in key_map], stripped,
        "name of the source", consequence="Nothing was renamed by it",
    )  # fmt: skip
    if renamed and target.keys().isdisjoint(renamed) and not said:
        warn_caller(
            f"load_pretrained loaded nothing: the source has {_some(list(renamed))}, the target "
            f"{_some(list(target))}. Map the names with prefix= or key_map="
        )


def _check_shapes(target: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    wrong = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not isinstance(target[name], torch.Tensor):
            continue
        ours, theirs = tensor_shape(target[name]), tensor_shape(value)
        if ours is not None and ours != theirs:
            wrong.append(f"{name} (source {theirs}, target {ours})")
    if wrong:
        raise ValueError(
            f"load_pretrained: other shapes in {_some(wrong)}; leave these entries out of the "
            f"source to keep the target's own weights"
        )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
