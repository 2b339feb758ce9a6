"""I-JEPA: predicting the embeddings of hidden patches (Assran et al. 2023, arXiv:2301.08243).

The net (a :class:`ViTNN`) embeds the visible patches, a predictor guesses the embeddings
of the hidden ones, and the target is what a slow copy of the net makes of the whole image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.components import ComponentSpec
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult, UpdateEvent
from nnx.objectives.supervised import single_input
from nnx.paradigms.imperative import ImperativeStep
from nnx.paradigms.masks import random_block_mask as random_block_mask
from nnx.paradigms.predictor import JEPAPredictor as JEPAPredictor
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch import nn

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext, TrainStepFn
    from nnx.models import Model

MaskFn = Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]
"""``(n_patches, device)`` to the masks (context, target), 1-D booleans that complement each other."""


def build_target_encoder(source: nn.Module) -> nn.Module:
    """A frozen copy of ``source`` in eval mode, for :func:`update_ema` to move."""
    target = copy.deepcopy(source)
    target.requires_grad_(False)
    return target.eval()


@torch.no_grad()
def update_ema(source: nn.Module, target: nn.Module, momentum: float) -> None:
    """``target ← momentum · target + (1 − momentum) · source``, in place.

    Parameters are paired by name; buffers (batch statistics) are copied. Raises
    ``ValueError`` for ``momentum`` outside [0, 1) and ``KeyError`` for a parameter of
    ``target`` that ``source`` lacks, before anything is moved.
    """
    momentum = check.real("update_ema", "momentum", momentum, at_least=0, below=1)
    theirs = dict(source.named_parameters())
    pairs = []
    for name, parameter in target.named_parameters():
        if name not in theirs:
            raise KeyError(f"update_ema: the source has no parameter {name!r}")
        pairs.append((parameter, theirs[name]))
    for parameter, other in pairs:
        parameter.lerp_(other.to(parameter), 1.0 - momentum)
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


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
    momentum = _momentum("jepa_train_step_factory", ema_momentum)
    _freeze(target_encoder)
    loss = LatentLoss(target_encoder, predictor, mask_fn)
    return JEPATrainStep(ImperativeStep(loss, error_is_loss=True), target_encoder, momentum)


class JEPATrainStep:
    """A step that then moves the target; the component ``jepa.target_encoder``."""

    full_precision_only = True
    steps_optimizer = True

    def __init__(self, step: TrainStepFn, target_encoder: nn.Module, ema_momentum: float) -> None:
        self.step = step
        self.target_encoder = target_encoder
        self.ema_momentum = _momentum("JEPATrainStep", ema_momentum)

    def __call__(self, ctx: TrainStepContext) -> NNEvaluationDataPoint:
        record = self.step(ctx)
        update_ema(ctx.model.net, self.target_encoder, self.ema_momentum)
        return record

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("jepa.target_encoder", version=1)

    def component_state(self) -> dict[str, Any]:
        return {"ema_momentum": self.ema_momentum, "target": _state(self.target_encoder)}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """The saved target's names and shapes must be this one's."""
        return _target_problems(self.target_encoder, state.get("target"))

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


class JEPAObjective(Objective):
    """I-JEPA for the shared update engine, and the component ``jepa.objective``.

    ``predictor`` is a submodule of ``model.net`` (so that checkpoints and optimizers have
    it). The target moves once per committed update. A ``mask_fn`` that is a component
    itself (:class:`BlockMasks`) is saved with the objective.

    Raises ``ValueError`` for ``ema_momentum`` outside [0, 1); when a run is checked, for a
    predictor outside of the net or without an optimizer, and for a target that is part of
    the net or does not fit it.
    """

    def __init__(
        self,
        target_encoder: nn.Module,
        predictor: nn.Module,
        mask_fn: MaskFn,
        *,
        ema_momentum: float = 0.996,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.ema_momentum = _momentum("jepa_objective", ema_momentum)
        _freeze(target_encoder)
        self.target_encoder, self.predictor, self.mask_fn = target_encoder, predictor, mask_fn
        self.updates = 0
        self._loss = LatentLoss(target_encoder, predictor, mask_fn)
        self._net: nn.Module | None = None
        self._predictor_name: str | None = None

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        self._net = ctx.model.net
        result = self._loss(ctx)
        value = result.loss()
        metrics = {} if value is None else {"latent_mse": value}
        return ObjectiveResult(result.terms, NNEvaluationDataPoint(metrics=metrics))

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        names = [n for n, m in model.net.named_modules() if m is self.predictor]
        if not names:
            raise ValueError(
                "jepa_objective: the predictor is no part of model.net, so neither the optimizer "
                "nor a checkpoint would have it. Attach it first: model.net._jepa_predictor = "
                "predictor"
            )
        owned = {id(p) for o in optimizers.values() for g in o.param_groups for p in g["params"]}
        if any(p.requires_grad and id(p) not in owned for p in self.predictor.parameters()):
            raise ValueError("jepa_objective: no optimizer owns the predictor's parameters")
        held = {id(p) for p in self.target_encoder.parameters()}
        if any(id(p) in held for p in model.net.parameters()):
            raise ValueError(
                "jepa_objective: the target encoder shares parameters with model.net; make it with "
                "build_target_encoder(model.net)"
            )
        missing = {n for n, _ in self.target_encoder.named_parameters()} - {
            n for n, _ in model.net.named_parameters()
        }
        if missing:
            raise ValueError(
                f"jepa_objective: model.net has no parameter {sorted(missing)[0]!r} of the target "
                "encoder; make it with build_target_encoder(model.net)"
            )
        self._net, self._predictor_name = model.net, names[0]

    def after_update(self, events: tuple[UpdateEvent, ...]) -> None:
        """Move the target: once per committed update, whatever the number of optimizers."""
        assert self._net is not None
        update_ema(self._net, self.target_encoder, self.ema_momentum)
        self.updates += 1

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("jepa.objective", version=1)

    def component_state(self) -> dict[str, Any]:
        state = {
            "spec": self._spec(),
            "target": _state(self.target_encoder),
            "updates": self.updates,
        }
        if hasattr(self.mask_fn, "component_state"):
            state["masks"] = self.mask_fn.component_state()
        return state

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Another momentum or predictor, or a target that does not fit."""
        saved = state.get("spec")
        saved = saved if isinstance(saved, Mapping) else {}
        problems = [
            f"{name} is {value!r}, but the checkpoint was trained with {saved.get(name)!r}"
            for name, value in self._spec().items()
            if saved.get(name) != value
        ]
        return [*problems, *_target_problems(self.target_encoder, state.get("target"))]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.target_encoder.load_state_dict(state["target"])
        self.updates = int(state["updates"])
        if "masks" in state and hasattr(self.mask_fn, "load_component_state"):
            self.mask_fn.load_component_state(state["masks"], version=version)

    def _spec(self) -> dict[str, Any]:
        return {"ema_momentum": self.ema_momentum, "predictor": self._predictor_name}


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


def _momentum(owner: str, value: float) -> float:
    return float(check.real(owner, "ema_momentum", value, at_least=0, below=1))


def _freeze(target: nn.Module) -> None:
    target.requires_grad_(False)
    target.eval()


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _target_problems(target: nn.Module, saved: Any) -> list[str]:
    if not isinstance(saved, Mapping):
        return ["the saved state has no target encoder"]
    shapes = {name: tuple(value.shape) for name, value in target.state_dict().items()}
    other = {name: tuple(value.shape) for name, value in saved.items()}
    if shapes == other:
        return []
    names = sorted(n for n in shapes.keys() | other.keys() if shapes.get(n) != other.get(n))
    return [
        f"the saved target encoder differs in {names[0]!r}: {other.get(names[0])}, here {shapes.get(names[0])}"
    ]
