"""Choosing a threshold on a named validation split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.calibration.arrays import class_targets, identity, probability_matrix, text_labels
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.jsonlike import freeze_mapping, thaw

from .coverage import FORMAT, CurvePoint, open_typed
from .errors import AbstentionError
from .policy import AbstentionPolicy
from .scores import INPUT_FIELDS, POLICY_KINDS, one_of, score, unit
from .views import check_calibrator, is_calibrated, read, schema_of

MAX_DEFAULT_CANDIDATES = 1001
STATUSES = ("ok", "no_feasible_policy")
_NAMES = (
    "status", "kind", "risk_ceiling", "split_id", "labels", "model_id", "input_field",
    "calibrator_id", "test_split_id", "basis", "calibration_override",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThresholdSelection(JsonArtifact):
    """Every candidate with its counts, and the policy of the chosen one.

    The ceiling is empirical (``basis``): it held on the split named
    ``split_id``, and is no guarantee anywhere else.
    """

    status: str
    policy: AbstentionPolicy | None
    points: tuple[CurvePoint, ...]
    kind: str
    risk_ceiling: float
    split_id: str
    labels: tuple[str, ...]
    model_id: str
    input_field: str = "probabilities"
    calibrator_id: str | None = None
    test_split_id: str | None = None
    basis: str = "empirical"
    calibration_override: Mapping[str, Any] | None = None

    FORMAT: ClassVar[str] = FORMAT
    _error: ClassVar[type[ValueError]] = AbstentionError

    def __post_init__(self) -> None:
        one_of("status", self.status, STATUSES)
        if (self.policy is not None) != (self.status == "ok"):
            raise AbstentionError(f"a selection of status {self.status!r} has the wrong policy")
        one_of("kind", self.kind, POLICY_KINDS)
        one_of("basis", self.basis, ("empirical",))
        one_of("input_field", self.input_field, INPUT_FIELDS)
        object.__setattr__(self, "risk_ceiling", unit("risk_ceiling", self.risk_ceiling))
        object.__setattr__(self, "labels", text_labels(self.labels, AbstentionError))
        object.__setattr__(self, "points", tuple(self.points))
        identity("model_id", self.model_id, AbstentionError)
        check_calibrator(self.input_field, self.calibrator_id)
        check_tuning_split(self.split_id, self.test_split_id)
        if self.calibration_override is not None:
            frozen = freeze_mapping(self.calibration_override, "calibration_override")
            object.__setattr__(self, "calibration_override", frozen)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def require(self) -> AbstentionPolicy:
        """The policy; ``AbstentionError`` with the best that was possible when there is none."""
        if self.policy is None:
            risks = [p.risk for p in self.points if p.risk is not None]
            lowest = f"; the lowest risk of any candidate is {min(risks):.4g}" if risks else ""
            raise AbstentionError(
                f"no threshold keeps the risk at or below {self.risk_ceiling:g} on split "
                f"{self.split_id!r}{lowest}"
            )
        return self.policy

    def state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "type": "selection",
            **{name: thaw(getattr(self, name)) for name in _NAMES},
            "policy": None if self.policy is None else self.policy.state(),
            "points": [point.state() for point in self.points],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ThresholdSelection:
        keys = dict.fromkeys((*_NAMES, "policy", "points"), True)
        fields = open_typed(cls, state, keys, "selection")
        if fields["policy"] is not None:
            fields["policy"] = AbstentionPolicy.from_state(fields["policy"])
        try:
            fields["points"] = tuple(CurvePoint(**point) for point in fields["points"])
        except TypeError as error:
            raise AbstentionError(f"the points of a selection are unreadable: {error}") from None
        return cls(**fields)


def check_tuning_split(split_id: Any, test_split_id: Any) -> None:
    """A threshold is never tuned on the test split."""
    split = identity("split_id", split_id, AbstentionError)
    if test_split_id is not None and split == identity(
        "test_split_id", test_split_id, AbstentionError
    ):
        raise AbstentionError(
            f"split_id {split!r} is also test_split_id: a threshold that was tuned on the test "
            "split leaves nothing to test it on; tune on a validation split"
        )


def select_threshold(
    source: Any,
    targets: Any,
    *,
    kind: str,
    risk_ceiling: float,
    split_id: str,
    test_split_id: str | None = None,
    labels: Sequence[str] | None = None,
    model_id: str | None = None,
    input_field: str | None = None,
    calibrator_id: str | None = None,
    sample_ids: Any = None,
    candidates: Iterable[float] | None = None,
) -> ThresholdSelection:
    """The threshold of highest coverage whose risk is at or below ``risk_ceiling``.

    ``source`` is what :meth:`AbstentionPolicy.apply` takes; a calibrated
    prediction needs ``input_field``. Candidates are all distinct scores, or
    1001 evenly spaced order statistics when there are more. Tune on rows used
    neither for training nor for the calibrator, or the risk is optimistic.
    """
    kind = one_of("kind", kind, POLICY_KINDS)
    ceiling = unit("risk_ceiling", risk_ceiling)
    check_tuning_split(split_id, test_split_id)
    if is_calibrated(source) and input_field is None:
        raise AbstentionError(
            "a calibrated prediction has two views; say which to tune on with input_field="
            f"{INPUT_FIELDS[1]!r} or {INPUT_FIELDS[0]!r}"
        )
    schema = schema_of(
        source, labels=labels, model_id=model_id, input_field=input_field,
        calibrator_id=calibrator_id,
    )  # fmt: skip
    view = read(source, schema, sample_ids)
    classes = class_targets(
        targets, len(view.probabilities), view.probabilities.shape[1], AbstentionError
    )
    points = _points(
        score(view.probabilities, kind), view.prediction != classes, _checked(candidates)
    )
    feasible = [p for p in points if p.risk is not None and p.risk <= ceiling]
    best = max(feasible, key=lambda p: (p.accepted, p.threshold), default=None)
    policy = None
    if best is not None and best.threshold is not None:
        policy = AbstentionPolicy(
            kind=kind, threshold=best.threshold, labels=schema.labels, model_id=schema.model_id,
            tuning_split_id=split_id, input_field=schema.input_field,
            calibrator_id=schema.calibrator_id,
        )  # fmt: skip
    return ThresholdSelection(
        status=STATUSES[policy is None], policy=policy, points=points, kind=kind,
        risk_ceiling=ceiling, split_id=split_id, labels=schema.labels, model_id=schema.model_id,
        input_field=schema.input_field, calibrator_id=schema.calibrator_id,
        test_split_id=test_split_id, calibration_override=view.calibration_override,
    )  # fmt: skip


def risk_coverage_curve(
    source: Any,
    targets: Any,
    *,
    kind: str,
    candidates: Iterable[float] | None = None,
    input_field: str | None = None,
) -> tuple[CurvePoint, ...]:
    """What each threshold accepts and gets wrong, from accepting nothing to accepting most.

    The first point has no threshold: nothing is accepted, and there is no risk.
    ``source`` needs neither labels nor a model here.
    """
    kind = one_of("kind", kind, POLICY_KINDS)
    if is_calibrated(source) and input_field is None:
        raise AbstentionError("a calibrated prediction has two views; say which with input_field=")
    if hasattr(source, "decoded"):
        names = getattr(source, "labels", None) or [
            str(i) for i in range(np.shape(source.logits)[-1])
        ]
        model = getattr(source, "model_id", None) or "unnamed"
        schema = schema_of(
            source, labels=names, model_id=model, input_field=input_field, calibrator_id=None
        )
        view = read(source, schema, None)
        table, prediction = view.probabilities, view.prediction
    else:
        if input_field is not None:
            one_of("input_field", input_field, INPUT_FIELDS)
        table = probability_matrix(source, AbstentionError, empty=True)
        prediction = table.argmax(1)
    classes = class_targets(targets, len(table), table.shape[1], AbstentionError)
    points = _points(score(table, kind), prediction != classes, _checked(candidates))
    return (CurvePoint(threshold=None, accepted=0, incorrect=0, total=len(table)), *points)


def _checked(candidates: Iterable[float] | None) -> np.ndarray | None:
    if candidates is None:
        return None
    values = [unit("candidates", value) for value in candidates]
    if not values:
        raise AbstentionError("candidates are at least one threshold in [0, 1]")
    return np.unique(values)


def _points(
    found: np.ndarray, wrong: np.ndarray, candidates: np.ndarray | None
) -> tuple[CurvePoint, ...]:
    """A point for each candidate, from the highest to the lowest threshold."""
    order = np.argsort(found, kind="stable")
    ascending = np.minimum(found[order], 1.0)
    if candidates is None:
        candidates = np.unique(ascending)
        if len(candidates) > MAX_DEFAULT_CANDIDATES:
            places = np.linspace(0, len(ascending) - 1, MAX_DEFAULT_CANDIDATES).round().astype(int)
            candidates = np.unique(ascending[places])
    # Errors among the rows from a place on, the last place being behind all of them.
    errors = np.concatenate([wrong[order][::-1].cumsum()[::-1], [0]])
    first = np.searchsorted(ascending, candidates, side="left")
    return tuple(
        CurvePoint(
            threshold=float(candidate), accepted=len(found) - int(place),
            incorrect=int(errors[place]), total=len(found),
        )
        for candidate, place in zip(candidates[::-1], first[::-1])
    )  # fmt: skip
