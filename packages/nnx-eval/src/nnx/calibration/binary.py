"""Calibrators of yes/no outputs, one by one: Platt, beta and isotonic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.jsonlike import freeze_mapping, thaw
from nnx.utils.validation import show

from .arrays import as_numpy, identity
from .binding import DISJOINTNESS, check_splits
from .bound import stored_split
from .curves import isotonic_curve, read_curve
from .errors import CalibrationError, CalibrationFitError, CalibrationMismatchError

FORMAT = "nnx.binary-calibration/1"
METHODS = ("platt", "beta", "isotonic")
_KEYS = ("parameters", "labels", "model_id", "split")


@dataclass(frozen=True, slots=True)
class BinaryCalibrator(JsonArtifact):
    """A curve for each of L independent outputs, bound to a model and their names.

    "platt": ``sigmoid(a * logit + b)`` (Platt, 1999); "beta": ``sigmoid(a * log p -
    b * log(1 - p) + c)`` with a, b >= 0 (Kull, Silva Filho & Flach, 2017);
    "isotonic": knots x and y. ``parameters`` maps each label to its numbers.
    """

    kind: str
    parameters: Mapping[str, Any]
    labels: tuple[str, ...]
    model_id: str
    split_id: str
    train_split_id: str | None = None
    test_split_id: str | None = None

    FORMAT: ClassVar[str] = FORMAT
    _error: ClassVar[type[ValueError]] = CalibrationError

    def __post_init__(self) -> None:
        if self.kind not in METHODS:
            raise CalibrationError(f"kind must be one of {', '.join(METHODS)}, not {self.kind!r}")
        object.__setattr__(self, "labels", _names(self.labels))
        identity("model_id", self.model_id, CalibrationError)
        check_splits(self.split_id, self.train_split_id, self.test_split_id, CalibrationError)
        try:
            object.__setattr__(self, "parameters", freeze_mapping(self.parameters, "parameters"))
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        if set(self.parameters) != set(self.labels):
            raise CalibrationError("parameters are given for each label, and only for those")
        for label in self.labels:
            self._read(label, np.zeros(1))

    @property
    def id(self) -> str:
        """The digest."""
        return self.digest()

    def transform(
        self, logits: Any, *, model_id: str, labels: Sequence[str] | None = None
    ) -> np.ndarray:
        """(N, L) probabilities, float64, of (N, L) logits (or (N,) of one output)."""
        names = _names(self.labels if labels is None and len(self.labels) == 1 else labels)
        if (names, model_id) != (self.labels, self.model_id):
            raise CalibrationMismatchError(
                f"the calibrator was fitted on {show(self.labels)} of {self.model_id!r}, not on "
                f"{show(names)} of {show(model_id)}"
            )
        values = _logits(logits, len(self.labels))
        return np.stack([self._read(name, values[:, i]) for i, name in enumerate(names)], axis=1)

    def _read(self, label: str, logits: np.ndarray) -> np.ndarray:
        numbers = self.parameters[label]
        try:
            if self.kind == "isotonic":
                return read_curve(numbers["x"], numbers["y"], sigmoid(logits))
            wanted = {"platt": ("a", "b"), "beta": ("a", "b", "c")}[self.kind]
            a, b, *rest = (float(numbers[name]) for name in wanted)
        except (KeyError, TypeError, ValueError):
            raise CalibrationError(f"{label!r} has no {self.kind} parameters") from None
        if self.kind == "platt":
            return sigmoid(a * logits + b)
        if a < 0 or b < 0:
            raise CalibrationError(f"a and b of a beta calibrator are not negative ({label!r})")
        return sigmoid(a * _log_sigmoid(logits) - b * _log_sigmoid(-logits) + rest[0])

    def state(self) -> dict[str, Any]:
        split = {
            "calibration": self.split_id, "train": self.train_split_id,
            "test": self.test_split_id, "disjointness": DISJOINTNESS,
        }  # fmt: skip
        return {
            "format": FORMAT, "kind": self.kind, "parameters": thaw(self.parameters),
            "labels": list(self.labels), "model_id": self.model_id, "split": split,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> BinaryCalibrator:
        kind = state.get("kind") if isinstance(state, Mapping) else None
        fields = cls._open(state, dict.fromkeys(_KEYS, True), kind=kind or "platt")
        return cls(
            kind=str(kind), **{k: fields[k] for k in _KEYS[:3]}, **stored_split(fields["split"])
        )


def fit_binary(
    logits: Any,
    targets: Any,
    *,
    labels: Sequence[str],
    model_id: str,
    split_id: str,
    method: str = "platt",
    train_split_id: str | None = None,
    test_split_id: str | None = None,
) -> BinaryCalibrator:
    """Fit a curve for each output of (N, L) ``logits`` on (N, L) 0/1 ``targets``.

    Platt's targets are smoothed as in his paper, so that separable rows have an
    optimum. Raises ``CalibrationFitError`` for an output without both answers.
    """
    check_splits(split_id, train_split_id, test_split_id, CalibrationError)
    if method not in METHODS:
        raise CalibrationError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    names = _names(labels)
    values = _logits(logits, len(names))
    truth = as_numpy(targets, "targets", CalibrationError).reshape(len(values), -1)
    if truth.shape != values.shape or not np.isin(truth, (0, 1)).all():
        raise CalibrationError(f"targets must be 0 or 1 of shape {values.shape}")
    parameters = {
        name: _fit(method, name, values[:, i], truth[:, i] != 0) for i, name in enumerate(names)
    }
    return BinaryCalibrator(
        kind=method, parameters=parameters, labels=names, model_id=model_id, split_id=split_id,
        train_split_id=train_split_id, test_split_id=test_split_id,
    )  # fmt: skip


def _fit(method: str, name: str, logits: np.ndarray, on: np.ndarray) -> dict[str, Any]:
    if on.all() or not on.any():
        raise CalibrationFitError(
            f"output {name!r} is always {'on' if on.all() else 'off'} on these rows, so that "
            "there is nothing to fit"
        )
    if method == "isotonic":
        x, y = isotonic_curve(sigmoid(logits), on)
        return {"x": x, "y": y}
    yes, no = on.sum(), (~on).sum()
    if method == "platt":
        wanted = np.where(on, (yes + 1) / (yes + 2), 1 / (no + 2))
        a, b = _logistic(np.stack([logits, np.ones(len(on))], axis=1), wanted)
        return {"a": float(a), "b": float(b)}
    columns = np.stack([_log_sigmoid(logits), -_log_sigmoid(-logits), np.ones(len(on))], axis=1)
    for kept in ([0, 1, 2], [0, 2], [1, 2], [2]):  # a negative slope is left out, as in the paper
        found = np.zeros(3)
        found[kept] = _logistic(columns[:, kept], on.astype(np.float64))
        if found[0] >= 0 and found[1] >= 0:
            break
    if not np.isfinite(found).all() or np.abs(found).max() > 1e6:
        raise CalibrationFitError(f"output {name!r} is separable; a beta curve has no optimum")
    return dict(zip("abc", found.tolist()))


def _logistic(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Weights that minimize the logistic loss, by Newton's method with halved steps."""
    unit = np.maximum(1e-12, np.abs(columns).max(0))
    scaled, weights = columns / unit, np.zeros(columns.shape[1])

    def loss(w: np.ndarray) -> float:
        z = scaled @ w
        return float((np.logaddexp(0, z) - wanted * z).sum())

    best = loss(weights)
    for _ in range(200):
        p = sigmoid(scaled @ weights)
        gradient = scaled.T @ (p - wanted)
        curvature = (scaled * (p * (1 - p))[:, None]).T @ scaled
        ridge = 1e-12 * max(1.0, float(np.trace(curvature))) * np.eye(len(weights))
        step = np.linalg.solve(curvature + ridge, gradient)
        size = 1.0
        while size > 1e-10 and (now := loss(weights - size * step)) > best:
            size /= 2
        if size <= 1e-10:
            break
        weights, gained, best = weights - size * step, best - now, now
        if gained <= 1e-14 * max(1.0, abs(best)):
            break
    return weights / unit


def sigmoid(values: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-values))`` without overflow."""
    odds = np.exp(-np.abs(values))
    return np.where(values >= 0, 1 / (1 + odds), odds / (1 + odds))


def _log_sigmoid(values: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -values)


def _names(labels: Any) -> tuple[str, ...]:
    if labels is None or isinstance(labels, str):
        raise CalibrationError(f"labels name each output in order, not {show(labels)}")
    names = tuple(labels)
    if not names or len(set(names)) != len(names) or not all(
        isinstance(name, str) and name for name in names
    ):  # fmt: skip
        raise CalibrationError(f"labels must be distinct, non-empty names, not {show(names)}")
    return names


def _logits(logits: Any, outputs: int) -> np.ndarray:
    values = as_numpy(logits, "logits", CalibrationError)
    values = values[:, None] if values.ndim == 1 else values
    if values.dtype.kind not in "fiu" or values.ndim != 2 or values.shape[1] != outputs:
        raise CalibrationError(f"logits must be real numbers (N, {outputs}), not {values.shape}")
    if not len(values) or not np.isfinite(values).all():
        raise CalibrationError("logits must be finite, and at least one row")
    return values.astype(np.float64)
