"""What a run minimises, apart from how its optimizers are stepped.

An objective maps one microbatch to named :class:`LossTerm` values. The update
engine (``nnx.engine.update``) owns the rest: backward, accumulation, mixed
precision, clipping and the step. A term is a sum over samples (``numerator``)
and what it is a mean over (``denominator``), so that windows of uneven
microbatches add up to the loss of their union.
"""

from nnx.objectives.base import Objective, ObjectiveContext, UpdateEvent
from nnx.objectives.checks import check_objective_run as check_objective_run
from nnx.objectives.checks import check_step_precision as check_step_precision
from nnx.objectives.checks import check_update_owner as check_update_owner
from nnx.objectives.distillation import KDObjective, kd_objective
from nnx.objectives.registered import build_objective
from nnx.objectives.supervised import SupervisedObjective, supervised_objective
from nnx.objectives.terms import LossTerm, ObjectiveResult

__all__ = [
    "KDObjective",
    "LossTerm",
    "Objective",
    "ObjectiveContext",
    "ObjectiveResult",
    "SupervisedObjective",
    "UpdateEvent",
    "build_objective",
    "kd_objective",
    "supervised_objective",
]
