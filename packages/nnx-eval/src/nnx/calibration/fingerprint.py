"""A model's identity: the digest of its weights."""

from __future__ import annotations

import hashlib
from typing import Any

from nnx.utils.jsonlike import canonical, freeze

from .errors import CalibrationError


def model_fingerprint(model: Any) -> str:
    """``"sha256:<hex>"`` over the names, shapes, dtypes and values of a model's weights.

    ``model`` is an ``NNModel`` or a ``torch.nn.Module``. Buffers take part; the
    device, the mode and gradients do not. It changes whenever a weight does.
    """
    net = getattr(model, "net", model)
    if not callable(getattr(net, "state_dict", None)):
        raise CalibrationError(
            f"model_fingerprint takes an NNModel or a torch.nn.Module, not {type(model).__name__}"
        )
    digest = hashlib.sha256()
    weights = net.state_dict()
    for name in sorted(weights):
        value = weights[name]
        if hasattr(value, "materialize"):
            raise CalibrationError(f"{name} has no weights yet; run the model once first")
        head = (
            [name] if not hasattr(value, "shape") else [name, str(value.dtype), list(value.shape)]
        )
        digest.update(canonical(freeze(head)) + b"\0")
        digest.update(_bytes(name, value))
    return f"sha256:{digest.hexdigest()}"


def _bytes(name: str, value: Any) -> Any:
    if hasattr(value, "detach"):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else b""
    try:
        return canonical(freeze(value))
    except ValueError:
        raise CalibrationError(
            f"the extra state {name!r} is not plain data, so the model has no fingerprint; name "
            'the model yourself, for example model_id=f"{run.id}:BEST"'
        ) from None
