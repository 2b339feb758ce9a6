"""Answers, and the one validator that every provider's answer passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.utils.validation import is_number, show

from .errors import InvalidDecisionResponse
from .questions import Boolean, Choice, Score

PROBABILITY_TOLERANCE = 1e-06


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A probability for each option, in the question's order."""

    question_digest: str
    distribution: tuple[tuple[str, float], ...]
    provider: str | None = None
    raw: Any = None

    def probabilities(self) -> dict[str, float]:
        return dict(self.distribution)

    @property
    def top(self) -> str:
        """The id of the likeliest option, the first of equals."""
        return max(self.distribution, key=lambda pair: pair[1])[0]


@dataclass(frozen=True, slots=True)
class BooleanResult:
    """The probability of yes."""

    question_digest: str
    p_true: float
    provider: str | None = None
    raw: Any = None

    @property
    def p_false(self) -> float:
        return 1.0 - self.p_true


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A probability for each level, from the lowest; ``vendor_score`` is the provider's own."""

    question_digest: str
    distribution: tuple[tuple[str, float], ...]
    provider: str | None = None
    vendor_score: float | None = None
    raw: Any = None

    def probabilities(self) -> dict[str, float]:
        return dict(self.distribution)

    @property
    def expected_index(self) -> float:
        """``sum(i * p_i)`` over the levels, 0 to L-1: a place on the scale, not its unit."""
        return math.fsum(i * p for i, (_, p) in enumerate(self.distribution))


DecisionResult = ChoiceResult | BooleanResult | ScoreResult


def validate_response(
    question: Choice | Boolean | Score,
    response: Any,
    *,
    provider: str | None = None,
    raw: Any = None,
    vendor_score: float | None = None,
) -> DecisionResult:
    """The typed result of a provider's ``response``, or ``InvalidDecisionResponse``.

    ``response`` maps option ids to probabilities, or lists such pairs, in any
    order; of a :class:`Boolean` it may be the probability of yes. Missing,
    repeated, unknown or absent ids and numbers that are no distribution (to
    within 1e-6) are refused; nothing is renormalized.
    """
    if not isinstance(question, (Choice, Boolean, Score)):
        raise InvalidDecisionResponse(f"{show(question)} is no question to validate against")
    if vendor_score is not None and not isinstance(question, Score):
        raise InvalidDecisionResponse(f"a {question.kind} answer has no vendor_score")
    digest = question.digest()
    if isinstance(question, Boolean):
        return BooleanResult(digest, _p_true(question, response), provider, raw)
    distribution = _distribution(question, response)
    if isinstance(question, Choice):
        return ChoiceResult(digest, distribution, provider, raw)
    vendor = None if vendor_score is None else _number("vendor_score", vendor_score)
    return ScoreResult(digest, distribution, provider, vendor, raw)


def _p_true(question: Boolean, response: Any) -> float:
    if is_number(response) and not isinstance(response, bool):
        return _probability("p_true", response)
    if isinstance(response, Mapping) and set(response) == {"p_true"}:
        return _probability("p_true", response["p_true"])
    return dict(_distribution(question, response))["true"]


def _distribution(
    question: Choice | Boolean | Score, response: Any
) -> tuple[tuple[str, float], ...]:
    pairs = list(response.items()) if isinstance(response, Mapping) else response
    if not isinstance(pairs, (list, tuple)):
        raise InvalidDecisionResponse(
            f"a response maps option ids to probabilities; this is {show(response)}"
        )
    found: dict[str, float] = {}
    known = set(question.option_ids)
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise InvalidDecisionResponse(
                f"{show(pair)} has no option id; unlabelled probabilities are not accepted"
            )
        option, probability = pair
        if not isinstance(option, str) or option not in known:
            raise InvalidDecisionResponse(
                f"{show(option)} is no option of this question ({', '.join(question.option_ids)})"
            )
        if option in found:
            raise InvalidDecisionResponse(f"option {option!r} is answered twice")
        found[option] = _probability(f"the probability of {option!r}", probability)
    missing = [option for option in question.option_ids if option not in found]
    if missing:
        raise InvalidDecisionResponse(f"the response lacks {', '.join(map(repr, missing))}")
    total = math.fsum(found.values())
    if abs(total - 1) > PROBABILITY_TOLERANCE:
        raise InvalidDecisionResponse(
            f"the probabilities sum to {total:.9g}, not 1; they are not renormalized"
        )
    return tuple((option, found[option]) for option in question.option_ids)


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not is_number(value) or not math.isfinite(value):
        raise InvalidDecisionResponse(f"{where} must be a finite number, not {show(value)}")
    return float(value)


def _probability(where: str, value: Any) -> float:
    number = _number(where, value)
    if not 0 <= number <= 1:
        raise InvalidDecisionResponse(f"{where} is {number:g}, outside of [0, 1]")
    return number
