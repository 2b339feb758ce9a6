"""Generations of one network, each taught by the one before."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from nnx.objectives import KDObjective
from nnx.paradigms.distillation import kd_train_step_factory
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.params import NNTrainParams
    from nnx.provenance import ExperimentManifest
    from nnx.store import NNRun


def born_again_train(
    model: Any,
    *,
    generations: int = 3,
    train_params: NNTrainParams,
    provenance: ExperimentManifest | None = None,
    **kd_kwargs: Any,
) -> list[NNRun]:
    """Train ``model`` in place for ``generations``; their runs (Furlanello et al. 2018, arXiv:1805.04770).

    The first generation is an ordinary training. Every later one is distilled from a
    frozen copy of the model as the one before left it; ``kd_kwargs`` are ``alpha`` and
    ``temperature`` of :func:`kd_train_step_factory`. A later run names its teacher's run
    as ``parent_run_id``, so that the generations are one lineage with ids of their own.
    ``provenance`` is the first generation's manifest; that of a later one has as its
    ``objective`` the distillation, with run, checkpoint and weights' digest of the teacher.

    Raises ``ValueError`` for ``generations`` below 1 and wrong ``kd_kwargs``, before
    anything is trained.
    """
    generations = check.count("born_again_train", "generations", generations)
    unknown = sorted(set(kd_kwargs) - {"alpha", "temperature"})
    if unknown:
        raise TypeError(
            f"born_again_train takes alpha and temperature for the distillation, not "
            f"{', '.join(unknown)}"
        )
    check.real("born_again_train", "alpha", kd_kwargs.get("alpha", 0.5), at_least=0, at_most=1)
    check.real("born_again_train", "temperature", kd_kwargs.get("temperature", 4.0), above=0)
    runs = [model.train(params=train_params, provenance=provenance)]
    for _ in range(generations - 1):
        teacher = copy.copy(model)
        teacher.net = copy.deepcopy(model.net)
        step = kd_train_step_factory(teacher, **kd_kwargs)
        params = dataclasses.replace(train_params, parent_run_id=runs[-1].id)
        manifest = provenance
        if provenance is not None:
            source = {"teacher_run": runs[-1].id, "teacher_checkpoint": "last"}
            taught = KDObjective(teacher, **kd_kwargs, **source)
            manifest = dataclasses.replace(provenance, objective=taught.identity())
        runs.append(model.train(params=params, train_step_fn=step, provenance=manifest))
    return runs
