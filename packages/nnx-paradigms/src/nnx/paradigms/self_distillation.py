"""Learning from a slow copy of oneself: BYOL and DINO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nnx.objectives import LossTerm, ObjectiveContext, ObjectiveResult, UpdateEvent
from nnx.paradigms.collapse import embedding_metrics
from nnx.paradigms.contrastive import two_views
from nnx.paradigms.gathering import sum_over_ranks
from nnx.paradigms.targets import TargetObjective
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check

if TYPE_CHECKING:
    from torch import nn


class BYOLObjective(TargetObjective):
    """BYOL of two views of every sample (Grill et al. 2020, arXiv:2006.07733): ``"byol"``.

    ``predictor`` guesses from the net's embedding of one view what the target makes of
    the other; the loss is 2 − 2 cos of the two, both ways added. The predictor is a
    submodule of the net, attached after ``build_target_encoder(model.net)``. The target
    runs in eval mode with the net's batch statistics and moves once per committed update.
    The record has :func:`embedding_metrics` of the first view.

    Raises ``ValueError`` for ``ema_momentum`` outside [0, 1); when a run is checked, as
    :class:`JEPAObjective` does; and when it runs, for a prediction of another shape.
    """

    component_name = "byol.objective"
    owner = "byol_objective"

    def __init__(
        self,
        target_encoder: nn.Module,
        predictor: nn.Module,
        *,
        ema_momentum: float = 0.996,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(target_encoder, predictor, ema_momentum=ema_momentum, nonfinite=nonfinite)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        assert self.predictor is not None
        self.net = ctx.model.net
        views = two_views(ctx.batch, ctx.model.device)
        embeds = [ctx.model.net(view) for view in views]
        guesses = [ctx.full_precision(self.predictor(embed)) for embed in embeds]
        wanted = [ctx.full_precision(self.wanted(view)) for view in views]
        if guesses[0].shape != wanted[0].shape or guesses[0].dim() != 2:
            raise ValueError(
                f"{self.owner}: the predictor gives {tuple(guesses[0].shape)} for a target of "
                f"{tuple(wanted[0].shape)}; both must be (B, D)"
            )
        alike = [F.cosine_similarity(g, w, dim=1) for g, w in zip(guesses, reversed(wanted))]
        loss = (4.0 - 2.0 * (alike[0] + alike[1])).sum()
        record = NNEvaluationDataPoint(metrics=embedding_metrics(embeds[0]))
        return ObjectiveResult((LossTerm("byol", loss, len(guesses[0])),), record)


class DINOObjective(TargetObjective):
    """Self-distillation without labels (Caron et al. 2021, arXiv:2104.14294): ``"dino"``.

    Batches hold ``global_views`` views for the target and any number of further ones,
    which may be smaller, for the net alone: ``(global, global, local, ...)``, or a pair of
    those and a label. The net learns to give for one view the target's distribution over
    outputs (B, K) for another; the loss is the mean cross-entropy over all such pairs.
    The target's outputs are centred by a running mean, over the rows of all processes, and
    sharpened by ``teacher_temperature``. Target and centre move once per committed update
    and are component state. The record has :func:`embedding_metrics` of the first view.

    Raises ``ValueError`` for temperatures <= 0, momenta outside [0, 1) and fewer than 1
    global view; when it runs, for fewer than 2 views.
    """

    component_name = "dino.objective"
    owner = "dino_objective"

    def __init__(
        self,
        target_encoder: nn.Module,
        *,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        center_momentum: float = 0.9,
        ema_momentum: float = 0.996,
        global_views: int = 2,
        nonfinite: str = "fail",
    ) -> None:
        owner = self.owner
        self.student_temperature, self.teacher_temperature = (
            float(check.real(owner, name, value, above=0))
            for name, value in (
                ("student_temperature", student_temperature),
                ("teacher_temperature", teacher_temperature),
            )
        )
        self.center_momentum = float(
            check.real(owner, "center_momentum", center_momentum, at_least=0, below=1)
        )
        self.global_views = check.count(owner, "global_views", global_views)
        super().__init__(target_encoder, ema_momentum=ema_momentum, nonfinite=nonfinite)
        self.center: torch.Tensor | None = None
        self._sums: list[tuple[torch.Tensor, int]] = []

    def spec(self) -> dict[str, Any]:
        names = ("student_temperature", "teacher_temperature", "center_momentum", "global_views")
        return {**super().spec(), **{name: getattr(self, name) for name in names}}

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        self.net = ctx.model.net
        views = _views(ctx.batch, ctx.model.device, self.global_views)
        given = [ctx.full_precision(ctx.model.net(view)) for view in views]
        raw = torch.stack([ctx.full_precision(self.wanted(v)) for v in views[: self.global_views]])
        if self.center is None:
            self.center = torch.zeros_like(raw[0, 0])
        center = self.center.to(raw)
        teachers = ((raw - center) / self.teacher_temperature).softmax(dim=-1)
        students = [F.log_softmax(z / self.student_temperature, dim=-1) for z in given]
        pairs = [
            -(teacher * student).sum(dim=-1)
            for i, teacher in enumerate(teachers)
            for j, student in enumerate(students)
            if i != j
        ]
        self._sums.append((raw.sum(dim=(0, 1)), raw.shape[0] * raw.shape[1]))
        term = LossTerm("dino", torch.stack(pairs).mean(dim=0).sum(), len(given[0]))
        record = NNEvaluationDataPoint(metrics=embedding_metrics(given[0]))
        return ObjectiveResult((term,), record)

    def after_update(self, events: tuple[UpdateEvent, ...]) -> None:
        """Move the target, and the centre by the outputs of the window's rows."""
        super().after_update(events)
        assert self.center is not None
        window = self._sums[-events[0].microbatches :]  # what was dropped before does not count
        self._sums = []
        total = torch.stack([rows for rows, _ in window]).sum(dim=0)
        both = sum_over_ranks(torch.cat((total, total.new_tensor([sum(n for _, n in window)]))))
        self.center = self.center.to(total).lerp(both[:-1] / both[-1], 1.0 - self.center_momentum)

    def component_state(self) -> dict[str, Any]:
        center = None if self.center is None else self.center.detach().clone()
        return {**super().component_state(), "center": center}

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        super().load_component_state(state, version=version)
        self.center, self._sums = state["center"], []


def byol_objective(
    target_encoder: nn.Module,
    predictor: nn.Module,
    *,
    ema_momentum: float = 0.996,
    nonfinite: str = "fail",
) -> BYOLObjective:
    """BYOL as an objective; see :class:`BYOLObjective`."""
    return BYOLObjective(target_encoder, predictor, ema_momentum=ema_momentum, nonfinite=nonfinite)


def dino_objective(target_encoder: nn.Module, **options: Any) -> DINOObjective:
    """DINO as an objective; ``options`` are those of :class:`DINOObjective`."""
    return DINOObjective(target_encoder, **options)


def _views(batch: Any, device: torch.device, global_views: int) -> list[torch.Tensor]:
    """All views of ``(view, view, ...)`` or ``((view, view, ...), target)``, on ``device``."""
    parts = batch
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (tuple, list)):
        parts = batch[0]
    if (
        not isinstance(parts, Sequence)
        or len(parts) < max(2, global_views)
        or not all(isinstance(part, torch.Tensor) for part in parts)
        or len({len(part) for part in parts}) != 1
    ):
        raise ValueError(
            f"DINO needs batches of at least {max(2, global_views)} views of every sample, the "
            f"first {global_views} for the target: (view, view, ...) or ((view, view, ...), "
            f"target), not {type(batch).__name__}"
        )
    shapes = {part.shape for part in parts[:global_views]}
    if len(shapes) != 1:
        raise ValueError(f"the global views must have one shape, not {sorted(map(tuple, shapes))}")
    return [part.to(device, non_blocking=True) for part in parts]
