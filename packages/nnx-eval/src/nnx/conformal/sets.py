"""Prediction sets of a classifier: LAC, APS and RAPS, marginal or conditional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.calibration.arrays import (
    blocks,
    class_targets,
    identity,
    probability_matrix,
    row_ids,
    text_labels,
)
from nnx.calibration.binding import check_splits
from nnx.calibration.rows import RowSet
from nnx.utils import validation as check
from nnx.utils.validation import show

from .errors import ConformalError, ConformalMismatchError
from .quantiles import (
    Cell,
    ConformalArtifact,
    cells_of,
    check_alpha,
    group_keys,
    guarantee,
    limits_of,
)

METHODS = ("lac", "aps", "raps")
CONDITIONS = ("none", "class", "group")
_KEYS = (
    "method", "alpha", "labels", "model_id", "calibrator_id", "condition", "penalty", "kept",
    "split_id", "train_split_id", "test_split_id", "cells", "rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SetPrediction:
    """The sets of N rows: ``members`` (N, C) says which labels are inside. Sets may be empty."""

    members: np.ndarray
    labels: tuple[str, ...]
    sample_ids: np.ndarray
    alpha: float
    conformal_id: str

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.members)

    @property
    def sizes(self) -> np.ndarray:
        """(N,) numbers of labels inside."""
        return self.members.sum(1)

    def names(self) -> tuple[tuple[str, ...], ...]:
        """Each row's labels by name, in their order."""
        return tuple(
            tuple(name for name, inside in zip(self.labels, row) if inside)
            for row in self.members.tolist()
        )

    def coverage(self, targets: Any) -> float:
        """The share of rows whose true class is inside."""
        classes = class_targets(targets, len(self), len(self.labels), ConformalError)
        if not len(self):
            raise ConformalError("there are no rows to measure the coverage of")
        return float(self.members[np.arange(len(self)), classes].mean())


@dataclass(frozen=True, slots=True)
class ConformalSets(ConformalArtifact):
    """Calibrated thresholds, bound to a model, its labels and the calibrator below.

    ``method`` "lac" takes the labels whose 1 - p is small (Sadinle, Lei &
    Wasserman, 2019), "aps" the likeliest until their sum suffices (Romano, Sesia
    & Candès, 2020; without randomization, hence never below the level), "raps"
    adds ``penalty`` for each label after the first ``kept`` (Angelopoulos et al.,
    2021). ``condition`` makes the promise for each class, or each group.
    ``rows`` are those that it was fitted on, where they are known.
    """

    method: str
    alpha: float
    labels: tuple[str, ...]
    model_id: str
    split_id: str
    cells: Mapping[str, Cell]
    calibrator_id: str | None = None
    condition: str = "none"
    penalty: float = 0.0
    kept: int = 0
    train_split_id: str | None = None
    test_split_id: str | None = None
    rows: RowSet | None = None

    KIND: ClassVar[str] = "sets"
    KEYS: ClassVar[tuple[str, ...]] = _KEYS

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        try:
            check.choice("ConformalSets", "method", self.method, METHODS)
            check.choice("ConformalSets", "condition", self.condition, CONDITIONS)
            put("penalty", float(check.real("ConformalSets", "penalty", self.penalty, at_least=0)))
            check.count("ConformalSets", "kept", self.kept, at_least=0)
        except ValueError as error:
            raise ConformalError(str(error)) from None
        put("alpha", check_alpha(self.alpha))
        put("labels", text_labels(self.labels, ConformalError))
        identity("model_id", self.model_id, ConformalError)
        if self.calibrator_id is not None:
            identity("calibrator_id", self.calibrator_id, ConformalError)
        check_splits(self.split_id, self.train_split_id, self.test_split_id, ConformalError)
        put("cells", dict(self.cells))

    def guarantee(self) -> str:
        """What is promised: the level, and of each cell n, the rank used and what it attains."""
        words = {"none": "", "class": " for each true class", "group": " in each group"}
        return guarantee(self.cells, self.alpha, "the sets", words[self.condition])

    def predict(
        self,
        source: Any,
        *,
        labels: Sequence[str] | None = None,
        model_id: str | None = None,
        calibrator_id: str | None = None,
        sample_ids: Any = None,
        groups: Any = None,
    ) -> SetPrediction:
        """The sets of a ``CalibratedPrediction``, or of (N, C) probabilities that say whose they are.

        A group that was not calibrated gets every label.
        """
        table, ids = _bound_table(
            source, self.labels, self.model_id, self.calibrator_id,
            labels=labels, model_id=model_id, calibrator_id=calibrator_id, sample_ids=sample_ids,
        )  # fmt: skip
        keys = _keys_for(self.condition, groups, len(table))
        if self.condition == "class":
            limits = limits_of(self.cells, np.asarray(self.labels, dtype=object), len(self.labels))
        else:
            limits = limits_of(self.cells, keys, len(table))[:, None]
        members = np.empty(table.shape, dtype=bool)
        for start, stop in blocks(*table.shape):
            found = label_scores(table[start:stop], self.method, self.penalty, self.kept)
            limit = limits if self.condition == "class" else limits[start:stop]
            members[start:stop] = found <= limit
        return SetPrediction(members, self.labels, ids, self.alpha, self.id)


def label_scores(table: np.ndarray, method: str, penalty: float, kept: int) -> np.ndarray:
    """(N, C) scores, small for labels that fit; equals are ranked by the order of the labels."""
    if method == "lac":
        return 1 - table
    order = np.argsort(-table, axis=1, kind="stable")
    sums = np.take_along_axis(table, order, axis=1).cumsum(1)
    if method == "raps":
        sums += penalty * np.maximum(0, np.arange(1, table.shape[1] + 1) - kept)
    found = np.empty_like(sums)
    np.put_along_axis(found, order, sums, axis=1)
    return found


class SetFitter:
    """Calibrates sets from chunks: of each row its score alone is kept, 8 bytes."""

    def __init__(
        self, *, labels: Sequence[str], method: str = "lac", penalty: float = 0.01, kept: int = 1,
        condition: str = "none",
    ) -> None:  # fmt: skip
        self._labels = text_labels(labels, ConformalError)
        if method not in METHODS or condition not in CONDITIONS:
            raise ConformalError(
                f"method is one of {', '.join(METHODS)} and condition one of "
                f"{', '.join(CONDITIONS)}, not {show(method)} and {show(condition)}"
            )
        raps = method == "raps"
        self._method, self._condition = method, condition
        self._penalty, self._kept = (penalty, kept) if raps else (0.0, 0)
        self._scores: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []

    def update(self, probabilities: Any, targets: Any, *, groups: Any = None) -> None:
        """Add (N, C) probabilities with their (N,) true classes; a refused chunk adds nothing."""
        table = probability_matrix(probabilities, ConformalError, empty=True)
        if table.shape[1] != len(self._labels):
            raise ConformalError(f"{table.shape[1]} columns for the {len(self._labels)} labels")
        classes = class_targets(targets, len(table), table.shape[1], ConformalError)
        keys = _keys_for(self._condition, groups, len(table))
        found = np.empty(len(table))
        for start, stop in blocks(*table.shape):
            scores = label_scores(table[start:stop], self._method, self._penalty, self._kept)
            found[start:stop] = scores[np.arange(stop - start), classes[start:stop]]
        if self._condition == "class":
            keys = np.asarray(self._labels, dtype=object)[classes]
        if keys is not None:
            self._keys.append(keys)
        self._scores.append(found)

    def finish(
        self, *, alpha: float, model_id: str, split_id: str, calibrator_id: str | None = None,
        train_split_id: str | None = None, test_split_id: str | None = None,
        rows: RowSet | None = None,
    ) -> ConformalSets:  # fmt: skip
        """The sets at error level ``alpha``."""
        alpha = check_alpha(alpha)
        scores = np.concatenate(self._scores) if self._scores else np.zeros(0)
        keys = np.concatenate(self._keys) if self._keys else None
        if keys is None and self._condition != "none":
            keys = np.zeros(0, dtype=object)
        cells = cells_of(scores, keys, alpha)
        if self._condition == "class":
            cells = {name: cells.get(name, Cell.of(np.zeros(0), alpha)) for name in self._labels}
        return ConformalSets(
            method=self._method, alpha=alpha, labels=self._labels, model_id=model_id,
            split_id=split_id, cells=cells or {"": Cell.of(np.zeros(0), alpha)},
            calibrator_id=calibrator_id, condition=self._condition, penalty=self._penalty,
            kept=self._kept, train_split_id=train_split_id, test_split_id=test_split_id, rows=rows,
        )  # fmt: skip


def fit_sets(
    source: Any,
    targets: Any,
    *,
    alpha: float,
    split_id: str,
    model_id: str | None = None,
    labels: Sequence[str] | None = None,
    calibrator_id: str | None = None,
    method: str = "lac",
    penalty: float = 0.01,
    kept: int = 1,
    condition: str = "none",
    groups: Any = None,
    train_split_id: str | None = None,
    test_split_id: str | None = None,
    rows: RowSet | None = None,
) -> ConformalSets:
    """Calibrate sets on a ``CalibratedPrediction``, or on (N, C) probabilities of ``model_id``.

    The rows must be used neither for training nor for the calibrator, and be
    exchangeable with the rows to predict. Too few rows for ``alpha`` give sets
    of every label, never smaller ones.
    """
    check_splits(split_id, train_split_id, test_split_id, ConformalError)
    if hasattr(source, "calibrated_probabilities"):
        labels = labels or source.labels
        model_id, calibrator_id = model_id or source.model_id, calibrator_id or source.calibrator_id
    if labels is None:
        raise ConformalError("say which classes the columns are with labels=[...]")
    names = text_labels(labels, ConformalError)
    model = identity("model_id", model_id, ConformalError)
    table, _ = _bound_table(
        source, names, model, calibrator_id, labels=names, model_id=model,
        calibrator_id=calibrator_id, sample_ids=None,
    )  # fmt: skip
    fitter = SetFitter(labels=names, method=method, penalty=penalty, kept=kept, condition=condition)
    fitter.update(table, targets, groups=groups)
    return fitter.finish(
        alpha=alpha, model_id=model, split_id=split_id, calibrator_id=calibrator_id,
        train_split_id=train_split_id, test_split_id=test_split_id, rows=rows,
    )  # fmt: skip


def _keys_for(condition: str, groups: Any, rows: int) -> np.ndarray | None:
    if (groups is not None) != (condition == "group"):
        raise ConformalError('groups= belongs to condition="group", and is needed for it')
    return None if groups is None else group_keys(groups, rows)


def _bound_table(
    source: Any, wanted_labels: tuple[str, ...], wanted_model: str, wanted_calibrator: str | None,
    *, labels: Any, model_id: Any, calibrator_id: Any, sample_ids: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The probabilities of ``source`` after its declared origin was compared."""
    table = source
    if hasattr(source, "calibrated_probabilities"):
        if sample_ids is not None:
            raise ConformalError("a calibrated prediction brings its own sample_ids")
        labels, model_id = labels or source.labels, model_id or source.model_id
        calibrator_id = calibrator_id or source.calibrator_id
        if (tuple(source.labels), source.model_id) != (tuple(labels), model_id):
            raise ConformalMismatchError("labels or model_id are not those of the prediction")
        table, sample_ids = source.calibrated_probabilities, source.sample_ids
    if labels is None or model_id is None:
        raise ConformalError("probabilities come with labels=[...] and model_id=")
    actual = {"labels": tuple(labels), "model_id": model_id, "calibrator_id": calibrator_id}
    wanted = {"labels": wanted_labels, "model_id": wanted_model, "calibrator_id": wanted_calibrator}
    for name, value in actual.items():
        if value != wanted[name]:
            raise ConformalMismatchError(
                f"the sets were calibrated for {name} {show(wanted[name])}, not {show(value)}"
            )
    values = probability_matrix(table, ConformalError, empty=True)
    if values.shape[1] != len(wanted_labels):
        raise ConformalError(f"{values.shape[1]} columns for the {len(wanted_labels)} labels")
    return values, row_ids(sample_ids, len(values), ConformalError)
