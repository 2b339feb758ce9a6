"""The cross-entropy of a large vocabulary without its logits in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 23  # logits that are in memory at once


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """``cross_entropy(hidden @ weight.T, targets, reduction="sum")``, a scalar in float32 or wider.

    ``hidden`` (N, D), ``weight`` (vocab, D), ``targets`` (N,) of class ids, all of
    them valid. ``smoothing`` is torch's ``label_smoothing``.

    Logits are made for some rows at a time, and their gradient at once with
    them, so neither is kept: memory grows with N + vocab, not with their
    product. It runs in the dtype of the enclosing autocast.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    apply: Any = _LinearCrossEntropy.apply
    total: torch.Tensor = apply(hidden, weight, targets, smoothing, dtype)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        smoothing: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(dtype)
            grad_hidden = torch.empty_like(hidden) if wants_hidden else None
            grad_weight = torch.zeros_like(weight) if wants_weight else None
            total = hidden.new_zeros((), dtype=_wide(dtype))
            for rows in _chunks(len(hidden), len(weight)):
                h, target = hidden[rows].to(dtype), targets[rows]
                logits = (h @ w.t()).to(_wide(dtype))
                total += F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
                if grad_hidden is None and grad_weight is None:
                    continue
                slope = _slope(logits, target, smoothing).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = slope @ w
                if grad_weight is not None:
                    if grad_weight.dtype == dtype:
                        grad_weight.addmm_(slope.t(), h)
                    else:
                        grad_weight += slope.t() @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        grads = (None if g is None else g.mul_(slope.to(g.dtype)) for g in ctx.saved_tensors)
        return (*grads, None, None, None)


def _slope(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The derivative of the summed cross-entropy by the logits, in their memory."""
    torch.softmax(logits, dim=-1, out=logits)
    if smoothing:
        logits -= smoothing / logits.shape[-1]
    logits[torch.arange(len(target), device=target.device), target] -= 1.0 - smoothing
    return logits


def _chunks(rows: int, classes: int) -> list[slice]:
    size = max(1, _CHUNK // classes)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
