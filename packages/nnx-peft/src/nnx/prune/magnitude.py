"""Zeroing the smallest weights of each layer."""

from __future__ import annotations

from fnmatch import fnmatchcase

from nnx.peft.base import is_plain
from nnx.utils import validation as check
from nnx.utils.modules import module_paths, require_module, warn_unmatched
from torch import nn
from torch.nn.utils import prune


def magnitude_prune(
    net: nn.Module, sparsity: float, *, layer_pattern: str = "*", bake: bool = True
) -> int:
    """Zero the ``sparsity`` smallest weights of each matching Linear; return how many layers.

    Each ``nn.Linear`` whose dotted name matches ``layer_pattern`` loses the
    ``round(sparsity * numel)`` entries of least absolute value, in place
    (``torch.nn.utils.prune.l1_unstructured``).

    With ``bake`` (the default) the weight stays a plain parameter under its own
    key, and pruning again at the same sparsity changes nothing. ``bake=False``
    leaves torch's mask on the layer (``weight_orig`` and ``weight_mask``): zeros
    stay zero while training, and a further call prunes that fraction of what
    the mask has left. A later ``bake=True`` bakes the mask in.

    A pattern that matches no Linear is warned about. Raises ``ValueError``, and
    changes nothing, for a sparsity outside [0, 1) or a matching layer whose
    weight is parametrized.
    """
    sparsity = check.real("magnitude_prune", "sparsity", sparsity, at_least=0, below=1)
    chosen = matching_linears("magnitude_prune", net, layer_pattern)
    for layer, name in chosen.items():
        if "weight" not in layer._parameters and "weight_orig" not in layer._parameters:
            raise ValueError(
                f"the weight of {name!r} is parametrized; remove the parametrization before pruning"
            )
        weight = layer._parameters.get("weight_orig", layer._parameters.get("weight"))
        if not is_plain(weight):
            raise ValueError(
                f"the weight of {name!r} is a {type(weight).__name__}, not a plain tensor of floats; "
                "prune before you quantize"
            )
    for layer in chosen:
        _prune(layer, float(sparsity), bake)
    return len(chosen)


def matching_linears(owner: str, net: nn.Module, pattern: str) -> dict[nn.Linear, str]:
    """The Linears of ``net`` of which a path matches, with that path; warns when there is none."""
    paths = [
        (path, module)
        for path, module in module_paths(require_module(owner, net))
        if isinstance(module, nn.Linear)
    ]
    warn_unmatched(
        owner, [pattern], [path for path, _ in paths], "Linear", consequence="Nothing was pruned"
    )
    chosen: dict[nn.Linear, str] = {}
    for path, module in paths:
        if fnmatchcase(path, pattern):
            chosen.setdefault(module, path)
    return chosen


def _prune(layer: nn.Linear, sparsity: float, bake: bool) -> None:
    prune.l1_unstructured(layer, "weight", amount=sparsity)  # type: ignore[no-untyped-call,unused-ignore]
    if bake:
        prune.remove(layer, "weight")  # type: ignore[no-untyped-call,unused-ignore]
        # torch puts the weight last; optimizers and files go by a Linear's own order.
        for name in [name for name in layer._parameters if name != "weight"]:
            layer._parameters[name] = layer._parameters.pop(name)
