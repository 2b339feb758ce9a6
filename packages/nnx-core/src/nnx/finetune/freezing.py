"""Which parameters train."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from nnx.utils.modules import parameter_names, require_module, warn_unmatched


def freeze(module: nn.Module, *patterns: str) -> int:
    """Stop training the parameters whose dotted name matches any of ``patterns``.

    Patterns are shell globs over the whole name, and ``*`` crosses dots:
    ``"encoder.*"`` takes ``encoder.layer.5.weight``. A tied weight is found by
    any of its names. Returns how many parameters were trainable and are not now.
    At least one pattern is needed; one that matches nothing is warned about.
    """
    return _set("freeze", module, patterns, trainable=False)


def unfreeze(module: nn.Module, *patterns: str) -> int:
    """Train the matching parameters again; returns how many were frozen.

    A parameter of an integer type (a quantized weight) cannot train and stays
    as it is.
    """
    return _set("unfreeze", module, patterns, trainable=True)


def frozen(module: nn.Module) -> list[str]:
    """The dotted names of the parameters that do not train, sorted."""
    return sorted(n for n, p in module.named_parameters() if not p.requires_grad)


def _set(word: str, module: nn.Module, patterns: tuple[str, ...], *, trainable: bool) -> int:
    names = parameter_names(require_module(word, module))
    if not patterns:
        raise ValueError(f'{word} needs at least one name pattern; "*" takes every parameter')
    every = [name for several in names.values() for name in several]
    warn_unmatched(word, patterns, every, "parameter", consequence="It changed nothing")
    changed = [
        parameter
        for parameter, several in names.items()
        if any(fnmatchcase(name, pattern) for name in several for pattern in patterns)
        and parameter.requires_grad != trainable
        and (parameter.is_floating_point() or parameter.is_complex())
    ]
    for parameter in changed:
        parameter.requires_grad_(trainable)
    return len(changed)
