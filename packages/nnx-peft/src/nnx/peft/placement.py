"""Which layers a pattern selects, and replacing them all or not at all."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nnx.peft.base import AdaptedLayer, floating_weight
from torch import nn

# Children whose parent reads their weight itself, so that a wrapper would be bypassed.
_READ_BY_PARENT: tuple[tuple[type[nn.Module], frozenset[str]], ...] = (
    (nn.MultiheadAttention, frozenset({"out_proj"})),
    (nn.TransformerEncoderLayer, frozenset({"linear1", "linear2"})),
    (nn.TransformerDecoderLayer, frozenset({"linear1", "linear2"})),
)


@dataclass
class Slot:
    """One place where a module is registered: ``parent.name``, under all of its paths."""

    parent: nn.Module
    name: str
    module: nn.Module
    paths: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def holds_base(self) -> bool:
        return self.name == "base" and isinstance(self.parent, AdaptedLayer)


def slots(root: nn.Module) -> list[Slot]:
    """Every registration slot below ``root``, with every path that reaches it."""
    found: dict[tuple[int, str], Slot] = {}
    for prefix, parent in root.named_modules(remove_duplicate=False):
        for name, child in parent._modules.items():
            if child is not None:
                slot = found.setdefault((id(parent), name), Slot(parent, name, child))
                slot.paths.append(f"{prefix}.{name}" if prefix else name)
    return list(found.values())


def select(
    root: nn.Module, patterns: Sequence[str], *, kinds: tuple[type[nn.Module], ...]
) -> list[Slot]:
    """The slots whose module is one of ``kinds`` and of which a path matches a pattern.

    A layer that is the base of a wrapper already is skipped. Raises
    ``ValueError``, before anything changes, when no pattern is given or when a
    selected layer cannot be replaced.
    """
    matches = _matcher(patterns)
    every = slots(root)
    chosen = [
        slot
        for slot in every
        if isinstance(slot.module, kinds) and not slot.holds_base and any(map(matches, slot.paths))
    ]
    problems = _problems(chosen, every)
    if problems:
        raise ValueError("nothing was adapted:\n" + "\n".join(f"- {p}" for p in problems))
    return chosen


def wrap(chosen: Iterable[Slot], build: Callable[[nn.Module], nn.Module]) -> int:
    """Replace each slot's module by ``build(module)``; on an error none is replaced."""
    chosen = list(chosen)
    flags = [(p, p.requires_grad) for slot in chosen for p in slot.module.parameters()]
    try:
        wrappers = [build(slot.module) for slot in chosen]
    except BaseException:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        raise
    for slot, wrapper in zip(chosen, wrappers):
        setattr(slot.parent, slot.name, wrapper)
    return len(wrappers)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    if not patterns:
        raise ValueError('no name pattern was given; pass at least one glob, "*" for every layer')
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"a name pattern must be a string, not {type(pattern).__name__}")
    expression = re.compile("|".join(fnmatch.translate(p) for p in patterns))
    return lambda path: expression.match(path) is not None


def _problems(chosen: Sequence[Slot], every: Sequence[Slot]) -> list[str]:
    registered: dict[int, list[Slot]] = {}
    for slot in every:
        registered.setdefault(id(slot.module), []).append(slot)
    problems: dict[str, None] = {}  # ordered, without repeats
    for slot in chosen:
        aliases = registered[id(slot.module)]
        if len(aliases) > 1:
            names = ", ".join(repr(path) for alias in aliases for path in alias.paths)
            problems[
                f"one {type(slot.module).__name__} is registered as {names}; a wrapper would split "
                "it into independent layers. Register it once, or select only layers without "
                "aliases"
            ] = None
        for parent, names_read in _READ_BY_PARENT:
            if isinstance(slot.parent, parent) and slot.name in names_read:
                problems[
                    f"{slot.path!r} is read directly by its {type(slot.parent).__name__}, which "
                    "would bypass a wrapper. Select other projections"
                ] = None
        try:
            floating_weight(slot.module)
        except ValueError as error:
            problems[f"{slot.path!r}: {error}"] = None
    return list(problems)
