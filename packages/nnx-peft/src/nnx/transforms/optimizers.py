"""Whether an optimizer still trains the tensors a model has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from nnx.transforms.errors import Problem, RecipeError
from torch import nn

if TYPE_CHECKING:
    from nnx.nn_model import NNModel

_SHOWN = 5


def check_optimizer(model: NNModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was not built over ``model``'s present parameters.

    Raises :class:`RecipeError` when it holds tensors that the net no longer
    has, or misses trainable ones, as one built before a recipe does.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    present = dict(model.net.named_parameters())
    stale = len(held - {id(p) for p in present.values()})
    missing = [n for n, p in present.items() if p.requires_grad and id(p) not in held]
    problems = []
    if stale:
        problems.append(
            Problem(None, None, f"the optimizer holds {stale} tensors that the net does not have")
        )
    if missing:
        names = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        problems.append(Problem(None, None, f"the optimizer misses trainable parameters: {names}"))
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
