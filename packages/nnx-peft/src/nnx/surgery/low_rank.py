"""One Linear as two smaller ones."""

from __future__ import annotations

import torch
from nnx.surgery.sites import require_plain
from nnx.utils import validation as check
from torch import nn

_METHODS = ("svd",)


class LowRankLinear(nn.Sequential):
    """``nn.Linear(in, rank, bias=False)`` then ``nn.Linear(rank, out)``."""

    @property
    def factors(self) -> tuple[nn.Linear, nn.Linear]:
        first, second = self
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        return first, second

    @property
    def in_features(self) -> int:
        return self.factors[0].in_features

    @property
    def out_features(self) -> int:
        return self.factors[1].out_features


def check_rank(linear: nn.Module, rank: int, method: str) -> int:
    """The rank as a plain integer; refuses what :func:`low_rank_factorize` refuses."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"low_rank_factorize takes an nn.Linear, not a {type(linear).__name__}")
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, _METHODS))}, not {method!r}")
    require_plain(linear, "the layer")
    largest = min(linear.in_features, linear.out_features)
    return check.count("low_rank_factorize", "rank", rank, at_most=largest)


def allocate_factors(linear: nn.Linear, rank: int) -> LowRankLinear:
    """The two layers with flags, modes, dtype and device of ``linear`` and undefined values."""
    weight, bias = linear.weight, linear.bias
    with torch.device("meta"):  # allocate without drawing an initialization
        first = nn.Linear(linear.in_features, rank, bias=False)
        second = nn.Linear(rank, linear.out_features, bias=bias is not None)
    for layer in (first, second):
        values = torch.empty(layer.weight.shape, dtype=weight.dtype, device=weight.device)
        layer.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
    if bias is not None:
        second.bias = nn.Parameter(torch.empty_like(bias), requires_grad=bias.requires_grad)
    return LowRankLinear(first, second).train(linear.training)


@torch.no_grad()
def low_rank_factorize(linear: nn.Linear, *, rank: int, method: str = "svd") -> nn.Sequential:
    """Two Linears whose composition is the best rank-``rank`` approximation of ``linear``.

    The weight's truncated singular value decomposition ``U S V'`` becomes
    ``S V'`` (no bias) and ``U`` (with the original bias). At
    ``rank = min(in, out)`` it is exact up to rounding. The decomposition runs
    in FP32 for half types. ``linear`` is only read; dtype, device, mode and
    ``requires_grad`` flags carry over.

    Raises ``TypeError`` for another kind of module and ``ValueError`` for a
    rank outside ``[1, min(in, out)]`` or an unknown ``method``.
    """
    rank = check_rank(linear, rank, method)
    factors = allocate_factors(linear, rank)
    weight = linear.weight
    exact = weight if weight.dtype == torch.float64 else weight.float()
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    first, second = factors.factors
    first.weight.copy_(s[:rank, None] * vh[:rank])
    second.weight.copy_(u[:, :rank])
    if linear.bias is not None:
        second.bias.copy_(linear.bias)
    return factors
