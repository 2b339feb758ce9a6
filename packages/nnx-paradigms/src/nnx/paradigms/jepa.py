"""I-JEPA: predicting the embeddings of hidden patches (Assran et al. 2023, arXiv:2301.08243).

The net (a :class:`ViTNN`) embeds the visible patches, a predictor guesses the embeddings
of the hidden ones, and the target is what a slow copy of the net makes of the whole image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nnx.components import ComponentSpec
from nnx.objectives import LossTerm, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import single_input
from nnx.paradigms.imperative import ImperativeStep
from nnx.paradigms.masks import random_block_mask as random_block_mask
from nnx.paradigms.predictor import JEPAPredictor as JEPAPredictor
from nnx.paradigms.targets import TargetObjective, freeze, momentum_of, state_of, target_problems
from nnx.paradigms.targets import build_target_encoder as build_target_encoder
from nnx.paradigms.targets import update_ema as update_ema
from nnx.records import NNEvaluationDataPoint
from nnx.utils.modes import eval_mode
from torch import nn

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext, TrainStepFn

MaskFn = Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]
"""``(n_patches, device)`` to the masks (context, target), 1-D booleans that complement each other."""


def jepa_train_step_factory(
    target_encoder: nn.Module,
    predictor: nn.Module,
    mask_fn: MaskFn,
    *,
    ema_momentum: float = 0.996,
) -> TrainStepFn:
    """I-JEPA as a ``train_step_fn`` in full precision; see :class:`JEPAObjective`.

    The optimizer must own the predictor's parameters: attach it to the net first. The
    returned :class:`JEPATrainStep` is a component, so that a resume continues the target.
    """
    momentum = momentum_of("jepa_train_step_factory", ema_momentum)
    freeze(target_encoder)
    loss = LatentLoss(target_encoder, predictor, mask_fn)
    return JEPATrainStep(ImperativeStep(loss, error_is_loss=True), target_encoder, momentum)


class JEPATrainStep:
    """A step that then moves the target; the component ``jepa.target_encoder``."""

    full_precision_only = True
    steps_optimizer = True

    def __init__(self, step: TrainStepFn, target_encoder: nn.Module, ema_momentum: float) -> None:
        self.step = step
        self.target_encoder = target_encoder
        self.ema_momentum = momentum_of("JEPATrainStep", ema_momentum)

    def __call__(self, ctx: TrainStepContext) -> NNEvaluationDataPoint:
        record = self.step(ctx)
        update_ema(ctx.model.net, self.target_encoder, self.ema_momentum)
        return record

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("jepa.target_encoder", version=1)

    def component_state(self) -> dict[str, Any]:
        return {"ema_momentum": self.ema_momentum, "target": state_of(self.target_encoder)}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """The saved target's names and shapes must be this one's."""
        return target_problems(self.target_encoder, state.get("target"))

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.target_encoder.load_state_dict(state["target"])


class LatentLoss:
    """The loss of one microbatch, as the term ``"latent_mse"``: squared errors over elements."""

    def __init__(self, target_encoder: nn.Module, predictor: nn.Module, mask_fn: MaskFn) -> None:
        self.target_encoder, self.predictor, self.mask_fn = target_encoder, predictor, mask_fn

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        model: Any = ctx.model
        images = single_input(model, ctx.batch, owner="I-JEPA").to(model.device)
        positions = model.net.patch_positions()
        context, hidden = self._masks(len(positions), model.device)
        keep = context.expand(len(images), -1)
        embeds = model.net(images, mask=keep)
        with torch.no_grad(), eval_mode(self.target_encoder):
            wanted = self.target_encoder(images)[:, positions[hidden]]
        visible = torch.cat((positions.new_zeros(1), positions[context]))
        guessed = self.predictor(embeds, visible, positions[hidden])
        error = ctx.full_precision(guessed) - ctx.full_precision(wanted)
        term = LossTerm("latent_mse", error.square().sum(), error.numel())
        return ObjectiveResult((term,), NNEvaluationDataPoint())

    def _masks(self, patches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        context, hidden = self.mask_fn(patches, device)
        for mask in (context, hidden):
            if mask.dtype != torch.bool or mask.shape != (patches,):
                raise ValueError(
                    f"mask_fn must return two boolean masks of shape ({patches},), not "
                    f"{mask.dtype} of {tuple(mask.shape)}"
                )
        context, hidden = context.to(device), hidden.to(device)
        if bool((context == hidden).any()) or not bool(hidden.any()):
            raise ValueError(
                "mask_fn must put every patch into exactly one of the masks (context, target), and "
                "at least one into the target"
            )
        return context, hidden


class JEPAObjective(TargetObjective):
    """I-JEPA for the shared update engine, and the component ``jepa.objective``.

    ``predictor`` is a submodule of ``model.net`` (so that checkpoints and optimizers have
    it). The target moves once per committed update. A ``mask_fn`` that is a component
    itself (:class:`BlockMasks`) is saved with the objective.

    Raises ``ValueError`` for ``ema_momentum`` outside [0, 1); when a run is checked, for a
    predictor outside of the net or without an optimizer, and for a target that is part of
    the net or does not fit it.
    """

    component_name = "jepa.objective"
    owner = "jepa_objective"

    def __init__(
        self,
        target_encoder: nn.Module,
        predictor: nn.Module,
        mask_fn: MaskFn,
        *,
        ema_momentum: float = 0.996,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(target_encoder, predictor, ema_momentum=ema_momentum, nonfinite=nonfinite)
        self.mask_fn = mask_fn
        self._loss = LatentLoss(target_encoder, predictor, mask_fn)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        self.net = ctx.model.net
        result = self._loss(ctx)
        value = result.loss()
        metrics = {} if value is None else {"latent_mse": value}
        return ObjectiveResult(result.terms, NNEvaluationDataPoint(metrics=metrics))

    def component_state(self) -> dict[str, Any]:
        state = super().component_state()
        if hasattr(self.mask_fn, "component_state"):
            state["masks"] = self.mask_fn.component_state()
        return state

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        super().load_component_state(state, version=version)
        if "masks" in state and hasattr(self.mask_fn, "load_component_state"):
            self.mask_fn.load_component_state(state["masks"], version=version)


def jepa_objective(
    target_encoder: nn.Module,
    predictor: nn.Module,
    mask_fn: MaskFn,
    *,
    ema_momentum: float = 0.996,
    nonfinite: str = "fail",
) -> JEPAObjective:
    """I-JEPA as an objective; see :class:`JEPAObjective`."""
    return JEPAObjective(
        target_encoder, predictor, mask_fn, ema_momentum=ema_momentum, nonfinite=nonfinite
    )
