"""Reliability and risk pictures hold the numbers that they were given."""

from __future__ import annotations

import numpy as np
import pytest
from nnx.viz import reliability, risk_coverage

pytest.importorskip(
    "nnx.calibration", exc_type=ImportError, reason="what is drawn here is made by nnx-eval"
)
from nnx.abstention import risk_coverage_curve
from nnx.calibration import reliability_bins


def made():
    rng = np.random.default_rng(0)
    p = rng.dirichlet([1, 1, 1], 200)
    return p, np.array([rng.choice(3, p=row) for row in p])


def test_a_reliability_picture_has_a_marker_for_each_bin_with_rows() -> None:
    p, y = made()
    bins = reliability_bins(p, y)
    figure = reliability({"before": bins, "after": bins})
    filled = [b for b in bins if b.count]
    assert [trace.name for trace in figure.data] == ["as promised", "before", "after"]
    assert list(figure.data[1].x) == [b.confidence for b in filled]
    assert list(figure.data[1].y) == [b.accuracy for b in filled]
    assert len(reliability(bins).data) == 2
    with pytest.raises(ValueError, match="no rows"):
        reliability(reliability_bins(np.zeros((0, 2)), np.zeros(0, dtype=int)))


def test_a_risk_picture_leaves_out_what_has_no_risk() -> None:
    p, y = made()
    curve = risk_coverage_curve(p, y, kind="margin")
    figure = risk_coverage(curve, ceiling=0.3)
    assert list(figure.data[0].x) == [point.coverage for point in curve[1:]]
    assert list(figure.data[0].y) == [point.risk for point in curve[1:]]
    assert figure.layout.shapes[0].y0 == 0.3
    with pytest.raises(ValueError, match="accepts nothing"):
        risk_coverage(curve[:1])
