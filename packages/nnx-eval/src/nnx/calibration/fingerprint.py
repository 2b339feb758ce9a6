"""A model's identity: the digest of its weights."""

from __future__ import annotations

from typing import Any

from nnx.utils.weights import fingerprint_of

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
    weights = net.state_dict()
    for name, value in weights.items():
        if hasattr(value, "materialize"):
            raise CalibrationError(f"{name} has no weights yet; run the model once first")
    try:
        return fingerprint_of(weights)
    except TypeError as error:
        raise CalibrationError(
            f"{error}, so the model has no fingerprint; name the model yourself, for example "
            'model_id=f"{run.id}:BEST"'
        ) from None
