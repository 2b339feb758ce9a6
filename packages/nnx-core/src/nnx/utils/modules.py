"""Names in a network: every path of it, and patterns that must mean something.

Duck-typed: importing this loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from nnx.utils.caller import warn_caller
from nnx.utils.validation import show

if TYPE_CHECKING:
    from torch import nn


def require_module(owner: str, value: Any) -> nn.Module:
    """``value``, or a ``TypeError`` that says what to pass instead."""
    if callable(getattr(value, "named_modules", None)):
        return value
    if hasattr(value, "net"):
        raise TypeError(
            f"{owner} takes a torch.nn.Module, not a {type(value).__name__}; pass its .net"
        )
    raise TypeError(f"{owner} takes a torch.nn.Module, not {show(value)}")


def module_paths(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every path to every submodule, ``root`` as ``""`` first.

    A module that is registered twice comes twice. A path ends where it would
    meet one of its own ancestors, so a cycle of modules ends too.
    """
    yield from _paths("", root, ())


def _paths(
    path: str, module: nn.Module, above: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    above = (*above, module)
    for name, child in module._modules.items():
        if child is not None and not any(child is ancestor for ancestor in above):
            yield from _paths(f"{path}.{name}" if path else name, child, above)


def parameter_names(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all of its names (a tied one has several), in order."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in module_paths(root):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    return names


def without_match(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The globs that match none of ``names``."""
    names = list(names)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]


def describe_unmatched(patterns: Sequence[str], names: Iterable[str], what: str) -> str:
    """Which patterns match no ``what``, and the names that come closest."""
    names = list(dict.fromkeys(names))
    shown = ", ".join(map(repr, patterns))
    verb = "match" if len(patterns) > 1 else "matches"
    if not names:
        return f"{shown} {verb} no {what}: there is none"
    near = dict.fromkeys(name for pattern in patterns for name in closest(pattern, names))
    return f"{shown} {verb} no {what}; the closest names are {', '.join(map(repr, near))}"


def closest(pattern: str, names: Sequence[str], n: int = 3) -> list[str]:
    """The names most like a glob, best first."""
    word = pattern.replace("*", "").lower()
    matcher = difflib.SequenceMatcher(b=word)

    def likeness(name: str) -> float:
        matcher.set_seq1(name.lower()[: len(word) + 4])  # most globs are the start of a name
        return matcher.ratio()

    return sorted(names, key=likeness, reverse=True)[:n]


def warn_unmatched(
    owner: str,
    patterns: Iterable[str],
    names: Iterable[str],
    what: str,
    *,
    consequence: str,
) -> bool:
    """Warn about patterns without effect; say whether there were any."""
    names = list(names)
    missing = without_match(patterns, names)
    if missing:
        warn_caller(f"{owner}: {describe_unmatched(missing, names, what)}. {consequence}")
    return bool(missing)
