"""Sets and intervals beside MAPIE and crepes, which are installed by hand (group ``peers``).

MAPIE's APS draws at random, ours does not: it is compared by hand in the other file.
"""

from __future__ import annotations

import numpy as np
import pytest
from made_logits import BOUND, overconfident
from nnx.conformal import fit_intervals, fit_sets
from scipy.special import softmax

WHERE = {**BOUND, "split_id": "conformal"}


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_sets_are_those_of_mapie(alpha) -> None:
    classification = pytest.importorskip("mapie.classification")
    base = pytest.importorskip("sklearn.base")

    class Fixed(base.ClassifierMixin, base.BaseEstimator):
        """Its input is its output."""

        def fit(self, X, y):
            self.classes_ = np.arange(X.shape[1])
            return self

        def predict(self, X):
            return X.argmax(1)

        def predict_proba(self, X):
            return X

    logits, y = overconfident(600, seed=3)
    p = softmax(logits, axis=1)
    fixed = Fixed().fit(p[:300], y[:300])
    theirs = classification.SplitConformalClassifier(
        fixed, confidence_level=1 - alpha, conformity_score="lac", prefit=True
    ).conformalize(p[:300], y[:300])
    _, wanted = theirs.predict_set(p[300:])
    ours = fit_sets(p[:300], y[:300], alpha=alpha, method="lac", **WHERE)
    assert (ours.predict(p[300:], **BOUND).members == wanted[:, :, 0]).all()


@pytest.mark.parametrize("normalized", [False, True])
def test_intervals_are_those_of_crepes(normalized) -> None:
    crepes = pytest.importorskip("crepes")
    random = np.random.default_rng(0)
    truth = random.normal(size=400)
    predicted = truth + random.normal(size=400) * (1 + random.random(400))
    sigmas = 0.5 + random.random(400) if normalized else None
    own = {"scale": sigmas[:200]} if normalized else {}
    new = {"scale": sigmas[200:]} if normalized else {}
    fitted = fit_intervals(
        predicted[:200], truth[:200], alpha=0.1, model_id="m", split_id="c", **own,
        method="normalised" if normalized else "absolute",
    )  # fmt: skip
    found = fitted.predict(predicted[200:], model_id="m", **new)
    theirs = crepes.ConformalRegressor()
    theirs.fit(truth[:200] - predicted[:200], sigmas=None if sigmas is None else sigmas[:200])
    wanted = theirs.predict_int(
        predicted[200:], sigmas=None if sigmas is None else sigmas[200:], confidence=0.9
    )
    np.testing.assert_allclose(np.stack([found.lower, found.upper], 1), wanted, rtol=1e-12)
