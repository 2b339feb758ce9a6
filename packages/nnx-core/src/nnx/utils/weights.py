"""The identity of weights: a digest of names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from nnx.utils.jsonlike import canonical
from nnx.utils.tensor_file import DTYPES, as_stored, dtype_name


def fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[Any]]]) -> str:
    """``"sha256:<hex>"`` of tensors, in the order of their names.

    Each is a name, a dtype (as a file's header names it), a shape and its bytes in parts.
    """
    digest = hashlib.sha256()
    for name, dtype, shape, data in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(canonical([name, f"torch.{DTYPES[dtype][0]}", list(shape)]) + b"\0")
        for part in data:
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def fingerprint_of(state: Mapping[str, Any]) -> str:
    """:func:`fingerprint` of a state dict; ``TypeError`` for what is no dense tensor."""
    import torch

    def parts() -> Iterable[tuple[str, str, tuple[int, ...], Iterable[Any]]]:
        for name, value in state.items():
            tensor = as_stored(name, value)
            flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
            data = [flat.numpy().data] if tensor.numel() else []
            yield name, dtype_name(tensor.dtype) or "", tuple(tensor.shape), data

    return fingerprint(parts())
