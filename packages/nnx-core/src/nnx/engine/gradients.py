"""Gradients of many parameters at once, on the fused multi-tensor kernels of torch."""

from __future__ import annotations

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
    """Whether no element is NaN or infinite, read from the device once."""
    dense = [g._values() if g.is_sparse else g for g in gradients]
    dense = [g for g in dense if g.numel()]
    if not dense:
        return True
    # The largest magnitude is NaN or infinite exactly when an element is.
    finite = [norm.isfinite() for norm in torch._foreach_norm(dense, float("inf"))]
    return bool(torch.stack([flag.to(finite[0].device) for flag in finite]).all())
