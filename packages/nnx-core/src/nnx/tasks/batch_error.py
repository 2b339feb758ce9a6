"""Why torch could not take a batch, in words that name the batch and the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class BatchError(ValueError, IndexError, RuntimeError):
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
    return None


def loss_error(
    loss_fn: nn.Module, output: torch.Tensor, target: Any, error: Exception
) -> BatchError | None:
    """What a failed loss says of its targets; ``None`` when they are not at fault."""
    if not isinstance(target, torch.Tensor) or output.ndim < 2 or not target.numel():
        return None
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
