"""The optimizers of a fit by name: the one of a model, or the several of a trainer.

What differs between the two facades is here, and nowhere else in the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nnx.engine.owner import OwnerKind
from nnx.params import NNTrainerParams, NNTrainParams
from nnx.params.scheduler import DEFAULT_SCHEDULER
from nnx.precision import ResolvedPrecision, resolve_precision
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.engine.owner import UpdateOwner
    from nnx.models import Model

T = TypeVar("T")

# What a training state keeps of an optimizer, and the key under which it keeps several.
PLURALS = {
    "optimizer_state": "optimizers_state",
    "optimizer_type": "optimizer_types",
    "optimizer_topology": "optimizer_topologies",
    "optimizer_factory": "optimizer_factories",
    "scheduler_state": "schedulers_state",
    "scheduler_type": "scheduler_types",
}


class OneOptimizer:
    """The optimizer of ``NNModel.train``, whose name is not seen."""

    NAME = "default"

    entry = "NNModel.train"
    params_type: Any = NNTrainParams
    strict_groups = False  # whether a group may own nothing but what it matches
    trainer: Any = None  # what callbacks see as such

    def optims(self, params: Any) -> dict[str, Any]:
        """The parameters of each optimizer by name."""
        return {self.NAME: params.optim}

    def schedules(self, params: Any) -> dict[str, Any]:
        """The scheduler parameters of each optimizer by name."""
        return {self.NAME: params.scheduler}

    def steps_schedulers(self, params: Any) -> bool:
        """Whether the loop steps the schedulers."""
        return True

    def check(self, params: Any, owner: UpdateOwner) -> None:
        """Refuse what these optimizers cannot be asked for, or not by ``owner``."""

    def precision(self, model: Model, owner: UpdateOwner) -> ResolvedPrecision:
        """The precision that the run trains in."""
        return resolve_precision(model.params, model.device)

    def stored(self, params: Any) -> tuple[Any, Any]:
        """The parameters as a run stores them: of the training, and of a trainer."""
        return params, None

    def several(self, by_name: Mapping[str, T]) -> Mapping[str, T] | None:
        """What each optimizer has, for callbacks that know them by name."""
        return None

    def single(self, by_name: Mapping[str, T]) -> T | None:
        """What the one optimizer has."""
        return by_name[self.NAME]

    # Words -------------------------------------------------------------------------------

    def field(self, name: str) -> str:
        """The field that configures an optimizer."""
        return "params.optim"

    def subject(self, name: str) -> str:
        """Whose parameters an optimizer owns."""
        return "the model"

    def label(self, name: str) -> str | None:
        """An optimizer's name, where it has one to be told."""
        return None

    # In a training state -----------------------------------------------------------------

    def pack(self, each: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Entries of a training state from the singular ones of each optimizer."""
        return dict(each[self.NAME])

    def unpack(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """What :meth:`pack` packed; ``None`` when the other facade wrote ``state``."""
        if state.get("optimizers_state") is not None:
            return None
        return {self.NAME: {key: state.get(key) for key in PLURALS}}


class NamedOptimizers(OneOptimizer):
    """The optimizers of ``Trainer.train``, each the owner of what its groups match."""

    entry = "Trainer.train"
    params_type = NNTrainerParams
    strict_groups = True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def optims(self, params: Any) -> dict[str, Any]:
        return dict(params.optims)

    def schedules(self, params: Any) -> dict[str, Any]:
        return {name: params.schedulers.get(name, DEFAULT_SCHEDULER) for name in params.optims}

    def steps_schedulers(self, params: Any) -> bool:
        return bool(params.auto_step_schedulers)

    def check(self, params: Any, owner: UpdateOwner) -> None:
        if owner.is_default:
            raise ValueError(
                "Trainer.train has no default step: pass a trainer_step_fn, which steps each named "
                "optimizer itself, or an objective for the update engine"
            )
        for name, optim in params.optims.items():
            if len(params.optims) > 1 and optim.param_groups is None:
                raise ValueError(
                    f"optims[{name!r}] has no param_groups, so it would own every parameter, those "
                    "of the other optimizers too, and each would be stepped twice. Say what it "
                    'owns: param_groups=[NNParamGroupSpec(name_pattern="...")]'
                )
        if owner.kind is OwnerKind.TRAINER_STEP:
            _check_for_a_step_function(params)
        else:
            _check_for_an_objective(params)

    def precision(self, model: Model, owner: UpdateOwner) -> ResolvedPrecision:
        """That of the model's policy: the legacy flag is for ``NNModel.train``."""
        precision = super().precision(model, owner)
        if precision.source != "mixed_precision":
            return precision
        if precision.reduced and owner.kind is OwnerKind.OBJECTIVE:
            warn_caller(
                "Trainer.train does not apply the legacy mixed_precision flag; the objective runs "
                "in full precision. Declare a PrecisionPolicy to reduce it",
                RuntimeWarning,
            )
        plain = dataclasses.replace(model.params, mixed_precision=False)
        return resolve_precision(plain, model.device)

    def stored(self, params: Any) -> tuple[Any, Any]:
        """With the training parameters that are derived from a trainer's."""
        train = NNTrainParams(
            n_epochs=params.n_epochs,
            optim=params.optims[min(params.optims)],
            seed=params.seed,
            data_id=params.data_id,
            train_loader=params.train_loader,
            val_loader=params.val_loader,
            parent_run_id=params.resume_from_run_id or params.parent_run_id,
            resume_from_checkpoint=params.resume_from_checkpoint,
        )
        return train, params

    def several(self, by_name: Mapping[str, T]) -> Mapping[str, T] | None:
        return by_name

    def single(self, by_name: Mapping[str, T]) -> T | None:
        return None

    def field(self, name: str) -> str:
        return f"optims[{name!r}]"

    def subject(self, name: str) -> str:
        return f"the optimizer {name!r}"

    def label(self, name: str) -> str | None:
        return name

    def pack(self, each: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        keys = [key for key in PLURALS if all(key in one for one in each.values())]
        return {PLURALS[key]: {name: one[key] for name, one in each.items()} for key in keys}

    def unpack(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        names = state.get("optimizers_state")
        if names is None:
            return None
        return {
            name: {key: (state.get(plural) or {}).get(name) for key, plural in PLURALS.items()}
            for name in names
        }


def _check_for_a_step_function(params: Any) -> None:
    for name, optim in params.optims.items():
        for field, neutral in (("grad_clip_norm", None), ("accumulate_grad_batches", 1)):
            if getattr(optim, field) != neutral:
                raise ValueError(
                    f"optims[{name!r}].{field}={getattr(optim, field)}: a trainer_step_fn owns "
                    "its updates, so the Trainer cannot apply it. Do it inside the step "
                    "function, or pass objective="
                )


def _check_for_an_objective(params: Any) -> None:
    sizes = {name: optim.accumulate_grad_batches for name, optim in params.optims.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"an objective run has one update window, but optims disagree on "
            f"accumulate_grad_batches: {sizes}"
        )
    if not params.auto_step_schedulers:
        raise ValueError(
            "auto_step_schedulers=False leaves the schedulers to a trainer_step_fn, and an "
            "objective run has none"
        )
