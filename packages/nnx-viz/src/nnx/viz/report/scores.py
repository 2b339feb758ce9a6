"""Confusion matrices and per-class scores of stored predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnx.store.predictions import StoredPredictions

# More classes than this are not drawn as a matrix; the table still lists them.
MAX_CLASSES = 60


@dataclass(frozen=True, slots=True)
class ClassScores:
    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, slots=True)
class SplitScores:
    """One stored split: counts by true (rows) and predicted (columns) class."""

    run: str
    split: str
    classes: list[str]
    counts: list[list[int]]
    scores: list[ClassScores]
    accuracy: float
    total: int

    @property
    def drawable(self) -> bool:
        return len(self.classes) <= MAX_CLASSES


def split_scores(run: str, stored: StoredPredictions) -> SplitScores | None:
    """Scores of a classification split; ``None`` for an empty or a continuous one."""
    classes = _classes(stored)
    if classes is None:
        return None
    index = {name: i for i, name in enumerate(classes)}
    n = len(classes)
    counts = [[0] * n for _ in range(n)]
    for target, predicted in zip(stored.targets, stored.predicted):
        counts[index[target]][index[predicted]] += 1
    scores = [_scores(name, i, counts) for i, name in enumerate(classes)]
    hits, total = sum(counts[i][i] for i in range(n)), len(stored.targets)
    return SplitScores(run, stored.split, classes, counts, scores, hits / total, total)


def _scores(name: str, i: int, counts: Sequence[Sequence[int]]) -> ClassScores:
    hits = counts[i][i]
    predicted = sum(row[i] for row in counts)
    support = sum(counts[i])
    precision = hits / predicted if predicted else 0.0
    recall = hits / support if support else 0.0
    f1 = 2 * hits / (predicted + support) if predicted + support else 0.0
    return ClassScores(name, precision, recall, f1, support)


def _classes(stored: StoredPredictions) -> list[str] | None:
    names = {*stored.targets, *stored.predicted}
    if not names:
        return None
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return sorted(names)
    if any(not value.is_integer() for value in numbers.values()):
        return None  # a regression
    return sorted(names, key=lambda name: numbers[name])


def matrix_chart(scores: SplitScores, id: str) -> dict[str, Any]:
    """The confusion matrix as a Plotly heatmap; colours are shares of each row."""
    totals = [max(sum(row), 1) for row in scores.counts]
    return {
        "id": id,
        "title": f"{scores.run} {scores.split}: true against predicted class",
        "matrix": True,
        "traces": [
            {
                "type": "heatmap",
                "z": [[c / t for c in row] for row, t in zip(scores.counts, totals)],
                "x": scores.classes,
                "y": scores.classes,
                "text": scores.counts,
                "texttemplate": "%{text}" if len(scores.classes) <= 20 else None,
                "hovertemplate": "true %{y}<br>predicted %{x}<br>%{text} samples, "
                "%{z:.1%} of the row<extra></extra>",
                "colorscale": [[0, "#f3f7fb"], [0.5, "#6aaed6"], [1, "#08417c"]],
                "zmin": 0,
                "zmax": 1,
                "colorbar": {"title": {"text": "share of row"}, "tickformat": ".0%"},
            }
        ],
    }
