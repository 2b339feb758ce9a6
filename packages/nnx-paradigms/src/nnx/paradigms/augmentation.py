"""Mixing the samples of a batch: Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from nnx.objectives import LossTerm, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import score, single_input
from nnx.paradigms.draws import DrawingObjective
from nnx.paradigms.imperative import ImperativeStep
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.losses import SupervisedTerms, is_native
from nnx.tasks.recorder import score_batch
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn


def mixup_train_step_factory(*, alpha: float = 0.4) -> TrainStepFn:
    """Mixup as a ``train_step_fn`` in full precision, with draws of the global streams.

    λ ~ Beta(alpha, alpha) is drawn once a batch. The record's accuracy is the correctness
    weighted by λ, and its error one minus it. Raises ``ValueError`` for ``alpha`` <= 0.
    """
    return ImperativeStep(_GlobalMixing(mixup_alpha=alpha))


def cutmix_train_step_factory(*, alpha: float = 1.0) -> TrainStepFn:
    """CutMix as a ``train_step_fn`` for images (B, C, H, W), with draws of the global streams.

    λ becomes the share of the image outside of the box that was pasted, after clipping.
    Raises ``ValueError`` for ``alpha`` <= 0, and for other inputs when it runs.
    """
    return ImperativeStep(_GlobalMixing(cutmix_alpha=alpha))


def mixup_objective(*, alpha: float = 0.4, **options: Any) -> MixingObjective:
    """Mixup alone; ``options`` are those of :class:`MixingObjective`."""
    return MixingObjective(mixup_alpha=alpha, **options)


def cutmix_objective(*, alpha: float = 1.0, **options: Any) -> MixingObjective:
    """CutMix alone; ``options`` are those of :class:`MixingObjective`."""
    return MixingObjective(cutmix_alpha=alpha, **options)


class MixingObjective(DrawingObjective):
    """Mixup, CutMix or a choice of both at every batch, as the term ``"mixed"``.

    The loss is λ · L(f(x'), y) + (1 − λ) · L(f(x'), y of the partner). With both alphas a
    batch is cut with probability ``switch``, else blended. ``per_element`` draws λ (and
    the box) for every sample. ``label_smoothing`` moves that share of each target to all
    classes. The last two need a cross-entropy of class indices. ``seed`` starts the
    draws, which are component state.

    Raises ``ValueError`` for alphas <= 0 and no alpha at all.
    """

    component_name = "mixing.objective"

    def __init__(
        self,
        *,
        mixup_alpha: float | None = None,
        cutmix_alpha: float | None = None,
        switch: float = 0.5,
        per_element: bool = False,
        label_smoothing: float = 0.0,
        seed: int | None = None,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(seed=seed, nonfinite=nonfinite)
        owner = "MixingObjective"
        if mixup_alpha is None and cutmix_alpha is None:
            raise ValueError(f"{owner} needs mixup_alpha, cutmix_alpha or both")
        self.mixup_alpha, self.cutmix_alpha = (
            None if value is None else float(check.real(owner, name, value, above=0))
            for name, value in (("mixup_alpha", mixup_alpha), ("cutmix_alpha", cutmix_alpha))
        )
        self.switch = float(check.real(owner, "switch", switch, at_least=0, at_most=1))
        self.per_element = check.flag(owner, "per_element", per_element)
        self.label_smoothing = float(
            check.real(owner, "label_smoothing", label_smoothing, at_least=0, below=1)
        )

    def spec(self) -> dict[str, Any]:
        return {
            "mixup_alpha": self.mixup_alpha,
            "cutmix_alpha": self.cutmix_alpha,
            "switch": self.switch,
            "per_element": self.per_element,
            "label_smoothing": self.label_smoothing,
        }

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        model = ctx.model
        inputs = single_input(model, ctx.batch, owner="Mixup and CutMix")
        target = model.split_batch(ctx.batch)[2]
        if not isinstance(target, torch.Tensor):
            raise ValueError("Mixup and CutMix need batches of (inputs, target tensor)")
        inputs, target = inputs.to(model.device), target.to(model.device)
        draws = self._draws(self.fork())
        mixed, lam, partner = self._mix(inputs, draws)
        output = model.net(mixed)
        first = score(ctx, output, target)
        second = score(ctx, output, target[partner])
        term = (
            self._blend(first, second, float(lam[0]))
            if not self.per_element and not self.label_smoothing
            else self._soft(ctx, first, second, lam)
        )
        record = _record(ctx, first, second, float(lam.mean()))
        return ObjectiveResult(() if term is None else (term,), record)

    # -- mixing ------------------------------------------------------------------------

    def _draws(self, generator: torch.Generator | None) -> Draws:
        return Draws(generator)

    def _mix(
        self, x: torch.Tensor, draws: Draws
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mixed inputs, λ of each sample (float64, on the CPU) and each one's partner."""
        cuts = self._cuts(draws)
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        assert alpha is not None
        count = len(x) if self.per_element else 1
        lam = draws.beta(alpha, count)
        partner = draws.permutation(len(x)).to(x.device)
        if cuts:
            boxes, lam = cut_boxes(lam, *_image_size(x), draws)
            mixed = _paste(x, x[partner], boxes)
        else:
            share = lam.to(x).view(-1, *[1] * (x.dim() - 1))
            mixed = share * x + (1 - share) * x[partner]
        return mixed, lam.expand(len(x)), partner

    def _cuts(self, draws: Draws) -> bool:
        if self.mixup_alpha is not None and self.cutmix_alpha is not None:
            return draws.uniform() < self.switch
        return self.mixup_alpha is None

    # -- the loss ----------------------------------------------------------------------

    def _blend(
        self, first: SupervisedTerms, second: SupervisedTerms, lam: float
    ) -> LossTerm | None:
        """Both targets' losses; they are permutations of each other, so one denominator."""
        if first.masked:
            return None
        numerator = lam * first.numerator + (1 - lam) * second.numerator
        if first.denominator is None:
            return LossTerm("mixed", numerator, None, "sum")
        return LossTerm("mixed", numerator, first.denominator)

    def _soft(
        self,
        ctx: ObjectiveContext,
        first: SupervisedTerms,
        second: SupervisedTerms,
        lam: torch.Tensor,
    ) -> LossTerm | None:
        """Cross-entropy of targets that are shares of two classes."""
        loss_fn: Any = ctx.model.loss_fn
        output = first.output
        if not is_native(loss_fn, (torch.nn.CrossEntropyLoss,)) or first.target.dim() != 1:
            raise ValueError(
                "per_element and label_smoothing of MixingObjective need the cross-entropy of "
                "class indices (N,)"
            )
        valid = (first.target != loss_fn.ignore_index) & (second.target != loss_fn.ignore_index)
        classes = output.shape[1]
        share = lam.to(output)[:, None]
        one, other = (
            F.one_hot(torch.where(valid, t.target, 0), classes).to(output) for t in (first, second)
        )
        soft = share * one + (1 - share) * other
        soft = soft * (1 - self.label_smoothing) + self.label_smoothing / classes
        log_probabilities = F.log_softmax(output, dim=1)
        if loss_fn.weight is not None:
            soft = soft * loss_fn.weight.to(soft)
        rows = -(soft * log_probabilities).sum(dim=1)
        count = int(valid.sum())
        return LossTerm("mixed", rows[valid].sum(), count) if count else None


class _GlobalMixing(MixingObjective):
    """Draws of the global streams of NumPy and torch, which a run seeds and restores."""

    def fork(self) -> Any:
        return None


class Draws:
    """The numbers that mixing needs, from a generator or from the global streams."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def beta(self, alpha: float, count: int) -> torch.Tensor:
        """λ ~ Beta(alpha, alpha), float64 (count,)."""
        if self._generator is None:
            return torch.from_numpy(np.random.beta(alpha, alpha, size=count))
        concentration = torch.full((2, count), alpha, dtype=torch.float64)
        parts = torch._standard_gamma(concentration, generator=self._generator)
        # Both underflow only for a tiny alpha, whose λ is 0 or 1.
        return (parts[0] / parts.sum(dim=0)).nan_to_num(nan=1.0)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator)

    def integers(self, high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=self._generator)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self._generator))


def cut_boxes(
    lam: torch.Tensor, height: int, width: int, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes (count, 4) as top, bottom, left, right, and the λ that they leave.

    A box has the share 1 − ``lam`` of the area around a uniform centre and is clipped at
    the image's edge; the λ returned is that of the clipped box.
    """
    ratio = (1.0 - lam).sqrt()
    rows, columns = (ratio * height).long(), (ratio * width).long()
    y, x = draws.integers(height, len(lam)), draws.integers(width, len(lam))
    top, bottom = (y - rows // 2).clamp(0, height), (y - rows // 2 + rows).clamp(0, height)
    left, right = (x - columns // 2).clamp(0, width), (x - columns // 2 + columns).clamp(0, width)
    area = (bottom - top) * (right - left)
    return torch.stack((top, bottom, left, right), dim=1), 1.0 - area.double() / (height * width)


def _paste(x: torch.Tensor, partner: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    height, width = x.shape[2:]
    top, bottom, left, right = boxes.to(x.device).T[:, :, None]
    y = torch.arange(height, device=x.device)
    z = torch.arange(width, device=x.device)
    inside = ((y >= top) & (y < bottom))[:, :, None] & ((z >= left) & (z < right))[:, None, :]
    return torch.where(inside[:, None], partner, x)


def _image_size(x: torch.Tensor) -> tuple[int, int]:
    if x.dim() != 4:
        raise ValueError(
            f"CutMix cuts boxes out of images (B, C, H, W), but the input is {tuple(x.shape)}; "
            "Mixup takes any shape"
        )
    return x.shape[2], x.shape[3]


def _record(
    ctx: ObjectiveContext, first: SupervisedTerms, second: SupervisedTerms, lam: float
) -> NNEvaluationDataPoint:
    """λ-weighted correctness: accuracy and error add up to 1."""
    scores = [score_batch(ctx.model, terms, loss=None).accuracy for terms in (first, second)]
    if scores[0] is None or scores[1] is None:
        return NNEvaluationDataPoint()
    accuracy = lam * scores[0] + (1 - lam) * scores[1]
    return NNEvaluationDataPoint(accuracy=accuracy, error=1.0 - accuracy)


def of_config(config: Mapping[str, Any]) -> MixingObjective:
    """The factory of ``"paradigms.mixing"``: the arguments of :class:`MixingObjective`."""
    return MixingObjective(**config)
