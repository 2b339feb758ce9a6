"""The built-in losses: factories from a spec's config to a module of raw outputs and targets.

Each takes ``reduction`` ("mean" or "sum") beside what its docstring names. A mean is over
what torch's own loss divides by, and over rows where that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nnx.params.base import check_keys
from nnx.utils import validation as check

Config = Mapping[str, Any]
Check = Callable[[str, str, Any], Any]


def _weights(owner: str, field: str, value: Any) -> torch.Tensor:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        check.refuse_type(owner, field, value, "a list of numbers")
    values = [check.real(owner, f"{field}[{i}]", one, at_least=0) for i, one in enumerate(value)]
    if not any(values):
        check.refuse(owner, field, value, "a list of numbers, one of them above 0")
    return torch.tensor(values, dtype=torch.float32)


_positive: Check = partial(check.real, above=0)
_index: Check = check.integer
_share: Check = partial(check.real, at_least=0, at_most=1)


def _read(id: str, config: Config, takes: Mapping[str, Check]) -> dict[str, Any]:
    owner = f"the loss {id!r}"
    check_keys(f"the config of {owner}", config, {**takes, "reduction": None})
    values = {key: takes[key](owner, key, config[key]) for key in config if key in takes}
    reduction = check.choice(owner, "reduction", config.get("reduction", "mean"), ("mean", "sum"))
    return {**values, "reduction": reduction}


def cross_entropy(config: Config) -> nn.Module:
    """Logits ``(B, C, ...)``; ``weight`` per class, ``label_smoothing``, ``ignore_index``."""
    takes: dict[str, Check] = {
        "weight": _weights, "label_smoothing": _share, "ignore_index": _index,
    }  # fmt: skip
    return nn.CrossEntropyLoss(**_read("cross_entropy", config, takes))


def negative_log_likelihood(config: Config) -> nn.Module:
    """Logits ``(B, C, ...)``, as the member of ``Losses``; ``weight``, ``ignore_index``."""
    takes: dict[str, Check] = {"weight": _weights, "ignore_index": _index}
    return nn.NLLLoss(**_read("negative_log_likelihood", config, takes))


def focal(config: Config) -> nn.Module:
    """Logits ``(B, C, ...)``: ``(1 - p) ** gamma`` times the cross entropy (Lin et al., 2017).

    ``gamma`` (2.0) and ``weight`` per class, the paper's alpha. The mean is over targets.
    """
    takes: dict[str, Check] = {"gamma": partial(check.real, at_least=0), "weight": _weights}
    return FocalLoss(**_read("focal", config, takes))


def binary_cross_entropy(config: Config) -> nn.Module:
    """Logits and 0/1 targets ``(B, ...)``; ``pos_weight`` and ``weight`` per output."""

    def pos_weight(owner: str, field: str, value: Any) -> torch.Tensor:
        if hasattr(value, "__iter__"):
            return _weights(owner, field, value)
        return torch.tensor(float(_positive(owner, field, value)))

    takes: dict[str, Check] = {"pos_weight": pos_weight, "weight": _weights}
    return nn.BCEWithLogitsLoss(**_read("binary_cross_entropy", config, takes))


def mean_squared_error(config: Config) -> nn.Module:
    """Outputs and targets of one shape."""
    return nn.MSELoss(**_read("mean_squared_error", config, {}))


def l1(config: Config) -> nn.Module:
    """Outputs and targets of one shape: the absolute error."""
    return nn.L1Loss(**_read("l1", config, {}))


def smooth_l1(config: Config) -> nn.Module:
    """Outputs and targets of one shape; quadratic below ``beta`` (1.0)."""
    return nn.SmoothL1Loss(**_read("smooth_l1", config, {"beta": _positive}))


def huber(config: Config) -> nn.Module:
    """Outputs and targets of one shape; quadratic below ``delta`` (1.0)."""
    return nn.HuberLoss(**_read("huber", config, {"delta": _positive}))


def poisson(config: Config) -> nn.Module:
    """The logarithms of rates (rates, where ``log_input`` is false), and counts of one shape."""
    takes: dict[str, Check] = {"log_input": check.flag, "full": check.flag, "eps": _positive}
    return nn.PoissonNLLLoss(**_read("poisson", config, takes))


def gaussian_nll(config: Config) -> nn.Module:
    """Targets ``(B, ..., D)``; outputs ``(B, ..., 2D)``: the means, then the log variances."""
    takes: dict[str, Check] = {"full": check.flag, "eps": _positive}
    return GaussianNLL(**_read("gaussian_nll", config, takes))


def ctc(config: Config) -> nn.Module:
    """Logits ``(B, T, C)``; targets ``(B, S)``, padded with ``padding`` (-1) on the right.

    ``blank`` (0) and ``zero_infinity`` are torch's. The mean is over rows, each divided by
    the length of its target.
    """
    takes: dict[str, Check] = {
        "blank": partial(check.count, at_least=0), "padding": _index, "zero_infinity": check.flag,
    }  # fmt: skip
    return CTC(**_read("ctc", config, takes))


def triplet(config: Config) -> nn.Module:
    """Outputs ``(B, 3, D)``: an anchor, one like it and one unlike it; targets are not read.

    ``margin`` (1.0), ``p``, ``eps`` and ``swap`` are those of ``nn.TripletMarginLoss``.
    """
    takes: dict[str, Check] = {
        "margin": _positive, "p": _positive, "eps": _positive, "swap": check.flag,
    }  # fmt: skip
    return Triplet(**_read("triplet", config, takes))


class FocalLoss(nn.CrossEntropyLoss):
    """The cross entropy of each target, less the more certain it is; its mean is over targets."""

    def __init__(
        self, gamma: float = 2.0, weight: torch.Tensor | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__(weight=weight, reduction=reduction)
        self.gamma = gamma

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logs = functional.log_softmax(input, dim=1)
        picked = logs.gather(1, target.unsqueeze(1)).squeeze(1)
        losses = -((1 - picked.exp()) ** self.gamma) * picked
        if self.weight is not None:
            losses = self.weight[target] * losses
        return losses.sum() if self.reduction == "sum" else losses.mean()


class GaussianNLL(nn.Module):
    """``nn.GaussianNLLLoss`` of outputs that hold both the means and the log variances."""

    decides = False  # its outputs are no decisions to be scored

    def __init__(self, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        super().__init__()
        self.full, self.eps, self.reduction = full, eps, reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.shape[-1] != 2 * target.shape[-1] or output.shape[:-1] != target.shape[:-1]:
            raise ValueError(
                "gaussian_nll needs outputs (..., 2D), the means and then the log variances of "
                f"targets (..., D); it has {tuple(output.shape)} for {tuple(target.shape)}"
            )
        mean, log_variance = output.chunk(2, dim=-1)
        return functional.gaussian_nll_loss(
            mean, target, log_variance.exp(), full=self.full, eps=self.eps,
            reduction=self.reduction,
        )  # fmt: skip


class CTC(nn.Module):
    """``nn.CTCLoss`` of logits with the batch first and of padded targets."""

    decides = False  # its outputs are no decisions to be scored

    def __init__(
        self,
        blank: int = 0,
        padding: int = -1,
        zero_infinity: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        if padding == blank or padding >= 0:
            raise ValueError(f"the loss 'ctc'.padding must be below 0, not {padding}")
        self.blank, self.padding, self.zero_infinity = blank, padding, zero_infinity
        self.reduction = reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.ndim != 3 or target.ndim != 2 or len(output) != len(target):
            raise ValueError(
                "ctc needs outputs (B, T, C) and padded targets (B, S); it has "
                f"{tuple(output.shape)} and {tuple(target.shape)}"
            )
        lengths = (target != self.padding).sum(1)
        steps = torch.full_like(lengths, output.shape[1])
        logs = functional.log_softmax(output, dim=-1).transpose(0, 1)
        return functional.ctc_loss(
            logs, target, steps, lengths, blank=self.blank, reduction=self.reduction,
            zero_infinity=self.zero_infinity,
        )  # fmt: skip


class Triplet(nn.TripletMarginLoss):
    """``nn.TripletMarginLoss`` of outputs that hold the three embeddings."""

    decides = False  # its outputs are no decisions to be scored

    def forward(self, output: torch.Tensor, target: Any) -> torch.Tensor:  # type: ignore[override]
        if output.ndim != 3 or output.shape[1] != 3:
            raise ValueError(
                "triplet needs outputs (B, 3, D), an anchor, one like it and one unlike it; it "
                f"has {tuple(output.shape)}"
            )
        anchor, like, unlike = output.unbind(1)
        return super().forward(anchor, like, unlike)
