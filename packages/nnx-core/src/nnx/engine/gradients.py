"""Gradients of many parameters at once, on the fused multi-tensor kernels of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

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


def nonfinite_flags(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Scalars, one of them positive when an element is NaN or infinite; no device is read."""
    if not gradients:
        return []
    if set(map(type, gradients)) == {torch.Tensor}:
        # The kernel of the gradient scaler: it divides by one, and notes what is not finite.
        with contextlib.suppress(RuntimeError):  # several devices, sparse, complex, an old device
            found = torch.zeros((), device=gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, found, _one(gradients[0].device)
            )
            return [found]
    dense = [_dense(gradient) for gradient in gradients]
    return _not_finite([tensor for tensor in dense if tensor.numel()])


def nonfinite_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors with an element that is NaN or infinite; the tensors are only read."""
    dense = {name: _dense(tensor.detach()) for name, tensor in tensors.items()}
    dense = {name: tensor for name, tensor in dense.items() if tensor.numel()}
    return [name for name, flag in zip(dense, read(_not_finite([*dense.values()]))) if flag]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, without the zeros of a sparse one."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held._values() if held.is_sparse else held


def _not_finite(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A scalar per tensor: 1 where an element is NaN or infinite, else 0."""
    if not tensors:
        return []
    # The largest magnitude is NaN or infinite exactly when an element is.
    return [1 - n.isfinite().float() for n in torch._foreach_norm(tensors, float("inf"))]


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def all_finite(gradients: list[torch.Tensor]) -> bool:
    """Whether no element is NaN or infinite; with one read of the device."""
    return not any(read(nonfinite_flags(gradients)))


def nonfinite_gradient(
    optimizers: Mapping[str, torch.optim.Optimizer], net: torch.nn.Module | None
) -> str:
    """Which gradient is not finite, in words, with its name in ``net``."""
    named = () if net is None else net.named_parameters()
    names = {id(parameter): name for name, parameter in named}
    for owner, optimizer in optimizers.items():
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(owned):
            if parameter.grad is not None and not all_finite([parameter.grad]):
                place = names.get(id(parameter), f"optimizer {owner!r}, parameter {index}")
                return f"the gradient of {place}, shape {tuple(parameter.shape)}, is not finite"
    return "a gradient of the update window is not finite"


def read(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of floating scalars; those of one accelerator with one read of it."""
    first = scalars[0] if scalars else None
    if len(scalars) < 2 or first is None or first.is_cpu:
        return [scalar.item() for scalar in scalars]
    if any(scalar.device != first.device for scalar in scalars):
        return [scalar.item() for scalar in scalars]
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in scalars) else torch.float32
    return torch.stack([s.detach().reshape(()).to(dtype) for s in scalars]).tolist()
