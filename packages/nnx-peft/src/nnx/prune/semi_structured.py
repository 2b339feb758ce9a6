"""2:4 sparsity: two zeros in every four weights, which Ampere and later GPUs skip."""

from __future__ import annotations

from nnx.prune.magnitude import matching_linears
from nnx.quantize.torchao import require
from torch import nn


def semi_structured_24(net: nn.Module, *, layer_pattern: str = "*") -> int:
    """Give each matching Linear a 2:4 semi-structured weight; return how many.

    The weights are replaced in place through ``torchao.sparsity.sparsify_``,
    which keeps the two largest of every four values: prune to a 2:4 pattern
    first, or accept that choice. When nothing matches, torchao is not asked and
    the pattern is warned about.

    Raises ``ImportError`` without torchao. torch's ``RuntimeError`` on hardware
    or shapes without support is passed on.
    """
    sparsify_ = require("torchao.sparsity:sparsify_", "2:4 sparsity")
    semi_sparse_weight = require("torchao.sparsity:semi_sparse_weight", "2:4 sparsity")

    chosen = matching_linears("semi_structured_24", net, layer_pattern)
    if chosen:
        sparsify_(net, semi_sparse_weight(), filter_fn=lambda module, name: module in chosen)
    return len(chosen)
