"""Which parameters train."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn


def freeze(module: nn.Module, *patterns: str) -> int:
    """Stop training the parameters whose dotted name matches any of ``patterns``.

    Patterns are shell globs over the whole name, and ``*`` crosses dots:
    ``"encoder.*"`` takes ``encoder.layer.5.weight``. Returns how many parameters
    were trainable and are not now. At least one pattern is needed.
    """
    return _set(module, patterns, trainable=False)


def unfreeze(module: nn.Module, *patterns: str) -> int:
    """Train the matching parameters again; returns how many were frozen.

    A parameter of an integer type (a quantized weight) cannot train and stays
    as it is.
    """
    return _set(module, patterns, trainable=True)


def frozen(module: nn.Module) -> list[str]:
    """The dotted names of the parameters that do not train, sorted."""
    return sorted(n for n, p in module.named_parameters() if not p.requires_grad)


def _set(module: nn.Module, patterns: tuple[str, ...], *, trainable: bool) -> int:
    if not patterns:
        word = "unfreeze" if trainable else "freeze"
        raise ValueError(f'{word} needs at least one name pattern; "*" takes every parameter')
    changed = [
        parameter
        for parameter in _matching(module, patterns)
        if parameter.requires_grad != trainable
        and (parameter.is_floating_point() or parameter.is_complex())
    ]
    for parameter in changed:
        parameter.requires_grad_(trainable)
    return len(changed)


def _matching(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[nn.Parameter]:
    """Each parameter once, whichever of its names (tied weights have several) matches."""
    seen: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen and any(fnmatchcase(name, p) for p in patterns):
            seen.add(id(parameter))
            yield parameter
