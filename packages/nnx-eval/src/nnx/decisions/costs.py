"""Decisions from what mistakes cost, and thresholds under a constraint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.calibration.arrays import as_numpy, identity, probability_matrix, text_labels
from nnx.utils import validation as check
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.validation import show

from .errors import InvalidDecisionRequest

_COSTS = ("actions", "labels", "costs", "model_id", "calibrator_id")


@dataclass(frozen=True, slots=True)
class CostPolicy(JsonArtifact):
    """The Bayes decision: of each row the action of least expected cost.

    ``costs[a][c]`` is the cost of action ``a`` when the class is ``c``. Actions
    may be the labels themselves, or others ("ask a person"). The probabilities
    must be calibrated for the expectation to mean something, so the policy names
    their model and calibrator.
    """

    actions: tuple[str, ...]
    labels: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]
    model_id: str
    calibrator_id: str | None = None

    FORMAT: ClassVar[str] = "nnx.cost-policy/1"
    _error: ClassVar[type[ValueError]] = InvalidDecisionRequest

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", text_labels(self.actions, InvalidDecisionRequest))
        object.__setattr__(self, "labels", text_labels(self.labels, InvalidDecisionRequest))
        identity("model_id", self.model_id, InvalidDecisionRequest)
        try:
            table = np.asarray(self.costs, dtype=np.float64)
        except (ValueError, TypeError):
            table = np.zeros(0)
        if table.shape != (len(self.actions), len(self.labels)) or not np.isfinite(table).all():
            raise InvalidDecisionRequest(
                f"costs are finite numbers, a row for each of {len(self.actions)} actions and a "
                f"column for each of {len(self.labels)} labels"
            )
        object.__setattr__(self, "costs", tuple(map(tuple, table.tolist())))

    @property
    def id(self) -> str:
        """The digest."""
        return self.digest()

    def expected(self, probabilities: Any) -> np.ndarray:
        """(N, A) expected costs of each action, of (N, C) probabilities in the labels' order."""
        table = probability_matrix(probabilities, InvalidDecisionRequest, empty=True)
        if table.shape[1] != len(self.labels):
            raise InvalidDecisionRequest(
                f"{table.shape[1]} columns for the {len(self.labels)} labels"
            )
        return table @ np.asarray(self.costs).T

    def decide(self, probabilities: Any) -> np.ndarray:
        """(N,) indices of the cheapest actions, the first of equals."""
        return self.expected(probabilities).argmin(1)

    def state(self) -> dict[str, Any]:
        return {
            "format": self.FORMAT, "actions": list(self.actions), "labels": list(self.labels),
            "costs": [list(row) for row in self.costs], "model_id": self.model_id,
            "calibrator_id": self.calibrator_id,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostPolicy:
        return cls(**cls._open(state, dict.fromkeys(_COSTS, True)))


@dataclass(frozen=True, slots=True)
class ConstrainedThreshold:
    """A threshold on the probability of yes, and what held on the split it was chosen on.

    ``value`` is the constrained quantity there, with its exact interval
    (Clopper & Pearson, 1934) of ``level`` from ``lower`` to ``upper``: the choice
    was made on the same rows, so the interval is optimistic; test it on others.
    ``threshold`` is ``None`` where no threshold meets the constraint.
    """

    constraint: str
    bound: float
    threshold: float | None
    recall: float | None
    value: float | None
    lower: float | None
    upper: float | None
    level: float
    split_id: str
    n: int

    def require(self) -> float:
        """The threshold, or ``InvalidDecisionRequest`` when there is none."""
        if self.threshold is None:
            raise InvalidDecisionRequest(
                f"no threshold meets {self.constraint} {self.bound:g} on split {self.split_id!r}"
            )
        return self.threshold


CONSTRAINTS = ("precision_at_least", "false_positive_rate_at_most", "positives_at_most")


def choose_threshold(
    probabilities: Any,
    targets: Any,
    *,
    split_id: str,
    precision_at_least: float | None = None,
    false_positive_rate_at_most: float | None = None,
    positives_at_most: float | None = None,
    level: float = 0.95,
    test_split_id: str | None = None,
) -> ConstrainedThreshold:
    """The threshold of highest recall under one constraint, from (N,) probabilities of yes.

    ``targets`` are (N,) 0/1. ``positives_at_most`` is a share of the rows that
    may be decided yes. Rows at or above the threshold are yes; candidates are
    the scores that occur. A test split is never chosen on.
    """
    split = identity("split_id", split_id, InvalidDecisionRequest)
    if split == test_split_id:
        raise InvalidDecisionRequest(f"split_id {split!r} is also test_split_id; tune on another")
    given = {
        "precision_at_least": precision_at_least,
        "false_positive_rate_at_most": false_positive_rate_at_most,
        "positives_at_most": positives_at_most,
    }
    asked = [(name, value) for name, value in given.items() if value is not None]
    if len(asked) != 1:
        raise InvalidDecisionRequest(f"give one of {', '.join(CONSTRAINTS)}")
    name, value = asked[0]
    try:
        bound = float(check.real("choose_threshold", name, value, at_least=0, at_most=1))
        level = float(check.real("choose_threshold", "level", level, above=0, below=1))
    except ValueError as error:
        raise InvalidDecisionRequest(str(error)) from None
    scores, on = _yes_no(probabilities, targets)
    candidates = np.unique(scores)[::-1]
    order = np.argsort(-scores, kind="stable")
    ends = np.searchsorted(-scores[order], -candidates, side="right")
    hits = np.concatenate([[0], on[order].cumsum()])[ends]
    counts = {  # the constrained quantity as successes of trials, by candidate
        "precision_at_least": (hits, ends),
        "false_positive_rate_at_most": (ends - hits, np.full_like(ends, (~on).sum())),
        "positives_at_most": (ends, np.full_like(ends, len(scores))),
    }[name]
    share = counts[0] / np.maximum(1, counts[1])
    good = share >= bound if name == "precision_at_least" else share <= bound
    if not good.any():
        return ConstrainedThreshold(
            name, bound, None, None, None, None, None, level, split, len(scores)
        )
    best = max(np.flatnonzero(good).tolist(), key=lambda i: (hits[i], -i))
    lower, upper = binomial_interval(int(counts[0][best]), int(counts[1][best]), level)
    return ConstrainedThreshold(
        constraint=name, bound=bound, threshold=float(candidates[best]),
        recall=float(hits[best] / on.sum()) if on.any() else None, value=float(share[best]),
        lower=lower, upper=upper, level=level, split_id=split, n=len(scores),
    )  # fmt: skip


def _yes_no(probabilities: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
    scores = as_numpy(probabilities, "probabilities", InvalidDecisionRequest)
    truth = as_numpy(targets, "targets", InvalidDecisionRequest)
    if scores.ndim != 1 or not len(scores) or scores.dtype.kind not in "fiu":
        raise InvalidDecisionRequest(f"probabilities must be (N,) numbers, not {scores.shape}")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise InvalidDecisionRequest("probabilities must be in [0, 1]")
    if truth.shape != scores.shape or not np.isin(truth, (0, 1)).all():
        raise InvalidDecisionRequest(f"targets must be ({len(scores)},) of 0 and 1")
    return scores.astype(np.float64), truth != 0


def binomial_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share (Clopper & Pearson, 1934); [0, 1] of no trials."""
    if not 0 <= successes <= trials:
        raise InvalidDecisionRequest(f"{show(successes)} successes of {show(trials)} trials")
    tail = (1 - level) / 2
    lower = 0.0 if successes == 0 else _crossing(successes, trials, tail)
    upper = 1.0 if successes == trials else 1 - _crossing(trials - successes, trials, tail)
    return lower, upper


def _crossing(successes: int, trials: int, tail: float) -> float:
    """The p at which at least ``successes`` of ``trials`` have probability ``tail``."""
    k = np.arange(successes, trials + 1)
    whole = math.lgamma(trials + 1)
    choose = np.array(
        [whole - math.lgamma(i + 1) - math.lgamma(trials - i + 1) for i in k.tolist()]
    )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logs = choose + k * math.log(middle) + (trials - k) * math.log1p(-middle)
        if float(np.exp(logs).sum()) < tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2
