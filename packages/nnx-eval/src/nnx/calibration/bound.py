"""What every calibrator of categorical logits shares: its binding, transform and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.jsonlike import freeze_mapping, thaw

from .arrays import (
    identity,
    is_prediction,
    prediction_logits,
    real_matrix,
    row_ids,
    softmax,
    text_labels,
)
from .binding import DISJOINTNESS, check_bound, check_splits
from .errors import CalibrationError
from .metrics import DEFAULT_EPSILON, CalibrationMetrics
from .prediction import CalibratedPrediction
from .report import CalibrationReport, outcome_of

FORMAT = "nnx.calibration/1"


class BoundCalibrator(JsonArtifact):
    """Base of the calibrators that turn (N, C) logits into probabilities of their labels."""

    __slots__ = ()
    FORMAT: ClassVar[str] = FORMAT
    _error: ClassVar[type[ValueError]] = CalibrationError
    labels: tuple[str, ...]
    model_id: str
    split_id: str
    train_split_id: str | None
    test_split_id: str | None
    fit_config: Mapping[str, Any]
    fit_result: Mapping[str, Any]

    def _settle(self, *mappings: str) -> None:
        """Check what binds the calibrator, and freeze its ``mappings`` and those of its fit."""
        object.__setattr__(self, "labels", text_labels(self.labels, CalibrationError))
        identity("model_id", self.model_id, CalibrationError)
        check_splits(self.split_id, self.train_split_id, self.test_split_id, CalibrationError)
        for name in (*mappings, "fit_config", "fit_result"):
            try:
                object.__setattr__(self, name, freeze_mapping(getattr(self, name), name))
            except ValueError as error:
                raise CalibrationError(str(error)) from None

    def _stored(self, kind: str, **own: Any) -> dict[str, Any]:
        """The stored form: what is the calibrator's own, and what binds it."""
        return {
            "format": FORMAT,
            "kind": kind,
            **own,
            "labels": list(self.labels),
            "model_id": self.model_id,
            "split": self.split,
            "fit": {"config": thaw(self.fit_config), "result": thaw(self.fit_result)},
        }

    @classmethod
    def _read(cls, state: Mapping[str, Any], kind: str, own: str) -> dict[str, Any]:
        """The fields in a stored form whose own entry is ``own``."""
        keys = dict.fromkeys((own, "labels", "model_id", "split", "fit"), True)
        fields = cls._open(state, keys, kind=kind)
        return {
            own: fields[own],
            "labels": fields["labels"],
            "model_id": fields["model_id"],
            **stored_split(fields["split"]),
            **stored_fit(fields["fit"]),
        }

    def calibrate(self, values: np.ndarray) -> np.ndarray:
        """(N, C) probabilities, float64, of checked (N, C) logits."""
        raise NotImplementedError

    @property
    def id(self) -> str:
        """The digest: what predictions and policies call this calibrator."""
        return self.digest()

    @property
    def split(self) -> dict[str, Any]:
        """The declared splits; that their rows are disjoint is not verified."""
        return {
            "calibration": self.split_id,
            "train": self.train_split_id,
            "test": self.test_split_id,
            "disjointness": DISJOINTNESS,
        }

    def transform(
        self,
        logits: Any,
        *,
        model_id: str,
        labels: Sequence[str] | None = None,
        override: str | None = None,
        sample_ids: Any = None,
    ) -> CalibratedPrediction:
        """Calibrate (N, C) logits: an array, a tensor or a categorical ``PredictionResult``.

        A prediction brings its labels and sample ids. Raises
        ``CalibrationMismatchError`` for other labels or another model, unless
        ``override`` says in words why that is meant; another number of classes is
        never accepted.
        """
        labels, model_id, accepted = check_bound(
            logits, fitted_labels=self.labels, fitted_model=self.model_id, labels=labels,
            model_id=model_id, override=override,
        )  # fmt: skip
        values, ids = rows_of(logits, sample_ids)
        if values.shape[1] != len(labels):
            raise CalibrationError(
                f"logits have {values.shape[1]} columns for the {len(labels)} labels"
            )
        return CalibratedPrediction(
            logits=values,
            probabilities=softmax(values),
            calibrated_probabilities=self.calibrate(values),
            decoded=values.argmax(1),
            labels=labels,
            sample_ids=ids,
            calibrator_id=self.id,
            model_id=model_id,
            temperature=getattr(self, "temperature", None),
            override=accepted,
        )

    def report(
        self,
        logits: Any,
        targets: Any,
        *,
        model_id: str,
        split_id: str,
        labels: Sequence[str] | None = None,
        override: str | None = None,
        n_bins: int = 10,
        epsilon: float | None = DEFAULT_EPSILON,
    ) -> CalibrationReport:
        """NLL, Brier score, ECE and bins before and after, on rows held out from the fit."""
        held_out(split_id, self.split_id, self.train_split_id)
        found = self.transform(logits, model_id=model_id, labels=labels, override=override)

        def metrics(probabilities: np.ndarray) -> CalibrationMetrics:
            return CalibrationMetrics.of(probabilities, targets, n_bins=n_bins, epsilon=epsilon)

        before, after = metrics(found.probabilities), metrics(found.calibrated_probabilities)
        return CalibrationReport(
            calibrator_id=found.calibrator_id,
            model_id=found.model_id,
            labels=found.labels,
            temperature=getattr(self, "temperature", None),
            split_id=split_id,
            calibration_split_id=self.split_id,
            n_samples=len(found),
            n_bins=n_bins,
            epsilon=epsilon,
            before=before,
            after=after,
            outcome=outcome_of(before, after),
            override=found.override,
            train_split_id=self.train_split_id,
            test_split_id=self.test_split_id,
        )


def stored_split(split: Any) -> dict[str, Any]:
    """The split ids of a stored document, as constructor arguments."""
    known = {"calibration", "train", "test", "disjointness"}
    if not isinstance(split, Mapping) or set(split) - known or "calibration" not in split:
        raise CalibrationError(f"split has the keys {', '.join(sorted(known))}")
    return {
        "split_id": split["calibration"],
        "train_split_id": split.get("train"),
        "test_split_id": split.get("test"),
    }


def stored_fit(fit: Any) -> dict[str, Any]:
    """How a stored document says that it was fitted, as constructor arguments."""
    if not isinstance(fit, Mapping) or set(fit) != {"config", "result"}:
        raise CalibrationError("fit has the keys config and result")
    return {"fit_config": fit["config"], "fit_result": fit["result"]}


def held_out(split_id: Any, calibration: str, train: str | None) -> None:
    """Refuse to report on rows that the calibrator or the model was fitted on."""
    name = identity("split_id", split_id, CalibrationError)
    for what, other in (("calibration", calibration), ("training", train)):
        if name == other:
            raise CalibrationError(
                f"split {name!r} is the {what} split, so it is not held out; report on another"
            )


def rows_of(logits: Any, sample_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checked (N, C) logits, and the ids of their rows."""
    if not is_prediction(logits):
        values = real_matrix(logits, "logits", CalibrationError)
        return values, row_ids(sample_ids, len(values), CalibrationError)
    values = real_matrix(prediction_logits(logits, CalibrationError), "logits", CalibrationError)
    own = np.asarray(logits.sample_ids)
    if sample_ids is not None and not np.array_equal(
        row_ids(sample_ids, len(values), CalibrationError), own
    ):
        raise CalibrationError("sample_ids are not those of the prediction; leave them out")
    return values, own
