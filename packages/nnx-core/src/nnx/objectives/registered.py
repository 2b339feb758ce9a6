"""Objectives that a plugin contributes, built by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnx.objectives.supervised import SupervisedObjective, supervised_objective
from nnx.plugins.manager import registry
from nnx.utils.jsonlike import freeze_mapping


def build_objective(
    id: str, version: int = 1, config: Mapping[str, Any] | None = None
) -> Callable[[Any], Any]:
    """The objective that the registered factory ``id`` makes of ``config``.

    ``config`` is JSON-like and reaches the factory read-only. An objective is
    runtime code: a run does not record it, so pass the same one to a resume.
    Raises ``UnknownIdError`` for an id that nobody registered, ``TypeError`` for a
    factory that returns something that cannot be called.
    """
    known = registry("objective")
    objective = known.resolve(id, version)(freeze_mapping(config or {}, f"the config of {id!r}"))
    if not callable(objective):
        raise TypeError(
            f"the objective factory {id}@v{version} of {known.owner(id, version)} must return an "
            f"objective, a callable of one ObjectiveContext, not {type(objective).__name__}"
        )
    return objective


def supervised(config: Mapping[str, Any]) -> SupervisedObjective:
    """The factory of ``"supervised"``; ``config`` may hold ``nonfinite``."""
    return supervised_objective(**config)
