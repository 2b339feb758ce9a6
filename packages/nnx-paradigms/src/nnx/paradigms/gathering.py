"""Rows of all processes in one tensor, with gradients that find their way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nnx.distributed.process import rank_and_world


def gather_rows(rows: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """The rows (N, D) of every process, by rank, and where this process's own are.

    Differentiable: the gradient of a row is the sum over the processes that used it, so
    all of them must back-propagate what they made of the rows. Processes may hold
    different numbers of rows.
    """
    rank, world = rank_and_world()
    if world == 1:
        return rows, slice(0, len(rows))
    counts = _counts(len(rows), world, rows.device)
    start = sum(counts[:rank])
    gathered: torch.Tensor = _Gather.apply(rows, counts)  # type: ignore[no-untyped-call]
    return gathered, slice(start, start + counts[rank])


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """``values`` summed over all processes, detached."""
    total = values.detach().clone()
    if rank_and_world()[1] > 1:
        dist.all_reduce(total)
    return total


def _counts(mine: int, world: int, device: torch.device) -> list[int]:
    counts = torch.zeros(world, dtype=torch.int64, device=device)
    counts[dist.get_rank()] = mine
    dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


class _Gather(torch.autograd.Function):
    """All rows forward; the sum of all gradients backward, of which each takes its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.counts = counts
        longest = max(counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.split(ctx.counts)[dist.get_rank()], None
