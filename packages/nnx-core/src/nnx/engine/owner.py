"""Who owns the updates of a run, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from nnx.engine.step import default_train_step
from nnx.objectives import check_update_owner


class OwnerKind(Enum):
    """The four owners; a value is the argument that names the owner, where one does."""

    DEFAULT = ""
    STEP_FUNCTION = "train_step_fn"
    TRAINER_STEP = "trainer_step_fn"
    OBJECTIVE = "objective"


@dataclass(frozen=True, slots=True)
class UpdateOwner:
    """Who computes a batch's update and takes it: the default step, or ``function``."""

    kind: OwnerKind = OwnerKind.DEFAULT
    function: Any = None

    @staticmethod
    def of(
        step_fn: Any, objective: Any, *, step: OwnerKind = OwnerKind.STEP_FUNCTION
    ) -> UpdateOwner:
        """The owner of a call that may bring a step function, of kind ``step``, or an objective.

        Refuses both at once, one passed as the other, and what cannot be called.
        """
        check_update_owner(objective=objective, step_fn=step_fn, step_name=step.value)
        if objective is not None:
            return UpdateOwner(OwnerKind.OBJECTIVE, objective)
        if step_fn is None or step_fn is default_train_step:
            return UpdateOwner()
        if not callable(step_fn):
            raise TypeError(f"{step.value} must be callable, not {type(step_fn).__name__}")
        return UpdateOwner(step, step_fn)

    @property
    def is_default(self) -> bool:
        """Whether the supervised step takes the updates."""
        return self.kind is OwnerKind.DEFAULT

    @property
    def step_fn(self) -> Any:
        """The caller's step function, which owns its updates; ``None`` without one."""
        own = (OwnerKind.STEP_FUNCTION, OwnerKind.TRAINER_STEP)
        return self.function if self.kind in own else None

    @property
    def objective(self) -> Any:
        """The objective; ``None`` without one."""
        return self.function if self.kind is OwnerKind.OBJECTIVE else None
