"""More calibrators behind the same artifact: vector, matrix and isotonic scaling.

Vector and matrix scaling are of Guo et al. (2017), the off-diagonal and
intercept penalty of Kull et al. (2019), isotonic regression one class against
the rest of Zadrozny & Elkan (2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nnx.utils import validation as check
from nnx.utils.jsonlike import thaw

from .arrays import blocks, class_targets, declared_labels, softmax
from .binding import check_splits
from .bound import BoundCalibrator, rows_of
from .curves import isotonic_curve, read_curve
from .errors import CalibrationError, CalibrationFitError
from .temperature import TemperatureCalibrator, fit_temperature, mean_nll

KINDS = ("vector", "matrix", "isotonic")
METHODS = ("temperature", *KINDS)


@dataclass(frozen=True, slots=True)
class FittedCalibrator(BoundCalibrator):
    """A vector, matrix or isotonic calibrator; ``parameters`` are plain lists of numbers.

    "vector": ``scale`` and ``bias`` of each class; "matrix": ``weights`` (C rows) and
    ``bias``; "isotonic": of each class ``x`` and ``y``, the knots of a curve from
    its raw to its calibrated probability. These may change the argmax:
    ``CalibratedPrediction.argmax_changed`` says where.
    """

    kind: str
    parameters: Mapping[str, Any]
    labels: tuple[str, ...]
    model_id: str
    split_id: str
    train_split_id: str | None = None
    test_split_id: str | None = None
    fit_config: Mapping[str, Any] = field(default_factory=dict)
    fit_result: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CalibrationError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        self._settle("parameters")
        self._check_parameters()

    def _check_parameters(self) -> None:
        classes = len(self.labels)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "vector": {"scale": (classes,), "bias": (classes,)},
            "matrix": {"weights": (classes, classes), "bias": (classes,)},
        }
        wanted = shapes.get(self.kind)
        if wanted is None:
            curves = [(self.parameters.get("x", ()), self.parameters.get("y", ()))]
            if set(self.parameters) != {"x", "y"} or any(len(c) != classes for c in curves[0]):
                raise CalibrationError(f"an isotonic calibrator has x and y of {classes} classes")
            for x, y in zip(*curves[0]):
                read_curve(x, y, np.zeros(1))
            return
        if set(self.parameters) != set(wanted):
            raise CalibrationError(f"a {self.kind} calibrator has {' and '.join(wanted)}")
        for name, shape in wanted.items():
            try:
                found = np.asarray(self.parameters[name], dtype=np.float64)
            except (ValueError, TypeError):
                raise CalibrationError(f"{name} must be numbers of shape {shape}") from None
            if found.shape != shape:
                raise CalibrationError(
                    f"{name} must be numbers of shape {shape}, not {found.shape}"
                )

    def calibrate(self, values: np.ndarray) -> np.ndarray:
        if self.kind == "isotonic":
            return self._isotonic(values)
        bias = np.asarray(self.parameters["bias"], dtype=np.float64)
        out = np.empty(values.shape, dtype=np.float64)
        for start, stop in blocks(*values.shape):
            block = values[start:stop].astype(np.float64)
            if self.kind == "vector":
                block = block * np.asarray(self.parameters["scale"], dtype=np.float64) + bias
            else:
                block = block @ np.asarray(self.parameters["weights"], dtype=np.float64).T + bias
            out[start:stop] = softmax(block)
        return out

    def _isotonic(self, values: np.ndarray) -> np.ndarray:
        out = softmax(values)
        for c, (x, y) in enumerate(zip(self.parameters["x"], self.parameters["y"])):
            out[:, c] = read_curve(x, y, out[:, c])
        total = out.sum(1, keepdims=True)
        out /= np.where(total > 0, total, 1)
        out[total[:, 0] == 0] = 1 / out.shape[1]  # no class has a chance: nothing is known
        return out

    def state(self) -> dict[str, Any]:
        return self._stored(self.kind, parameters=thaw(self.parameters))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> FittedCalibrator:
        kind = state.get("kind") if isinstance(state, Mapping) else None
        kind = kind if kind in KINDS else "vector"
        return cls(kind=kind, **cls._read(state, kind, "parameters"))


def calibrator_from_state(state: Mapping[str, Any]) -> BoundCalibrator:
    """Any calibrator of categorical logits from its stored state."""
    if isinstance(state, Mapping) and state.get("kind") == "temperature":
        return TemperatureCalibrator.from_state(state)
    return FittedCalibrator.from_state(state)


def fit_calibrator(
    logits: Any,
    targets: Any,
    *,
    method: str,
    model_id: str,
    split_id: str,
    labels: Sequence[str] | None = None,
    train_split_id: str | None = None,
    test_split_id: str | None = None,
    penalty: float = 1e-3,
) -> BoundCalibrator:
    """Fit a calibrator by ``method``: "temperature", "vector", "matrix" or "isotonic".

    ``penalty`` is the ridge on a matrix' off-diagonal weights and bias, and on a
    vector's bias. Raises ``CalibrationFitError`` where there is no optimum.
    """
    bound: dict[str, Any] = {
        "model_id": model_id, "split_id": split_id, "train_split_id": train_split_id,
        "test_split_id": test_split_id,
    }  # fmt: skip
    if method == "temperature":
        return fit_temperature(logits, targets, labels=labels, **bound).require()
    if method not in KINDS:
        raise CalibrationError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    check_splits(split_id, train_split_id, test_split_id, CalibrationError)
    names = declared_labels(logits, labels, CalibrationError)
    values, _ = rows_of(logits, None)
    if values.shape[1] != len(names):
        raise CalibrationError(f"{len(names)} labels for the {values.shape[1]} columns of logits")
    classes = class_targets(targets, len(values), values.shape[1], CalibrationError)
    penalty = float(check.real("fit_calibrator", "penalty", penalty, at_least=0))
    if method == "isotonic":
        raw = softmax(values)
        curves = [isotonic_curve(raw[:, c], classes == c) for c in range(len(names))]
        parameters: dict[str, Any] = {"x": [x for x, _ in curves], "y": [y for _, y in curves]}
    else:
        parameters = _scale(values.astype(np.float64), classes, method, penalty)
    config = {"method": method, "objective": "nll", "dtype": "float64", "penalty": penalty}
    draft = FittedCalibrator(kind=method, parameters=parameters, labels=names, **bound)
    picked = draft.calibrate(values)[np.arange(len(values)), classes]
    return FittedCalibrator(
        kind=method, parameters=parameters, labels=names, fit_config=config,
        fit_result={
            "n_samples": len(values), "n_classes": len(names),
            "nll_before": mean_nll(values, classes, 1.0),
            "nll_after": float(-np.log(np.maximum(picked, 1e-12)).mean()),
        },
        **bound,
    )  # fmt: skip


def _scale(values: np.ndarray, classes: np.ndarray, method: str, penalty: float) -> dict[str, Any]:
    """Minimize the penalized NLL, which is convex, by L-BFGS in double precision."""
    import torch
    from torch.nn import functional

    count = values.shape[1]
    unit = max(1e-12, float(np.abs(values).max()))  # one scale for all, so that steps fit
    x, y = torch.from_numpy(values / unit), torch.from_numpy(classes)
    start = torch.ones(count) if method == "vector" else torch.eye(count)
    weights = (start.double() * unit).requires_grad_()
    bias = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    off = None if method == "vector" else 1 - torch.eye(count, dtype=torch.float64)

    def loss() -> torch.Tensor:
        scores = (x * weights if off is None else x @ weights.T) + bias
        ridge = (bias**2).sum()
        if off is not None:
            ridge = ridge + ((weights / unit * off) ** 2).sum()
        return functional.cross_entropy(scores, y) + penalty * ridge

    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    found = (weights / unit).detach()
    if not (torch.isfinite(found).all() and torch.isfinite(bias).all()) or found.abs().max() > 1e6:
        raise CalibrationFitError(
            f"{method} scaling has no optimum on these rows (they may be separable); fit on more "
            "rows, or raise penalty"
        )
    key = "scale" if method == "vector" else "weights"
    return {key: found.tolist(), "bias": bias.detach().tolist()}


@dataclass(frozen=True, slots=True)
class CalibratorChoice:
    """The calibrator of lowest cross-validated NLL, and every method's numbers.

    ``scores`` maps a method to its mean NLL over the rows, ``failed`` to why it
    could not be fitted. "none" stands for the raw probabilities.
    """

    method: str
    calibrator: BoundCalibrator | None
    scores: Mapping[str, float]
    failed: Mapping[str, str]
    folds: int


def choose_calibrator(
    logits: Any,
    targets: Any,
    *,
    model_id: str,
    split_id: str,
    labels: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
    folds: int = 5,
    train_split_id: str | None = None,
    test_split_id: str | None = None,
) -> CalibratorChoice:
    """Compare ``methods`` by the NLL of rows left out in turn, and fit the best on all rows.

    Folds are stratified and deterministic. The raw probabilities compete too,
    as "none"; where they win, there is no calibrator.
    """
    folds = check.count("choose_calibrator", "folds", folds, at_least=2)
    names = declared_labels(logits, labels, CalibrationError)
    values, _ = rows_of(logits, None)
    classes = class_targets(targets, len(values), values.shape[1], CalibrationError)
    if len(values) < 2 * folds:
        raise CalibrationError(f"{len(values)} rows are too few for {folds} folds")
    place = np.empty(len(values), dtype=np.int64)
    place[np.argsort(classes, kind="stable")] = np.arange(len(values)) % folds
    bound: dict[str, Any] = {
        "model_id": model_id, "split_id": split_id, "labels": names,
        "train_split_id": train_split_id, "test_split_id": test_split_id,
    }  # fmt: skip
    scores, failed = {"none": mean_nll(values, classes, 1.0)}, {}
    for method in methods:
        total = 0.0
        try:
            for fold in range(folds):
                held = place == fold
                made = fit_calibrator(values[~held], classes[~held], method=method, **bound)
                found = made.calibrate(values[held])
                picked = found[np.arange(len(found)), classes[held]]
                total -= float(np.log(np.maximum(picked, 1e-12)).sum())
        except CalibrationFitError as error:
            failed[method] = str(error)
            continue
        scores[method] = total / len(values)
    best = min(scores, key=lambda method: scores[method])
    calibrator = None
    if best != "none":
        calibrator = fit_calibrator(values, classes, method=best, **bound)
    return CalibratorChoice(best, calibrator, scores, failed, folds)
