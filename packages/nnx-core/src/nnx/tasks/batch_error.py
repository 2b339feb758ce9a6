"""Why torch could not take a batch, in words that name the batch and the way out."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from nnx.errors import NNxError


class BatchError(ValueError, IndexError, RuntimeError, NNxError):
    """A batch that the net or the loss cannot take.

    It is also what torch raises of it (``RuntimeError``, or ``IndexError`` for a class
    that is not there), which stays its ``__cause__``.
    """


def forward_error(net: nn.Module, args: Any, error: RuntimeError) -> BatchError | None:
    """What a failed forward pass says of its inputs; ``None`` when they are not at fault."""
    floating = next((p.dtype for p in net.parameters() if p.is_floating_point()), None)
    for value in args:
        wrong = isinstance(value, torch.Tensor) and value.is_floating_point()
        if wrong and floating is not None and value.dtype != floating and "dtype" in str(error):
            return BatchError(
                f"the inputs are {value.dtype} and the net is {floating}; convert the data, for "
                f"example with inputs.to({floating}), or the net with model.net.to({value.dtype})"
            )
        if isinstance(value, torch.Tensor):
            needed = _features(net, value, str(error))
            if needed is not None:
                width = math.prod(value.shape[1:])
                return BatchError(
                    f"the inputs have {width} features, but the net takes {needed}; give it the "
                    f"columns of its training, in their order, or build it with input_dim={width}"
                )
    return None


def _features(net: nn.Module, inputs: torch.Tensor, text: str) -> int | None:
    """How many features the net's first layer takes, where that is what ``text`` is about."""
    shapes = re.search(r"\(\d+x(\d+) and (\d+)x\d+\)", text)
    first = next((m for m in net.modules() if isinstance(m, nn.Linear)), None)
    if shapes is None or first is None or inputs.ndim < 2:
        return None
    width, needed = map(int, shapes.groups())
    mine = width in (inputs.shape[-1], math.prod(inputs.shape[1:]))
    return needed if mine and needed == first.in_features != width else None


def loss_error(
    loss_fn: nn.Module, output: torch.Tensor, target: Any, error: Exception
) -> BatchError | None:
    """What a failed loss says of its targets; ``None`` when they are not at fault."""
    if not isinstance(target, torch.Tensor) or output.ndim < 2 or not target.numel():
        return None
    if not target.ndim or len(target) != len(output):
        rows = len(target) if target.ndim else 1
        return BatchError(
            f"{len(output)} rows of outputs cannot be compared with {rows} targets; a batch has a "
            "target for each of its rows"
        )
    if isinstance(error, IndexError) and not target.is_floating_point():
        classes, ignored = output.shape[1], getattr(loss_fn, "ignore_index", -100)
        wrong = (((target < 0) | (target >= classes)) & (target != ignored)).flatten().nonzero()
        if len(wrong):
            row = int(wrong[0])
            value = int(target.flatten()[row])
            return BatchError(
                f"row {row} has the class {value}, but the net has {classes} outputs, for the "
                f"classes 0 to {classes - 1}; correct the label, or build the net with "
                f"output_dim={max(value, 0) + 1}"
            )
    if target.is_floating_point() and "target dtype" in str(error):
        return BatchError(
            f"the targets are {target.dtype}, and a loss of classes takes class indices; convert "
            "them with targets.long(), or choose a loss of numbers (Losses.MEAN_SQUARED_ERROR)"
        )
    return None
