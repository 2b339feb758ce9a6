"""The probabilities that a policy reads, whatever they arrive in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nnx.calibration.arrays import (
    identity,
    is_prediction,
    prediction_logits,
    probability_matrix,
    row_ids,
    text_labels,
)
from nnx.utils.validation import show

from .errors import AbstentionError, AbstentionSchemaError
from .scores import INPUT_FIELDS, one_of


@dataclass(frozen=True, slots=True)
class Schema:
    """What probabilities say of themselves, known before any of them is read."""

    labels: tuple[str, ...]
    model_id: str
    input_field: str
    calibrator_id: str | None


@dataclass(frozen=True, slots=True)
class View:
    """Checked probabilities with their decisions and the ids of their rows."""

    schema: Schema
    probabilities: np.ndarray
    prediction: np.ndarray
    sample_ids: np.ndarray
    calibration_override: Mapping[str, Any] | None = None


def is_calibrated(source: Any) -> bool:
    return hasattr(source, "calibrated_probabilities") and hasattr(source, "calibrator_id")


def schema_of(
    source: Any,
    *,
    labels: Sequence[str] | None,
    model_id: str | None,
    input_field: str | None,
    calibrator_id: str | None,
) -> Schema:
    """What ``source`` declares, together with what was passed beside it."""
    if input_field is not None:
        one_of("input_field", input_field, INPUT_FIELDS)
    given = None if labels is None else text_labels(labels, AbstentionError)
    if is_calibrated(source):
        own = {
            "labels": (given, tuple(source.labels)),
            "model_id": (model_id, source.model_id),
            "calibrator_id": (calibrator_id, source.calibrator_id),
        }
        for name, (passed, found) in own.items():
            if passed is not None and passed != found:
                raise AbstentionSchemaError(
                    f"{name}={show(passed)} is not that of the calibrated prediction, {show(found)}"
                )
        field = input_field or INPUT_FIELDS[0]
        calibrator = source.calibrator_id if field == INPUT_FIELDS[1] else None
        return Schema(tuple(source.labels), source.model_id, field, calibrator)
    model = identity("model_id", model_id, AbstentionError)
    if is_prediction(source):
        prediction_logits(source, AbstentionError)
        declared = source.spec.labels
        if declared is not None and given is not None and tuple(declared) != given:
            raise AbstentionSchemaError(
                f"labels={show(given)} are not those of the prediction, {show(tuple(declared))}"
            )
        if input_field == INPUT_FIELDS[1]:
            raise AbstentionSchemaError(
                "a PredictionResult has no calibrated probabilities; calibrate it with "
                "calibrator.transform first"
            )
        given = given or declared
    if given is None:
        raise AbstentionError("say which classes the columns are with labels=[...]")
    field = input_field or INPUT_FIELDS[0]
    return Schema(tuple(given), model, field, check_calibrator(field, calibrator_id))


def check_calibrator(field: str, calibrator_id: Any) -> str | None:
    """Calibrated probabilities name their calibrator, raw ones have none."""
    if field == INPUT_FIELDS[1]:
        if calibrator_id is None:
            raise AbstentionError("calibrated probabilities need calibrator_id=, whose they are")
        return identity("calibrator_id", calibrator_id, AbstentionError)
    if calibrator_id is not None:
        raise AbstentionError(
            f"calibrator_id={show(calibrator_id)} belongs to calibrated probabilities; pass "
            'input_field="calibrated_probabilities" with it'
        )
    return None


def read(source: Any, schema: Schema, sample_ids: Any) -> View:
    """The checked probabilities of ``source`` that ``schema`` names."""
    override = None
    if is_calibrated(source) or is_prediction(source):
        table = probability_matrix(getattr(source, schema.input_field), AbstentionError, empty=True)
        own = np.asarray(source.sample_ids)
        if sample_ids is not None and not np.array_equal(
            row_ids(sample_ids, len(table), AbstentionError), own
        ):
            raise AbstentionError("sample_ids are not those of the prediction; leave them out")
        ids, decided = own, np.asarray(source.decoded)
        _check_decided(table, decided)
        if schema.input_field == INPUT_FIELDS[1]:
            override = getattr(source, "override", None)
    else:
        table = probability_matrix(source, AbstentionError, empty=True)
        ids, decided = row_ids(sample_ids, len(table), AbstentionError), table.argmax(1)
    if table.shape[1] != len(schema.labels):
        raise AbstentionSchemaError(
            f"the probabilities have {table.shape[1]} columns for the {len(schema.labels)} labels"
        )
    return View(schema, table, decided, ids, override)


def _check_decided(table: np.ndarray, decided: np.ndarray) -> None:
    if decided.shape != table.shape[:1] or decided.dtype.kind not in "iu":
        raise AbstentionError("the prediction's decoded classes do not fit its probabilities")
    if len(decided) and (decided.min() < 0 or decided.max() >= table.shape[1]):
        raise AbstentionError("the prediction decides on a class that it has no probability for")
    lower = table[np.arange(len(table)), decided] < table.max(1)
    if lower.any():
        row = int(np.argmax(lower))
        raise AbstentionError(
            f"row {row} decides on class {int(decided[row])}, which is not of maximal probability"
        )
