"""AUROC and average precision against scikit-learn, in parts, over a resume and in a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx import MetricSpec
from sklearn import metrics

ORACLES = {"auroc": metrics.roc_auc_score, "average_precision": metrics.average_precision_score}


def accumulator(id):
    return MetricSpec(id).definition.factory({})


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=40),
    st.sampled_from(sorted(ORACLES)), st.integers(0, 40),
)  # fmt: skip
def test_it_is_what_scikit_learn_computes_ties_included(rows, id, cut):
    positive, scores = np.array([r[0] for r in rows]), np.array([r[1] / 6 for r in rows])
    whole, one, two = (accumulator(id) for _ in range(3))
    whole.update(positive.astype(int), np.stack([1 - scores, scores], axis=1))
    one.update(positive[:cut].astype(float), scores[:cut])
    two.update(positive[cut:].astype(float), scores[cut:])
    resumed = accumulator(id)
    resumed.load_state(one.state())
    resumed.merge(two)
    assert whole.result() == resumed.result()
    if positive.all() or not positive.any():
        assert whole.result() is None
    else:
        assert whole.result() == pytest.approx(ORACLES[id](positive, scores), abs=1e-12)


@pytest.mark.parametrize("id", sorted(ORACLES))
def test_several_classes_are_each_against_the_rest(id):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (60,), generator=generator).numpy()
    p = torch.randn(60, 5, generator=generator).softmax(1).numpy()  # nothing is of class 4
    metric = accumulator(id)
    assert metric.result() is None
    metric.update(y, p)
    expected = np.mean([ORACLES[id](y == c, p[:, c]) for c in range(4)])
    assert metric.result() == pytest.approx(expected, abs=1e-12)
    shares = accumulator(id)
    shares.update(np.eye(5)[y], p)
    assert shares.result() == metric.result()


def test_it_takes_no_config():
    with pytest.raises(ValueError, match="takes no config"):
        MetricSpec("auroc", config={"average": "macro"}).definition.check_config({"average": "x"})
