"""One batch as metrics read it, and how it is given to them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from nnx.monitors.builtin import F1, BuiltinAccumulator, NegativeLogLikelihood, as_numpy
from nnx.tasks.decoding import as_rows
from nnx.tasks.semantics import BERNOULLI, CATEGORICAL, DECODED, Semantics


class BatchViews:
    """What metrics read of a batch of n samples: "labels", "probabilities", "continuous".

    ``target`` and ``valid`` are ``(n,)``, ``shares`` are ``(n, C)`` class
    probabilities as targets. ``width`` is the number of classes, 0 when unknown,
    and ``outputs`` the size of axis 1 of the outputs, ``None`` when unknown. ``logits`` are ``(n, C)`` when categorical, else ``(n,)``.
    """

    labels: Any
    probabilities: Any
    continuous: Any
    semantics: Semantics
    target: torch.Tensor
    shares: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    width: int = 0
    outputs: int | None = None

    def target_of(self, reads: str) -> torch.Tensor:
        """The targets to compare with: soft ones, or beside "labels" what those decide."""
        if reads == "probabilities":
            return self.target if self.shares is None else self.shares
        soft = self.semantics.kind == BERNOULLI and self.target.is_floating_point()
        return self.semantics.harden(self.target) if soft else self.target


class Views(BatchViews):
    """The views of raw outputs, each made when it is first read."""

    logits: torch.Tensor

    def __init__(
        self,
        semantics: Semantics,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> None:
        self.semantics = semantics
        output = output.detach()
        if semantics.kind in (CATEGORICAL, DECODED):
            self.logits, self.width = as_rows(output), output.shape[1]
        else:
            self.logits, self.width = output.reshape(-1), 2
        if semantics.has_shares(target, output):
            self.shares, target = as_rows(target), semantics.harden(target)
        self.target = target.reshape(-1)
        if len(self.target) != len(self.logits):
            raise ValueError(
                f"targets of shape {tuple(target.shape)} do not fit {semantics.kind} outputs of "
                f"shape {tuple(output.shape)}"
            )
        self.valid = None if valid is None else valid.reshape(-1)
        if semantics.ignored is not None and self.shares is None:
            kept = self.target != semantics.ignored
            self.valid = kept if self.valid is None else self.valid & kept
            self.target = torch.where(kept, self.target, 0)

    @cached_property
    def labels(self) -> torch.Tensor:
        return self.semantics.decide(self.logits)

    @cached_property
    def probabilities(self) -> torch.Tensor:
        return self.semantics.probabilities(self.logits)

    @property
    def continuous(self) -> torch.Tensor:
        return self.logits


def feed(accumulator: Any, reads: str, views: BatchViews, *, trusted: bool) -> None:
    """Add a batch to a metric that reads ``reads``; ``trusted``: every target is a class."""
    target, valid = views.target_of(reads), views.valid
    if isinstance(accumulator, NegativeLogLikelihood) and views.logits is not None:
        accumulator.update_logits(target, views.logits, valid)
        return
    prediction = getattr(views, reads)
    if isinstance(accumulator, F1) and views.width:
        accumulator.expect(views.width, trusted=trusted)
    if isinstance(accumulator, BuiltinAccumulator):
        accumulator.update(target, prediction, valid)
        return
    if valid is not None:
        target, prediction = target[valid], prediction[valid]
    if len(target):
        accumulator.update(as_numpy(target), as_numpy(prediction))
