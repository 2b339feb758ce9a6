"""Whether an optimizer still trains the tensors a model has."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from nnx.transforms.errors import Problem, RecipeError
from torch import nn

if TYPE_CHECKING:
    from nnx.nn_model import NNModel


class _Replaced(NamedTuple):
    """Weak references to what recipes took out of a model's net, froze, and put in."""

    gone: tuple[weakref.ref[nn.Parameter], ...] = ()
    frozen: tuple[weakref.ref[nn.Parameter], ...] = ()
    made: tuple[weakref.ref[nn.Parameter], ...] = ()


_REPLACED: weakref.WeakKeyDictionary[nn.Module, _Replaced] = weakref.WeakKeyDictionary()


def remember_replaced(
    net: nn.Module, source: nn.Module, before: Mapping[nn.Parameter, bool]
) -> None:
    """Note what a recipe made of ``source``: its parameters ``before``, with ``requires_grad``."""
    earlier = _REPLACED.get(source, _Replaced())
    now = {id(p): p for p in net.parameters()}
    gone = [p for p in before if id(p) not in now]
    frozen = [p for p, flag in before.items() if id(p) in now and flag and not p.requires_grad]
    held = {id(p) for p in before}
    made = [p for key, p in now.items() if key not in held]
    _REPLACED[net] = _Replaced(
        *(old + tuple(map(weakref.ref, new)) for old, new in zip(earlier, (gone, frozen, made)))
    )


def check_optimizer(model: NNModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was built before ``model``'s recipe changed its net.

    Raises :class:`RecipeError` when it holds tensors that a recipe took out of the
    net, or some that it froze and none that it made. One over a part of the
    parameters, or with further ones of the caller's, is fine.
    """
    gone, frozen, made = (
        {id(p) for ref in refs if (p := ref()) is not None}
        for refs in _REPLACED.get(model.net, _Replaced())
    )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    problems = []
    if held & gone:
        lost = f"the optimizer holds {len(held & gone)} tensors that the net does not have"
        problems.append(Problem(None, None, lost))
    if held & frozen and not held & made:
        names = [n for n, p in model.net.named_parameters() if id(p) in made and p.requires_grad]
        problems.append(
            Problem(
                None,
                None,
                f"the optimizer holds {len(held & frozen)} tensors that the recipe froze, and none "
                f"of those that it made ({', '.join(names[:5])})",
            )
        )
    if problems:
        way_out = "build the optimizer after the recipe is materialized, from the returned model"
        raise RecipeError([*problems, Problem(None, None, way_out)])


def optimizer_problems(
    net: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[Problem]:
    """One problem per optimizer that holds tensors of ``net`` already."""
    own = {id(p) for p in net.parameters()}
    for index, optimizer in enumerate(optimizers):
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            yield Problem(
                None,
                None,
                f"optimizer {index} ({type(optimizer).__name__}) was built over this net; an "
                "in-place change would leave it behind. Materialize first, then build it, or use "
                "materialization='fresh'",
            )
