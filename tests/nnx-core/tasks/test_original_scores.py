"""The scores that the original system wrote are those of our counts, bit for bit.

Its data are gone, so each stored row is explained: among all counts of true
positives, predictions and targets that its batch could have had, one gives
exactly the stored accuracy, F1, recall and precision.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from nnx.tasks.scores import class_scores

CLASSES = 3

# samples, accuracy, f1, recall, precision: rows of idps.csv of two runs (dropout, so noisy)
ROWS = [
    (16, 0.3125, 0.23174603174603173, 0.25833333333333336, 0.2333333333333333),
    (16, 0.0625, 0.047619047619047616, 0.08333333333333333, 0.03333333333333333),
    (16, 0.375, 0.26936026936026936, 0.31746031746031744, 0.27777777777777773),
    (16, 0.625, 0.5726495726495727, 0.6111111111111112, 0.7380952380952381),
    (16, 0.4375, 0.4212121212121212, 0.4166666666666667, 0.5952380952380952),
    (16, 0.6875, 0.6388888888888888, 0.6190476190476191, 0.7777777777777777),
    (24, 0.3333333333333333, 0.23703703703703702, 0.31666666666666665, 0.23859649122807017),
    (24, 0.5416666666666666, 0.40941176470588236, 0.47500000000000003, 0.362962962962963),
]


def compositions(total, least):
    """Every triple of counts of at least ``least`` that adds up to ``total``."""
    free = total - sum(least)
    for a, b in itertools.product(range(free + 1), repeat=2):
        if a + b <= free:
            yield least[0] + a, least[1] + b, least[2] + free - a - b


@pytest.mark.parametrize("row", ROWS)
def test_a_stored_row_is_explained_by_counts(row):
    samples, accuracy, *stored = row
    for hits in compositions(round(samples * accuracy), (0, 0, 0)):
        totals = np.array(list(compositions(samples, hits)))
        recall = close(hits, totals, stored[1])
        precision = close(hits, totals, stored[2])
        for actual, predicted in itertools.product(recall, precision):
            counts = (np.array(hits), np.array(predicted), np.array(actual))
            if class_scores(*counts) == (accuracy, *stored):
                return
    pytest.fail(f"no counts of {CLASSES} classes give {row}")


def close(hits, totals, value):
    """The triples whose mean ratio is ``value``, up to rounding."""
    ratios = np.divide(hits, totals, out=np.zeros(totals.shape), where=totals > 0)
    return totals[np.abs(ratios.mean(1) - value) < 1e-12]
