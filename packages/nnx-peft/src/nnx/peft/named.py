"""Several adapters on one base: adding, switching, combining, removing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from nnx.peft.dora import DoRALinear
from nnx.peft.low_rank import DEFAULT, LoRALayer, NamedAdapter, check_hyperparameters
from nnx.peft.placement import matcher
from nnx.utils import validation as check
from nnx.utils.modules import describe_unmatched, module_paths, require_module, without_match
from torch import nn


def adapter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the LoRA adapters below ``module``, the one of construction first."""
    names = {name: None for layer in lora_layers(module) for name in layer.adapter_names()}
    return tuple(names)


def add_adapter(
    module: nn.Module,
    name: str,
    *name_patterns: str,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    rslora: bool = False,
) -> int:
    """Add a LoRA adapter called ``name`` to layers that are wrapped already; return how many.

    ``name_patterns`` are globs over the wrappers' names, all of them by
    default. The new adapter changes nothing until :func:`set_adapter` selects
    it.

    Raises ``ValueError``, and changes nothing, for a name that is taken or no
    identifier, when no wrapper matches, or when a DoRA layer does, which has
    room for one adapter only.
    """
    r, alpha, dropout = check_hyperparameters(r, alpha, dropout)
    _check_new_name(module, name)
    matches = matcher(name_patterns or ("*",))
    chosen: dict[LoRALayer, str] = {}
    for path, layer in module_paths(require_module("add_adapter", module)):
        if isinstance(layer, LoRALayer) and matches(path):
            chosen.setdefault(layer, path)
    for layer, path in chosen.items():
        if isinstance(layer, DoRALinear):
            raise ValueError(f"{path!r} is a DoRALinear, which holds one adapter only")
    paths = [path for path, layer in module_paths(module) if isinstance(layer, LoRALayer)]
    missing = without_match(name_patterns or ("*",), paths)
    if missing:
        raise ValueError(
            f"{describe_unmatched(missing, paths, 'LoRA layer')}; wrap layers with apply_lora_to "
            "first"
        )
    adapters = [
        NamedAdapter(layer, r=r, alpha=alpha, dropout=dropout, rslora=rslora) for layer in chosen
    ]
    for layer, adapter in zip(chosen, adapters):
        _attach(layer, name, adapter)
    return len(chosen)


def set_adapter(module: nn.Module, *names: str, trainable: bool = True) -> None:
    """Use exactly these adapters: their updates add up; without a name the base runs alone.

    The named adapters' matrices require gradients when ``trainable``; those of
    all others do not.

    Raises ``ValueError``, and changes nothing, for a name that no layer has or
    that is given twice, or while adapters are merged.
    """
    layers = _unmerged_layers(module)
    known = adapter_names(module)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"no layer has an adapter called {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"set_adapter names an adapter twice: {list(names)}")
    for layer in layers:
        own = layer.adapter_names()
        layer.active = tuple(name for name in names if name in own)
        for name in own:
            for parameter in layer.owned_parameters(name):
                parameter.requires_grad_(trainable and name in names)


@contextlib.contextmanager
def disabled_adapters(module: nn.Module) -> Iterator[None]:
    """Within the block every LoRA layer computes what its base computes."""
    layers = _unmerged_layers(module)
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active = ()
    try:
        yield
    finally:
        for layer, active in zip(layers, before):
            layer.active = active


@torch.no_grad()
def combine_adapters(
    module: nn.Module, name: str, weights: Mapping[str, float], *, rank: int | None = None
) -> int:
    """Add an adapter whose update is the weighted sum of others; return to how many layers.

    By default the sum is exact: the combined rank is the sum of the ranks.
    ``rank`` truncates it to the best approximation of that rank (SVD). The new
    adapter carries each part's own scale, has no dropout, and is not selected
    until :func:`set_adapter` does.

    Raises ``ValueError``, and changes nothing, for an unknown part, a weight
    that is not finite, or a name that is taken.
    """
    _check_new_name(module, name)
    known = adapter_names(module)
    if not weights:
        raise ValueError("weights is empty; name at least one adapter")
    for part, weight in weights.items():
        if part not in known:
            raise ValueError(f"no layer has an adapter called {part!r}; there are {list(known)}")
        check.real("combine_adapters", f"weights[{part!r}]", weight)
    if rank is not None:
        rank = check.count("combine_adapters", "rank", rank)
    built: list[tuple[LoRALayer, NamedAdapter]] = []
    for layer in lora_layers(module):
        if isinstance(layer, DoRALinear):
            raise ValueError("a DoRALinear holds one adapter only, so nothing can be combined")
        parts = [part for part in weights if part in layer.adapter_names()]
        if parts:
            built.append((layer, _combined(layer, {p: weights[p] for p in parts}, rank)))
    for layer, adapter in built:
        _attach(layer, name, adapter)
    return len(built)


def delete_adapter(module: nn.Module, name: str) -> int:
    """Remove a named adapter everywhere; return from how many layers.

    The one of construction cannot be removed: it makes the layer a wrapper.
    """
    if name == DEFAULT:
        raise ValueError(f"{DEFAULT!r} belongs to the wrappers; use set_adapter to leave it out")
    holders = [layer for layer in _unmerged_layers(module) if name in layer.adapter_names()]
    if not holders:
        raise ValueError(f"no layer has an adapter called {name!r}")
    for layer in holders:
        assert layer.adapters is not None
        del layer.adapters[name]
        if not layer.adapters:
            del layer.adapters  # the module, so that the layer looks as it was built
            layer.adapters = None
        layer.active = tuple(active for active in layer.active if active != name)
    return len(holders)


def lora_layers(module: nn.Module) -> list[LoRALayer]:
    return [m for m in module.modules() if isinstance(m, LoRALayer)]


def _unmerged_layers(module: nn.Module) -> list[LoRALayer]:
    layers = lora_layers(module)
    if any(layer.merged for layer in layers):
        raise ValueError("adapters are merged into the base; unmerge_adapters first")
    return layers


def _attach(layer: LoRALayer, name: str, adapter: NamedAdapter) -> None:
    adapter.requires_grad_(False)
    if layer.adapters is None:
        layer.adapters = nn.ModuleDict()
        layer.adapters.training = layer.training
    layer.adapters[name] = adapter


def _check_new_name(module: nn.Module, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"an adapter's name must be an identifier, not {name!r}")
    taken = {DEFAULT, *adapter_names(module)}
    # A ModuleDict refuses the names of its own attributes ("keys", "training").
    if name in taken or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"an adapter cannot be called {name!r}: the name is taken")


def _combined(layer: LoRALayer, weights: Mapping[str, float], rank: int | None) -> NamedAdapter:
    """Stack the parts: ``[w1 s1 B1, w2 s2 B2] [A1; A2]`` is the weighted sum."""
    parts = [(weight, layer.adapter(name)) for name, weight in weights.items()]
    dtype = torch.float64 if layer.lora_A.device.type == "cpu" else torch.float32
    a = torch.cat([part.lora_A.to(dtype).flatten(1) for _, part in parts])
    b = torch.cat([w * p.scaling * p.lora_B.to(dtype).flatten(1) for w, p in parts], dim=1)
    if rank is not None and rank < len(a):
        u, s, vh = torch.linalg.svd(b @ a, full_matrices=False)
        rank = min(rank, len(s))
        a, b = s[:rank, None].sqrt() * vh[:rank], u[:, :rank] * s[:rank].sqrt()
    r = len(a)
    combined = NamedAdapter(layer, r=r, alpha=float(r), dropout=0.0, rslora=False, reset=False)
    combined.lora_A.copy_(a.view(combined.lora_A.shape))
    combined.lora_B.copy_(b.reshape(combined.lora_B.shape))
    return combined
