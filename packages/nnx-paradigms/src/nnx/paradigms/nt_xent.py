"""NT-Xent in blocks of rows: the matrix of all similarities is never whole in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 1024


def nt_xent_sum(
    z: torch.Tensor, samples: int, *, temperature: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The summed NT-Xent of ``rows`` (all by default) among ``z`` (2B, D).

    Row ``i`` and row ``i + samples`` of ``z`` are partners. Raises ``ValueError`` for
    fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(
            "NT-Xent needs at least 2 samples in a batch: with one there is nothing to tell it from"
        )
    if rows is None:
        rows = torch.arange(len(z), device=z.device)
    unit = F.normalize(z, dim=1)
    total: torch.Tensor = _Blocks.apply(unit, rows, samples, temperature)  # type: ignore[no-untyped-call]
    return total


class _Blocks(torch.autograd.Function):
    """Rows are compared with all others a block at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, unit: torch.Tensor, rows: torch.Tensor, samples: int, temperature: float
    ) -> torch.Tensor:
        ctx.samples, ctx.temperature = samples, temperature
        total = unit.new_zeros(())
        normalizers = []
        for block in rows.split(BLOCK):
            similar, partner = _similarities(unit, block, samples, temperature)
            normalizers.append(similar.logsumexp(dim=1))
            total += (normalizers[-1] - similar.gather(1, partner[:, None])[:, 0]).sum()
        ctx.save_for_backward(unit, rows, torch.cat(normalizers))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        unit, rows, normalizers = ctx.saved_tensors
        change = torch.zeros_like(unit)
        for block, normalizer in zip(rows.split(BLOCK), normalizers.split(BLOCK)):
            similar, partner = _similarities(unit, block, ctx.samples, ctx.temperature)
            share = similar.sub_(normalizer[:, None]).exp_()
            share[torch.arange(len(block), device=block.device), partner] -= 1.0
            share *= grad / ctx.temperature
            change.addmm_(share.t(), unit[block])
            change.index_add_(0, block, share @ unit)
        return change, None, None, None


def _similarities(
    unit: torch.Tensor, block: torch.Tensor, samples: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the block, 2B) over the temperature, own rows at −∞; and the partners."""
    similar = unit[block] @ unit.t()
    similar /= temperature
    similar[torch.arange(len(block), device=block.device), block] = float("-inf")
    return similar, (block + samples) % (2 * samples)
