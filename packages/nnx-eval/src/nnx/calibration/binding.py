"""What a fitted artifact is bound to: a model, an order of labels, and named splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.utils.validation import show

from .arrays import declared_labels, identity
from .errors import CalibrationError, CalibrationMismatchError

DISJOINTNESS = "unverified"


def check_splits(
    split_id: Any, train_split_id: Any, test_split_id: Any, error: type[ValueError]
) -> tuple[str, str | None, str | None]:
    """The three split ids; what is fitted sees neither the training nor the test split."""
    split = identity("split_id", split_id, error)
    named = {"train_split_id": train_split_id, "test_split_id": test_split_id}
    found = {k: None if v is None else identity(k, v, error) for k, v in named.items()}
    for name, value in found.items():
        if value == split:
            why = (
                "the model already fits those rows"
                if name == "train_split_id"
                else "the report needs rows that nothing was fitted on"
            )
            raise error(f"split_id {split!r} is also {name}: {why}; fit on a split of its own")
    return split, found["train_split_id"], found["test_split_id"]


def check_bound(
    source: Any,
    *,
    fitted_labels: tuple[str, ...],
    fitted_model: str,
    labels: Any,
    model_id: Any,
    override: Any,
) -> tuple[tuple[str, ...], str, dict[str, Any] | None]:
    """The declared labels and model, and what a named override accepted."""
    actual_model = identity("model_id", model_id, CalibrationError)
    actual = declared_labels(source, labels, CalibrationError)
    if override is not None and (not isinstance(override, str) or not override.strip()):
        raise CalibrationError(f"override must name why, in words, not {show(override)}")
    if len(actual) != len(fitted_labels):
        raise CalibrationMismatchError(
            f"the calibrator was fitted on {len(fitted_labels)} classes and these are "
            f"{len(actual)}; fit one for this model"
        )
    mismatches: dict[str, Any] = {}
    if actual != fitted_labels:
        mismatches["labels"] = {"expected": list(fitted_labels), "actual": list(actual)}
    if actual_model != fitted_model:
        mismatches["model_id"] = {"expected": fitted_model, "actual": actual_model}
    if not mismatches:
        return actual, actual_model, None
    if override is None:
        raise CalibrationMismatchError(_mismatch(mismatches))
    return actual, actual_model, {"reason": override, "mismatches": mismatches}


def _mismatch(mismatches: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {show(found['actual'])}, not {show(found['expected'])}"
        for name, found in mismatches.items()
    ]
    return (
        f"the calibrator was fitted on another {' and '.join(mismatches)}: {'; '.join(parts)}. "
        'Fit one for this model and order, or accept it by name with override="why"'
    )
