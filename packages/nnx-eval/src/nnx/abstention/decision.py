"""A policy on the answer to a typed question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import AbstentionError
from .policy import AbstentionPolicy
from .result import Outcome


@dataclass(frozen=True, slots=True)
class SelectiveDecision:
    """A provider's answer, unchanged, and whether the policy lets it stand."""

    result: Any
    outcome: Outcome
    policy_id: str
    input_field: str
    calibrator_id: str | None

    @property
    def accepted(self) -> bool:
        return self.outcome.accepted

    @property
    def abstained(self) -> bool:
        return not self.outcome.accepted


def decide(result: Any, policy: AbstentionPolicy, *, model_id: str) -> SelectiveDecision:
    """Apply ``policy`` to one ``ChoiceResult`` or ``ScoreResult`` of the model ``model_id``.

    Its option ids, in order, must be the policy's labels. Abstaining is a
    success: the result and its ``raw`` answer are kept as they are.
    """
    distribution = getattr(result, "distribution", None)
    if not isinstance(distribution, tuple) or not distribution:
        raise AbstentionError(
            f"a policy reads a distribution over options; a {type(result).__name__} has none"
        )
    if not isinstance(policy, AbstentionPolicy):
        raise AbstentionError(f"policy must be an AbstentionPolicy, not {type(policy).__name__}")
    labels = [option for option, _ in distribution]
    table = np.array([[probability for _, probability in distribution]], dtype=np.float64)
    applied = policy.apply(table, labels=labels, model_id=model_id)
    (outcome,) = applied.outcomes()
    outcome = Outcome(
        sample_id=None, status=outcome.status, prediction=outcome.prediction,
        prediction_index=outcome.prediction_index, distribution=distribution,
        score=outcome.score, reason=outcome.reason,
    )  # fmt: skip
    return SelectiveDecision(
        result=result, outcome=outcome, policy_id=applied.policy_id,
        input_field=policy.input_field, calibrator_id=policy.calibrator_id,
    )  # fmt: skip
