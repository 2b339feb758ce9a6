"""When a row is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nnx.calibration.arrays import identity, text_labels
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.validation import show

from .coverage import FORMAT, open_typed
from .errors import AbstentionError, AbstentionSchemaError
from .scores import INPUT_FIELDS, POLICY_KINDS, REASONS, one_of, score, unit
from .views import Schema, check_calibrator, is_calibrated, read, schema_of

if TYPE_CHECKING:
    from .result import AbstentionResult

_REQUIRED = ("kind", "threshold", "labels", "model_id", "tuning_split_id")


@dataclass(frozen=True, slots=True)
class AbstentionPolicy(JsonArtifact):
    """Accept a row whose score is at or above ``threshold``.

    ``kind`` "max_probability" scores the top probability, "margin" the gap
    between the top two. The policy is bound to a model, an order of labels and
    the field that it was tuned on. Scores are float64, so a threshold typed by
    hand may miss a score that merely prints the same: a margin of 0.7 - 0.2 is
    below 0.5.
    """

    kind: str
    threshold: float
    labels: tuple[str, ...]
    model_id: str
    tuning_split_id: str
    input_field: str = "probabilities"
    calibrator_id: str | None = None

    FORMAT: ClassVar[str] = FORMAT
    _error: ClassVar[type[ValueError]] = AbstentionError

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("kind", one_of("kind", self.kind, POLICY_KINDS))
        put("threshold", unit("threshold", self.threshold))
        put("labels", text_labels(self.labels, AbstentionError))
        put("model_id", identity("model_id", self.model_id, AbstentionError))
        put("tuning_split_id", identity("tuning_split_id", self.tuning_split_id, AbstentionError))
        put("input_field", one_of("input_field", self.input_field, INPUT_FIELDS))
        put("calibrator_id", check_calibrator(self.input_field, self.calibrator_id))

    @property
    def id(self) -> str:
        """The digest: what results and reports call this policy."""
        return self.digest()

    @property
    def reason(self) -> str:
        """Why a row that is not accepted is not."""
        return REASONS[self.kind]

    def check_schema(self, schema: Schema) -> None:
        """Refuse probabilities that this policy was not made for."""
        wanted = Schema(self.labels, self.model_id, self.input_field, self.calibrator_id)
        for name in ("labels", "model_id", "input_field", "calibrator_id"):
            has, needs = getattr(schema, name), getattr(wanted, name)
            if has != needs:
                raise AbstentionSchemaError(
                    f"the policy reads {name} {show(needs)}, not {show(has)}; tune a policy on "
                    "these probabilities"
                )

    def apply(
        self,
        source: Any,
        *,
        labels: Sequence[str] | None = None,
        model_id: str | None = None,
        sample_ids: Any = None,
        input_field: str | None = None,
        calibrator_id: str | None = None,
    ) -> AbstentionResult:
        """Decide each row of a ``CalibratedPrediction``, a ``PredictionResult`` or an array.

        An array comes with ``labels`` and ``model_id``. Another order, model,
        field or calibrator raises ``AbstentionSchemaError`` before a probability
        is read.
        """
        from .result import AbstentionResult

        if is_calibrated(source) and input_field is None:
            input_field = self.input_field
        schema = schema_of(
            source, labels=labels, model_id=model_id, input_field=input_field,
            calibrator_id=calibrator_id,
        )  # fmt: skip
        self.check_schema(schema)
        view = read(source, schema, sample_ids)
        found = score(view.probabilities, self.kind)
        return AbstentionResult(
            policy_id=self.id,
            kind=self.kind,
            threshold=self.threshold,
            input_field=self.input_field,
            calibrator_id=self.calibrator_id,
            model_id=self.model_id,
            labels=self.labels,
            sample_ids=view.sample_ids,
            probabilities=view.probabilities,
            prediction=view.prediction,
            score=found,
            accepted=found >= self.threshold,
            calibration_override=view.calibration_override,
        )

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "format": FORMAT,
            "type": "policy",
            **{name: getattr(self, name) for name in _REQUIRED},
            "input_field": self.input_field,
            "calibrator_id": self.calibrator_id,
        }
        state["labels"] = list(self.labels)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AbstentionPolicy:
        keys = {**dict.fromkeys(_REQUIRED, True), "input_field": False, "calibrator_id": False}
        return cls(**open_typed(cls, state, keys, "policy"))
