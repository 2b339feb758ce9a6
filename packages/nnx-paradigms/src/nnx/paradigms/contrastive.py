"""Learning embeddings from two views of every sample (SimCLR, Chen et al. 2020, arXiv:2002.05709)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.distributed.process import rank_and_world
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.objectives.contrastive import nt_xent
from nnx.paradigms.gathering import gather_rows
from nnx.paradigms.imperative import ImperativeStep
from nnx.paradigms.nt_xent import nt_xent_sum
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn
    from nnx.models import Model
    from torch import nn


def nt_xent_loss(z1: torch.Tensor, z2: torch.Tensor, *, temperature: float = 0.5) -> torch.Tensor:
    """SimCLR's loss of two views ``z1`` and ``z2`` (B, D), a scalar: the mean of 2B rows.

    Each row must pick its partner among the other 2B − 1 by cosine similarity over
    ``temperature``. Rows are compared in blocks, so that the memory grows with B.

    Raises ``ValueError`` for unequal shapes, fewer than 2 samples and a ``temperature``
    that is not above 0.
    """
    if z1.dim() == 2 and len(z1) <= 1024:
        return nt_xent(z1, z2, temperature)
    nt_xent(z1[:2], z2[:2], temperature)  # its refusals
    if z1.shape != z2.shape:
        raise ValueError(f"the views have the shapes {tuple(z1.shape)} and {tuple(z2.shape)}")
    total = nt_xent_sum(torch.cat((z1, z2)), len(z1), temperature=temperature)
    return total / (2 * len(z1))


def simclr_train_step_factory(*, temperature: float = 0.5) -> TrainStepFn:
    """:class:`SimCLRObjective` as a ``train_step_fn`` in full precision.

    The record's ``error`` is the loss. Raises ``ValueError`` for ``temperature`` <= 0.
    """
    return ImperativeStep(SimCLRObjective(temperature=temperature), error_is_loss=True)


def simclr_objective(
    *, temperature: float = 0.5, microbatch: int | None = None, nonfinite: str = "fail"
) -> SimCLRObjective:
    """Contrast two views of every sample; see :class:`SimCLRObjective`."""
    return SimCLRObjective(temperature=temperature, microbatch=microbatch, nonfinite=nonfinite)


class SimCLRObjective(Objective):
    """NT-Xent over batches ``(view1, view2)`` or ``((view1, view2), target)``: ``"nt_xent"``.

    The net embeds each view in a forward of its own. In several processes every row is
    told from the rows of all of them, and the loss and its gradients are those of the
    joined batch.

    A batch is one set of negatives; accumulation adds batches and leaves that set as it
    is. ``microbatch`` embeds a larger batch in pieces of that many rows and computes a
    piece again when its gradient is due, so that the memory is that of a piece and the
    negatives are those of the whole batch (Gao et al. 2021, arXiv:2101.06983). A net with
    batch statistics is refused there, as every piece would have statistics of its own.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.5,
        microbatch: int | None = None,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.temperature = check.real("SimCLRObjective", "temperature", temperature, above=0)
        self.microbatch = microbatch
        if microbatch is not None:
            self.microbatch = check.count("SimCLRObjective", "microbatch", microbatch)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        first, second = two_views(ctx.batch, ctx.model.device)
        z1, z2 = (self._embed(ctx.model.net, view) for view in (first, second))
        if z1.dim() != 2:
            raise ValueError(
                f"SimCLR compares embeddings of shape (B, D), but the net gives {tuple(z1.shape)}"
            )
        z1, z2 = ctx.full_precision(z1), ctx.full_precision(z2)
        if rank_and_world()[1] == 1:
            rows = 2 * len(z1)
            loss = nt_xent_loss(z1, z2, temperature=self.temperature)
            return _result(LossTerm("nt_xent", loss * rows, rows))
        return _result(self._over_ranks(z1, z2))

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse pieces of a batch for a net with batch statistics."""
        if self.microbatch is None:
            return
        from torch.nn.modules.batchnorm import _BatchNorm

        found = [n for n, m in model.net.named_modules() if isinstance(m, _BatchNorm)]
        if found:
            raise ValueError(
                f"SimCLRObjective(microbatch=...): {found[0]!r} normalizes by batch statistics, "
                "which each piece would have of its own. Use layer or group normalization, or no "
                "microbatch"
            )

    def _embed(self, net: nn.Module, view: torch.Tensor) -> torch.Tensor:
        if self.microbatch is None or len(view) <= self.microbatch:
            return net(view)
        parts = [checkpoint(net, part, use_reentrant=False) for part in view.split(self.microbatch)]
        return torch.cat(parts)

    def _over_ranks(self, z1: torch.Tensor, z2: torch.Tensor) -> LossTerm:
        keys1, own = gather_rows(z1)
        keys2, _ = gather_rows(z2)
        samples = len(keys1)
        rows = torch.arange(own.start, own.stop, device=z1.device)
        total = nt_xent_sum(
            torch.cat((keys1, keys2)),
            samples,
            temperature=self.temperature,
            rows=torch.cat((rows, rows + samples)),
        )
        # One denominator for all processes: gradients cross between them.
        return LossTerm("nt_xent", total, 2 * samples / rank_and_world()[1])


def two_views(batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two views of ``(view1, view2)`` or ``((view1, view2), target)``, on ``device``."""
    parts = batch
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (tuple, list)):
        parts = batch[0]
    if (
        not isinstance(parts, (tuple, list))
        or len(parts) != 2
        or not all(isinstance(part, torch.Tensor) for part in parts)
        or parts[0].shape != parts[1].shape
    ):
        shown = [tuple(p.shape) for p in parts if isinstance(p, torch.Tensor)]
        raise ValueError(
            "two views of every sample are needed: batches (view1, view2) or ((view1, view2), "
            f"target) with views of one shape, not {type(batch).__name__} of {shown}. A batch of "
            "(inputs, labels) is no pair of views"
        )
    first, second = (part.to(device, non_blocking=True) for part in parts)
    return first, second


def _result(term: LossTerm) -> ObjectiveResult:
    return ObjectiveResult((term,), NNEvaluationDataPoint())


def of_config(config: Mapping[str, Any]) -> SimCLRObjective:
    """The factory of ``"paradigms.simclr"``: the arguments of :class:`SimCLRObjective`."""
    return SimCLRObjective(**config)
