"""Adapter-only files: tensors chosen by the module that owns them, never by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from nnx.utils.files import atomic_write
from torch import nn

Source = str | os.PathLike[str] | Mapping[str, Any]
Owners = tuple[tuple[type[nn.Module], tuple[str, ...]], ...]


def owned_keys(module: nn.Module, owners: Owners) -> Iterator[str]:
    """The state-dict keys of each named parameter of each owning submodule."""
    for path, child in module.named_modules(remove_duplicate=False):
        for kind, names in owners:
            if isinstance(child, kind):
                for name in names:
                    if name in child._parameters:
                        yield f"{path}.{name}" if path else name


def owned_state(module: nn.Module, owners: Owners) -> dict[str, torch.Tensor]:
    """The owned part of ``module.state_dict()``, in its order."""
    keys = set(owned_keys(module, owners))
    return {key: value for key, value in module.state_dict().items() if key in keys}


def save_owned(module: nn.Module, path: str | os.PathLike[str], owners: Owners) -> str:
    """Write the owned tensors to ``path`` as a plain tensor file."""
    return save_tensors(owned_state(module, owners), path)


def save_tensors(state: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> str:
    with atomic_write(path, "wb") as stream:
        torch.save(dict(state), stream)
    return str(path)


def load_owned(module: nn.Module, source: Source, owners: Owners) -> int:
    """Copy the owned tensors of ``source`` into ``module``; say how many there were.

    Keys that the destination does not own are ignored, so a full checkpoint
    cannot overwrite a frozen base. A tensor of another shape raises torch's
    size-mismatch ``RuntimeError`` and changes nothing.
    """
    return load_keys(module, source, set(owned_keys(module, owners)))


def load_keys(module: nn.Module, source: Source, owned: set[str]) -> int:
    """As :func:`load_owned`, for exactly these state-dict keys."""
    state = read_tensors(source)
    accepted = {key: value for key, value in state.items() if key in owned}
    before = {k: v.clone() for k, v in module.state_dict().items() if k in accepted}
    try:
        module.load_state_dict(accepted, strict=False)
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise
    return len(accepted)


def read_tensors(source: Source) -> Mapping[str, Any]:
    """A state dict from a path (tensors only, read to the CPU) or a mapping."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path, os.PathLike)):
        raise TypeError(
            f"adapter weights come from a path or a state dict, not {type(source).__name__}"
        )
    state = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"{os.fspath(source)!r} holds no state dict")
    return state
