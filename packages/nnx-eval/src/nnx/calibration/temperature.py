"""One temperature for all classes: ``softmax(logits / T)`` (Guo et al., 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nnx.utils import validation as check

from .arrays import (
    blocks,
    class_targets,
    declared_labels,
    identity,
    softmax,
)
from .binding import DISJOINTNESS, check_splits
from .bound import BoundCalibrator, rows_of
from .errors import CalibrationError, CalibrationFitError


@dataclass(frozen=True, slots=True)
class TemperatureCalibrator(BoundCalibrator):
    """A fitted temperature, bound to one model and one order of labels.

    It never changes the argmax. ``fit_config`` and ``fit_result`` say how it
    was fitted; the split ids say on what.
    """

    temperature: float
    labels: tuple[str, ...]
    model_id: str
    split_id: str
    train_split_id: str | None = None
    test_split_id: str | None = None
    fit_config: Mapping[str, Any] = field(default_factory=dict)
    fit_result: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _positive("temperature", self.temperature))
        self._settle()

    def calibrate(self, values: np.ndarray) -> np.ndarray:
        """``softmax(values / T)`` of checked (N, C) logits."""
        return softmax(values, 1 / self.temperature)

    def state(self) -> dict[str, Any]:
        return self._stored("temperature", temperature=self.temperature)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TemperatureCalibrator:
        return cls(**cls._read(state, "temperature", "temperature"))


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """What a fit gave: a calibrator (``status`` "ok"), or the ``reason`` for none ("failed")."""

    status: str
    calibrator: TemperatureCalibrator | None
    reason: str | None
    config: Mapping[str, Any]
    split: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def require(self) -> TemperatureCalibrator:
        """The calibrator; ``CalibrationFitError`` with the reason when there is none."""
        if self.calibrator is None:
            raise CalibrationFitError(
                f"no temperature was fitted on split {self.split['calibration']!r}: {self.reason}"
            )
        return self.calibrator


def fit_temperature(
    logits: Any,
    targets: Any,
    *,
    model_id: str,
    split_id: str,
    labels: Sequence[str] | None = None,
    train_split_id: str | None = None,
    test_split_id: str | None = None,
    min_temperature: float = 0.001,
    max_temperature: float = 1000.0,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> CalibrationFit:
    """The temperature that minimizes the NLL of (N, C) ``logits`` and (N,) class ``targets``.

    The slope of the NLL in 1 / T is monotone, and is bisected between the two
    temperatures (at their geometric mean, until the bracket is relatively
    narrower than ``tolerance``). A split without an optimum between them gives
    a failed fit with the reason, never a temperature at a boundary.
    """
    split, train, test = check_splits(split_id, train_split_id, test_split_id, CalibrationError)
    model = identity("model_id", model_id, CalibrationError)
    names = declared_labels(logits, labels, CalibrationError)
    low, high = (
        _positive("min_temperature", min_temperature),
        _positive("max_temperature", max_temperature),
    )
    if low >= high:
        raise CalibrationError(f"min_temperature {low} must be below max_temperature {high}")
    config = {
        "method": "temperature", "objective": "nll", "dtype": "float64",
        "min_temperature": low, "max_temperature": high,
        "tolerance": _positive("tolerance", tolerance), "max_iterations": _count(max_iterations),
    }  # fmt: skip
    values, _ = rows_of(logits, None)
    if values.shape[1] != len(names):
        raise CalibrationError(f"{len(names)} labels for the {values.shape[1]} columns of logits")
    classes = class_targets(targets, len(values), values.shape[1], CalibrationError)
    splits = {"calibration": split, "train": train, "test": test, "disjointness": DISJOINTNESS}
    found, iterations = _search(values, classes, config)
    if isinstance(found, str):
        return CalibrationFit("failed", None, found, config, splits)
    calibrator = TemperatureCalibrator(
        temperature=found, labels=names, model_id=model, split_id=split, train_split_id=train,
        test_split_id=test, fit_config=config,
        fit_result={
            "iterations": iterations, "n_samples": len(values), "n_classes": len(names),
            "nll_before": mean_nll(values, classes, 1.0),
            "nll_after": mean_nll(values, classes, 1 / found),
        },
    )  # fmt: skip
    return CalibrationFit("ok", calibrator, None, config, splits)


def _search(
    values: np.ndarray, classes: np.ndarray, config: Mapping[str, Any]
) -> tuple[float | str, int]:
    """The temperature and the number of bisections, or why there is none."""
    low, high = 1 / config["max_temperature"], 1 / config["min_temperature"]
    if all(np.ptp(values[a:b], axis=1).max() == 0 for a, b in blocks(*values.shape)):
        return "the logits of every row are constant, so that no temperature matters", 0
    best = values.argmax(1)
    if (values[np.arange(len(values)), best] == values[np.arange(len(values)), classes]).all():
        return "every row is separable: the NLL falls as long as the temperature does", 0
    if slope(values, classes, 0.0) >= 0:
        return (
            "the logits are no better than uniform: the NLL falls as long as the temperature rises"
        ), 0
    if slope(values, classes, low) >= 0:
        return f"the optimum lies above max_temperature {config['max_temperature']:g}", 0
    if slope(values, classes, high) <= 0:
        return f"the optimum lies below min_temperature {config['min_temperature']:g}", 0
    for iteration in range(1, config["max_iterations"] + 1):
        middle = math.sqrt(low * high)
        if slope(values, classes, middle) < 0:
            low = middle
        else:
            high = middle
        if high - low <= config["tolerance"] * high:
            return 1 / math.sqrt(low * high), iteration
    return (
        f"the search did not converge in {config['max_iterations']} iterations to a tolerance "
        f"of {config['tolerance']:g}"
    ), config["max_iterations"]


def slope(values: np.ndarray, classes: np.ndarray, beta: float) -> float:
    """The derivative of the mean NLL of ``softmax(beta * values)`` by ``beta``."""
    total = 0.0
    for start, stop in blocks(*values.shape):
        block = values[start:stop].astype(np.float64)
        block -= block.max(1, keepdims=True)
        weights = np.exp(block * beta)
        expected = np.einsum("nc,nc->n", weights, block) / weights.sum(1)
        total += float((expected - block[np.arange(stop - start), classes[start:stop]]).sum())
    return total / len(values)


def mean_nll(values: np.ndarray, classes: np.ndarray, beta: float) -> float:
    """The exact mean NLL of ``softmax(beta * values)``, finite for every finite logit."""
    total = 0.0
    for start, stop in blocks(*values.shape):
        block = values[start:stop].astype(np.float64)
        block -= block.max(1, keepdims=True)
        block *= beta
        picked = block[np.arange(stop - start), classes[start:stop]]
        total += float((np.log(np.exp(block).sum(1)) - picked).sum())
    return total / len(values)


def _positive(name: str, value: Any) -> float:
    try:
        return float(check.real("calibration", name, value, above=0))
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _count(value: Any) -> int:
    try:
        return check.count("calibration", "max_iterations", value)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
