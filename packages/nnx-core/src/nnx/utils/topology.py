"""What a module is made of, as a fingerprint. Duck-typed: importing this loads no torch."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# A default repr carries an address, which differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def qualified_name(cls: type) -> str:
    """``"package.module.Class"``: how a stored run names a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def tensor_shape(tensor: Any) -> tuple[int, ...] | None:
    """The shape as plain integers; ``None`` for a lazy tensor that has none yet."""
    if hasattr(tensor, "materialize"):
        return None
    return tuple(int(size) for size in tensor.shape)


def module_topology(module: nn.Module) -> str:
    """MD5 over what the module saves (names, shapes, dtypes) and the module's ``repr``.

    Two instances of one architecture agree, whatever their weights; a layer's
    hyperparameters (a dropout rate) take part through the ``repr``. Parameters
    of lazy layers take part without a shape.
    """
    import torch

    layout = [
        [name, tensor_shape(tensor), str(tensor.dtype)]
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]
    text = json.dumps([layout, _ADDRESS.sub("", repr(module))])
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def earlier_topology(module: nn.Module) -> str:
    """The fingerprint that descriptors of an earlier form hold, a SHA-256 over the parameters."""
    parameters = [
        [name, tensor_shape(parameter), str(parameter.dtype)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]
    document = {"parameters": parameters, "repr": _ADDRESS.sub("", repr(module))}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
