"""Folding trained adapters into their base, and taking them out again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from nnx.peft.base import AdaptedLayer, is_plain
from nnx.peft.placement import Slot, slots
from torch import nn


def merge_adapters(module: nn.Module, *, unload: bool = False) -> int:
    """Fold every adapter below ``module`` into its base layer; return how many.

    The base weights then alone compute what the adapted model computes in eval
    mode, with the active adapters and their trained scale, up to rounding in
    the weight's dtype. The original weights are kept for
    :func:`unmerge_adapters`, and ``state_dict()`` goes on to hold them;
    ``module.train()`` unmerges too.

    ``unload=True`` merges for good: each wrapper gives its place to the plain
    base layer, which stays frozen, and the names lose their ``.base.`` segment.

    Raises ``ValueError``, and changes nothing, when a base weight is not a
    plain parameter of floats (a quantized one cannot hold the sum) or is shared
    with another layer, which merging would change too.
    """
    if unload and isinstance(module, AdaptedLayer):
        raise ValueError("the root is itself a wrapper; merge without unload and take its .base")
    places = _wrapper_slots(module)
    wrappers = {id(slot.module): slot.module for slot in places}
    _refuse_unmergeable(module, list(wrappers.values()))  # type: ignore[arg-type]
    merged: list[AdaptedLayer] = []
    try:
        for wrapper in wrappers.values():
            if wrapper.merge():  # type: ignore[operator]
                merged.append(wrapper)  # type: ignore[arg-type]
    except BaseException:
        for done in merged:
            done.unmerge()
        raise
    if unload:
        _unload(places)
        return len(wrappers)
    return len(merged)


def unmerge_adapters(module: nn.Module) -> int:
    """Undo :func:`merge_adapters`, restoring every base bit for bit; return how many."""
    layers = [m for m in module.modules() if isinstance(m, AdaptedLayer)]
    for layer in layers:
        layer.check_unmergeable()
    return sum(layer.unmerge() for layer in layers)


def unload_merged(module: nn.Module) -> None:
    """Give the places of merged wrappers below ``module`` to their plain bases, for good."""
    _unload(slot for slot in _wrapper_slots(module) if slot.module.merged and slot.path)


def _unload(places: Iterable[Slot]) -> None:
    for slot in places:
        setattr(slot.parent, slot.name, slot.module.base)


def _wrapper_slots(module: nn.Module) -> list[Slot]:
    found = [slot for slot in slots(module) if isinstance(slot.module, AdaptedLayer)]
    if isinstance(module, AdaptedLayer):
        found.append(Slot(nn.Module(), "", module, [""]))
    return found


def _refuse_unmergeable(module: nn.Module, wrappers: list[AdaptedLayer]) -> None:
    holders: dict[int, list[str]] = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    for wrapper in wrappers:
        for name in wrapper.mergeable:
            if getattr(wrapper.base, name, None) is None:
                continue
            parameter = wrapper.base._parameters.get(name)
            if parameter is None:
                raise ValueError(
                    f"the {name} of {type(wrapper.base).__name__} is computed (pruned or "
                    "parametrized), so nothing can be merged into it; make it plain first"
                )
            if not wrapper.merged and not is_plain(parameter):
                kind = type(parameter.data).__name__ if parameter.layout is torch.strided else ""
                where = " and ".join(map(repr, holders.get(id(parameter), [name])))
                raise ValueError(
                    f"{where} holds a {kind or parameter.layout} of {parameter.dtype}, which cannot "
                    "take the adapter's update; keep the adapters unmerged, or merge into the "
                    "floating-point net first and quantize that"
                )
            names = holders.get(id(parameter), [])
            if len(names) > 1:
                raise ValueError(
                    f"{' and '.join(map(repr, names))} are one tensor; merging would change every "
                    "layer that reads it. Untie them first"
                )
