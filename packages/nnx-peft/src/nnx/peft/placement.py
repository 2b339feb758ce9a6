"""Which layers a pattern selects, and replacing them all or not at all."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nnx.peft.base import AdaptedLayer, floating_weight
from nnx.peft.ownership import (
    freeze_unowned,
    mark_travelling,
    note_statistics,
    select_travelling,
)
from nnx.utils.modules import (
    describe_unmatched,
    module_paths,
    require_module,
    warn_unmatched,
    without_match,
)
from torch import nn

# Children whose parent reads their weight itself, so that a wrapper would be bypassed.
_READ_BY_PARENT: tuple[tuple[type[nn.Module], frozenset[str]], ...] = (
    (nn.MultiheadAttention, frozenset({"out_proj"})),
    (nn.TransformerEncoderLayer, frozenset({"linear1", "linear2"})),
    (nn.TransformerDecoderLayer, frozenset({"linear1", "linear2"})),
)


@dataclass(eq=False)
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
    for prefix, parent in module_paths(root):
        for name, child in parent._modules.items():
            if child is not None:
                slot = found.setdefault((id(parent), name), Slot(parent, name, child))
                slot.paths.append(f"{prefix}.{name}" if prefix else name)
    return list(found.values())


def adapt(
    owner: str,
    root: nn.Module,
    patterns: Sequence[str],
    *,
    kinds: tuple[type[nn.Module], ...],
    build: Callable[[nn.Module], nn.Module],
    freeze_base: bool,
    modules_to_save: Sequence[str],
) -> int:
    """What every ``apply_*_to`` does: select, wrap, and say what trains; all or nothing."""
    matches = matcher(patterns)
    every = slots(require_module(owner, root))
    chosen = select(every, matches, kinds=kinds)
    saved = select_travelling(root, modules_to_save, adapted=[slot.module for slot in chosen])
    _check_patterns(owner, patterns, every, kinds, strict=freeze_base)
    count = wrap(chosen, build)
    note_statistics(root)
    mark_travelling(saved)
    if freeze_base:
        freeze_unowned(root)
    return count


def _check_patterns(
    owner: str,
    patterns: Sequence[str],
    every: Sequence[Slot],
    kinds: tuple[type[nn.Module], ...],
    *,
    strict: bool,
) -> None:
    """Warn about a pattern without a layer; ``strict`` refuses when there is no layer at all."""
    eligible = [
        path
        for slot in every
        for layer in [slot.module.base if isinstance(slot.module, AdaptedLayer) else slot.module]
        if isinstance(layer, kinds)
        for path in slot.paths
    ]
    what = " or ".join(kind.__name__ for kind in kinds)
    missing = without_match(patterns, eligible)
    if strict and len(missing) == len(patterns):
        raise ValueError(
            f"{owner}(freeze_base=True): {describe_unmatched(missing, eligible, what)}, so nothing "
            "would train"
        )
    warn_unmatched(owner, patterns, eligible, what, consequence="No layer was adapted for it")


def select(
    every: Sequence[Slot],
    matches: Callable[[str], bool],
    *,
    kinds: tuple[type[nn.Module], ...],
) -> list[Slot]:
    """The slots whose module is one of ``kinds`` and of which a path matches.

    A layer that is the base of a wrapper already is skipped. Raises
    ``ValueError``, before anything changes, when a selected layer cannot be
    replaced.
    """
    chosen = [
        slot
        for slot in every
        if isinstance(slot.module, kinds) and not slot.holds_base and any(map(matches, slot.paths))
    ]
    # Every name of one layer has the same problem: say it once.
    problems = dict.fromkeys(message for _, message in problems_with(chosen, every))
    if problems:
        raise ValueError("nothing was adapted:\n" + "\n".join(f"- {p}" for p in problems))
    return chosen


def examine(
    root: nn.Module, targets: Sequence[str], *, kinds: tuple[type[nn.Module], ...]
) -> tuple[list[Slot], list[tuple[str, str]]]:
    """The slots at exactly these paths, and what is wrong with them as (target, problem)."""
    every = slots(root)
    by_path = {path: slot for slot in every for path in slot.paths}
    chosen: dict[Slot, str] = {}
    problems: list[tuple[str, str]] = []
    wanted = " or ".join(kind.__name__ for kind in kinds)
    for target in targets:
        slot = by_path.get(target)
        if slot is None:
            problems.append((target, "the net has no such submodule"))
        elif slot.holds_base:
            problems.append((target, "it is the base of a wrapper already"))
        elif not isinstance(slot.module, kinds):
            problems.append((target, f"it is a {type(slot.module).__name__}, not a {wanted}"))
        elif slot in chosen:
            problems.append((target, f"it is the same layer as {chosen[slot]!r}, named twice"))
        else:
            chosen[slot] = target
    problems += [(chosen[slot], message) for slot, message in problems_with(chosen, every)]
    return list(chosen), problems


def problems_with(chosen: Iterable[Slot], every: Sequence[Slot]) -> Iterator[tuple[Slot, str]]:
    """Why a chosen slot's layer cannot be replaced."""
    registered: dict[int, list[Slot]] = {}
    for slot in every:
        registered.setdefault(id(slot.module), []).append(slot)
    for slot in chosen:
        aliases = registered[id(slot.module)]
        if len(aliases) > 1:
            names = ", ".join(repr(path) for alias in aliases for path in alias.paths)
            yield (
                slot,
                f"one {type(slot.module).__name__} is registered as {names}; a replacement would "
                "split it into independent layers. Register it once, or select only layers "
                "without aliases",
            )
        if any(
            isinstance(slot.parent, parent) and slot.name in names
            for parent, names in _READ_BY_PARENT
        ):
            yield (
                slot,
                f"{slot.path!r} is read directly by its {type(slot.parent).__name__}, which would "
                "bypass a replacement. Select other projections",
            )
        try:
            floating_weight(slot.module)
        except ValueError as error:
            yield slot, f"{slot.path!r}: {error}"


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


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path matches any of the globs; refuses an empty list of them."""
    if not patterns:
        raise ValueError('no name pattern was given; pass at least one glob, "*" for every layer')
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"a name pattern must be a string, not {type(pattern).__name__}")
    expression = re.compile("|".join(fnmatch.translate(p) for p in patterns))
    return lambda path: expression.match(path) is not None


def meta_copy(net: nn.Module) -> nn.Module:
    """A deep copy of ``net`` whose tensors hold no data, tied ones still tied."""
    memo: dict[int, Any] = {}
    for parameter in net.parameters():
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        memo[id(parameter)] = empty
    for buffer in net.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(net, memo)
