"""What belongs to an adapter: which tensors train, and which its file holds.

Everything goes by the module that owns a tensor, never by a name. A module that
trains whole beside the adapters (a new head) is marked by ``modules_to_save``
and travels with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from nnx.utils.caller import warn_caller
from nnx.utils.files import atomic_write
from nnx.utils.modules import describe_unmatched, module_paths, parameter_names, without_match
from torch import nn

Source = str | os.PathLike[str] | Mapping[str, Any]
Owners = tuple[tuple[type[nn.Module], tuple[str, ...]], ...]

# Attributes of modules: that it travels with the adapters, and how many batches its
# running statistics had seen when the adapters were put in.
_TRAVELS = "_nnx_travels_with_adapters"
_BATCHES = "_nnx_batches_before_adapters"
_SHOWN = 5


# -- what trains -----------------------------------------------------------------------


def adapter_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that an adapter below ``root`` owns."""
    module: Any
    for module in root.modules():
        if hasattr(module, "adapter_parameters"):
            yield from module.adapter_parameters()


def travelling(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that ``modules_to_save`` named, by every path."""
    for path, module in module_paths(root):
        if vars(module).get(_TRAVELS):
            yield path, module


def freeze_unowned(root: nn.Module) -> None:
    """Stop training all that neither an adapter nor a travelling module owns."""
    kept = {id(p) for p in adapter_parameters(root)}
    kept |= {id(p) for _, module in travelling(root) for p in module.parameters()}
    for parameter in root.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


def select_travelling(
    root: nn.Module, patterns: Sequence[str], *, adapted: Iterable[nn.Module]
) -> list[nn.Module]:
    """The modules that the globs name; refuses a glob without one, and an adapted layer."""
    if isinstance(patterns, str):
        raise TypeError(f"modules_to_save must be names in a list, not the string {patterns!r}")
    paths = [(path, module) for path, module in module_paths(root) if path]
    missing = without_match(patterns, [path for path, _ in paths])
    if missing:
        unmatched = describe_unmatched(missing, [path for path, _ in paths], "module")
        raise ValueError(f"modules_to_save: {unmatched}")
    taken = {id(module) for module in adapted}
    chosen: dict[int, nn.Module] = {}
    for path, module in paths:
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            for part in module.modules():
                if id(part) in taken or hasattr(part, "adapted_child"):
                    raise ValueError(
                        f"modules_to_save names {path!r}, which is adapted or holds an adapted "
                        "layer; a layer is adapted or trains whole, not both"
                    )
            chosen[id(module)] = module
    return list(chosen.values())


def mark_travelling(modules: Iterable[nn.Module]) -> None:
    """Let these modules train whole and travel with the adapters."""
    for module in modules:
        setattr(module, _TRAVELS, True)
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)


def note_statistics(root: nn.Module) -> None:
    """Remember where running statistics stand, so that a file can say they moved."""
    for module in root.modules():
        count = _batches(module)
        if count is not None and _BATCHES not in vars(module):
            setattr(module, _BATCHES, count)


def _batches(module: nn.Module) -> int | None:
    count = module._buffers.get("num_batches_tracked")
    return None if count is None or count.is_meta else int(count)


# -- what a file holds -----------------------------------------------------------------


def owned_keys(module: nn.Module, owners: Owners) -> Iterator[str]:
    """The state-dict keys of each named parameter of each owning submodule."""
    for path, child in module_paths(module):
        for kind, names in owners:
            if isinstance(child, kind):
                for name in names:
                    if name in child._parameters:
                        yield f"{path}.{name}" if path else name


def save_adapter(
    module: nn.Module,
    path: str | os.PathLike[str],
    owned: Iterable[str],
    *,
    what: str,
    include_trainable: bool,
) -> str:
    """Write the ``owned`` tensors and what travels with them; refuse to lose another."""
    owned = set(owned)
    keys = owned | keys_below(module, (path for path, _ in travelling(module)))
    if include_trainable:
        keys |= _unheld(module, keys) | _moved_statistics(module)
    elif not owned:
        warn_caller(f"the module has no {what}; the file is empty")
    else:
        refuse_loss(module, keys)
    state = {key: value for key, value in module.state_dict().items() if key in keys}
    with atomic_write(path, "wb") as stream:
        torch.save(state, stream)
    return str(path)


def _unheld(module: nn.Module, keys: set[str]) -> set[str]:
    """Every name of the trainable parameters of which ``keys`` has none."""
    return {
        name
        for parameter, names in parameter_names(module).items()
        if parameter.requires_grad and keys.isdisjoint(names)
        for name in names
    }


def _moved_statistics(module: nn.Module) -> set[str]:
    """The buffers of layers whose running statistics moved since the adapters were put in."""
    moved = (
        path
        for path, child in module_paths(module)
        if _BATCHES in vars(child) and _batches(child) not in (None, vars(child)[_BATCHES])
    )
    return keys_below(module, moved) - {
        n for names in parameter_names(module).values() for n in names
    }


def refuse_loss(module: nn.Module, keys: set[str]) -> None:
    """Refuse to leave out what trains and no adapter owns; warn about the rest."""
    left = _unheld(module, keys)
    own = {id(p) for p in adapter_parameters(module)}
    names = parameter_names(module)
    others = {n for p, several in names.items() if id(p) in own for n in several} & left
    if left - others:
        raise ValueError(
            f"{_some(sorted(left - others))} train too, and the file would not hold what they "
            "learn. Adapt with freeze_base=True to leave them alone, name their modules in "
            "modules_to_save, save with include_trainable=True, or freeze them first"
        )
    way_out = "Save their own file too, or the full state_dict(), or pass include_trainable=True"
    warn_loss(module, keys, left=others, way_out=way_out)


def warn_loss(
    module: nn.Module, keys: set[str], *, left: set[str] | None = None, way_out: str
) -> None:
    """Warn about what training may have changed and ``keys`` do not hold."""
    left = _unheld(module, keys) if left is None else left
    named = "Name their modules in modules_to_save"
    for lost, then in ((left, way_out), (_moved_statistics(module) - keys, named)):
        if lost:
            warn_caller(
                f"{_some(sorted(lost))} changed in training, or may have, and the file does not "
                f"hold them. {then}"
            )


def keys_below(module: nn.Module, paths: Iterable[str]) -> set[str]:
    """The state-dict keys below any of ``paths``."""
    starts = tuple(f"{path}." for path in paths)
    return {key for key in module.state_dict() if key.startswith(starts)} if starts else set()


# -- reading it ------------------------------------------------------------------------


def load_adapter(
    module: nn.Module, source: Source, owned: Iterable[str], *, include_trainable: bool
) -> int:
    """Copy the tensors that ``module``'s adapters own from ``source``; say how many.

    Travelling modules are read too, and with ``include_trainable`` whatever else
    trains. A tensor of another shape raises torch's size-mismatch
    ``RuntimeError`` and changes nothing. What is left out on either side is
    warned about, except the base of a full checkpoint, which is never read.
    """
    state = read_tensors(source)
    keys = set(owned) | keys_below(module, (path for path, _ in travelling(module)))
    here = module.state_dict()
    wanted = set(keys)
    if include_trainable:
        keys |= set(here) - _frozen(module)
    accepted = {key: value for key, value in state.items() if key in keys}
    before = {key: value.clone() for key, value in here.items() if key in accepted}
    try:
        module.load_state_dict(accepted, strict=False)
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise
    _warn_left_out(module, state, accepted, wanted)
    return len(accepted)


def _frozen(module: nn.Module) -> set[str]:
    """The names of frozen parameters, and of all that a wrapper's base holds."""
    names = parameter_names(module)
    frozen = {n for p, several in names.items() if not p.requires_grad for n in several}
    return frozen | _bases(module)


def _bases(module: nn.Module) -> set[str]:
    """The state-dict keys of what adapters were put on."""
    children: Iterator[tuple[str, Any]] = module_paths(module)
    bases = (
        f"{path}.{child.adapted_child}" if path else child.adapted_child
        for path, child in children
        if hasattr(child, "adapted_child")
    )
    return keys_below(module, bases)


def _warn_left_out(
    module: nn.Module, state: Mapping[str, Any], accepted: Mapping[str, Any], wanted: set[str]
) -> None:
    missing = sorted(wanted - accepted.keys())
    if missing:
        warn_caller(
            f"the source does not hold {_some(missing)}, which keep the values that they had"
        )
    ignored = state.keys() - accepted.keys()
    if ignored & _bases(module):  # a full checkpoint: only its adapters were asked for
        ignored -= set(module.state_dict())
    if ignored:
        warn_caller(
            f"{_some(sorted(ignored))} of the source were not loaded: no adapter here owns them. Adapt the "
            "same layers as the source's, with the same modules_to_save; a file that was saved with "
            "include_trainable=True is loaded with it too"
        )


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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
