"""The estimators, by scikit-learn's own checks and in its own tools."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from nnx import Callback, NNRun, NNTrainParams
from nnx.plugins.siblings import install_line
from torch import nn

pytest.importorskip("sklearn", minversion="1.6")

from nnx.sklearn import NNClassifier, NNRegressor
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

QUICK = [
    NNClassifier(epochs=2, batch_size=64, lr=0.1),
    NNRegressor(epochs=2, lr=0.03),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def checked(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a check is about, it asserts
        results = check_estimator(estimator, on_fail=None)
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []
    assert sum(r["status"] == "passed" for r in results) > 45


@pytest.mark.parametrize("estimator", QUICK, ids=["classifier", "regressor"])
def test_the_checks_of_scikit_learn_hold(estimator):
    checked(estimator)


@pytest.mark.skipif(os.environ.get("NNX_THOROUGH") != "1", reason="long: the defaults")
@pytest.mark.parametrize("make", [NNClassifier, NNRegressor])
def test_the_checks_of_scikit_learn_hold_for_the_defaults(make):
    checked(make())


def test_in_a_pipeline_a_search_and_a_cross_validation():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    network = NNClassifier(epochs=6, random_state=0, tags=["search"])
    piped = make_pipeline(StandardScaler(), network)
    search = GridSearchCV(piped, {"nnclassifier__lr": [1e-5, 0.03]}, cv=2).fit(X, names)
    assert search.best_params_ == {"nnclassifier__lr": 0.03}
    assert search.score(X, names) > 0.9
    best = search.best_estimator_[-1]
    assert list(best.classes_) == ["setosa", "versicolor", "virginica"]
    found = NNRun.find("'search' in tags and epochs == 6")
    assert len(found) == 2 * 2 + 1
    assert best.run_.id in {run.id for run in found}
    assert {run.train.optim.max_lr for run in found} == {1e-5, 0.03}
    chosen = clone(piped).set_params(**search.best_params_)
    assert cross_val_score(chosen, X, names, cv=2).mean() == search.best_score_
    assert len(NNRun.find("'search' in tags")) == len(found)  # folds of the search


def test_a_clone_trains_the_same_and_a_pickle_predicts_the_same():
    X, y = make_blobs(60, centers=3, random_state=0)
    fitted = NNClassifier(epochs=3, random_state=7).fit(X, y)
    expected = fitted.predict_proba(X)
    assert np.array_equal(clone(fitted).fit(X, y).predict_proba(X), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(X), expected)
    assert np.allclose(expected.sum(axis=1), 1, atol=1e-12)
    assert np.array_equal(fitted.classes_[expected.argmax(axis=1)], fitted.predict(X))
    other = NNClassifier(epochs=3, random_state=8).fit(X, y)
    assert not np.array_equal(other.predict_proba(X), expected)


def test_it_computes_what_its_network_computes():
    X, y = make_regression(40, 3, random_state=0)
    y = y / y.std()
    fitted = NNRegressor(net=nn.Linear, epochs=60, lr=0.05, random_state=0).fit(X, y)
    weights = fitted.model_.net.state_dict()
    by_hand = X @ weights["weight"].double().numpy().T + weights["bias"].double().numpy()
    assert fitted.predict(X) == pytest.approx(by_hand[:, 0], abs=1e-5)
    assert fitted.score(X, y) > 0.99
    assert fitted.run_.model.net.module.endswith("Linear")


def test_the_epoch_that_does_best_on_the_held_out_rows_is_kept():
    class Spoil(Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch == 1:
                with torch.no_grad():
                    [p.zero_() for p in ctx.model.net.parameters()]

    X, y = make_blobs(100, centers=3, random_state=1)
    fitted = NNClassifier(
        epochs=30, validation_fraction=0.2, early_stopping=1, callbacks=[Spoil()], random_state=0
    ).fit(X, y)
    scored = [r.val_edp for r in fitted.run_.idps if r.val_edp is not None]
    assert len(scored) == 2
    assert scored[0].error < scored[-1].error
    assert fitted.score(X, y) > 0.9


def test_a_search_that_is_started_again_takes_what_is_finished():
    trained = []

    class Count(Callback):
        def on_epoch_end(self, ctx):
            trained.append(ctx.epoch)

    X, y = make_blobs(40, centers=2, random_state=1)
    said = {"epochs": 2, "random_state": 0, "callbacks": [Count()], "on_existing": "resume"}
    first = NNClassifier(**said).fit(X, y)
    again = NNClassifier(**said).fit(X, y)
    assert trained == [0, 1]
    assert again.run_.id == first.run_.id
    assert np.array_equal(again.predict_proba(X), first.predict_proba(X))
    NNClassifier(**said).fit(X + 1, y)
    assert trained == [0, 1, 0, 1]


def test_what_cannot_be_learned_is_refused():
    X = np.zeros((4, 2))
    with pytest.raises(ValueError, match="rows of at least two classes; these are of one class"):
        NNClassifier().fit(X, [1, 1, 1, 1])
    with pytest.raises(ValueError, match="Unknown label type"):
        NNClassifier().fit(X, [0.5, 1.5, 2.5, 3.5])
    assert not os.path.exists("runs")


def test_without_scikit_learn_the_install_line_is_named():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import nnx\nassert 'torch' not in sys.modules\n"
        "try:\n    import nnx.sklearn\nexcept ImportError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_line("nnx-core", "sklearn") in out.stdout


def test_the_configuration_is_that_of_the_long_way():
    X, y = make_blobs(20, centers=2, random_state=1)
    run = NNClassifier(epochs=1, random_state=0).fit(X, y).run_
    assert run.train.state().keys() == NNTrainParams(n_epochs=1, seed=0, data_id="x").state().keys()
    assert run.train.data_id.startswith("sklearn-")
