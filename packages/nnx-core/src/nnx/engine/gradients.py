"""Gradients of many parameters at once, on the fused multi-tensor kernels of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Gradients = Sequence[torch.Tensor | None]


def collect(
    parameters: Sequence[torch.nn.Parameter], *, clone: bool = False
) -> list[torch.Tensor | None]:
    """The ``.grad`` of every parameter, in order."""
    return [p.grad.clone() if clone and p.grad is not None else p.grad for p in parameters]


def restore(parameters: Sequence[torch.nn.Parameter], gradients: Gradients) -> None:
    """Give every parameter its gradient back."""
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def divide(gradients: Gradients, divisor: float) -> None:
    """Divide in place; division by one is skipped."""
    present = [g for g in gradients if g is not None]
    if present and divisor != 1.0:
        torch._foreach_div_(present, divisor)


def add(parameters: Sequence[torch.nn.Parameter], gradients: Gradients) -> None:
    """Add ``gradients`` to the ``.grad`` of ``parameters``."""
    for parameter, gradient in zip(parameters, gradients):
        if gradient is None:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or infinite; on an accelerator with one read of the device."""
    held = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]  # of a shard
    dense = [g._values() if g.is_sparse else g for g in held]
    dense = [g for g in dense if g.numel()]
    if all(g.is_cpu and not g.is_complex() for g in dense):
        # A finite sum has finite summands; only the overflow of a sum needs a second look.
        return all(math.isfinite(g.sum().item()) or bool(g.isfinite().all()) for g in dense)
    # The largest magnitude is NaN or infinite exactly when an element is.
    norms = torch._foreach_norm(dense, float("inf"))
    return bool(torch.stack([n.isfinite().to(norms[0].device) for n in norms]).all())
