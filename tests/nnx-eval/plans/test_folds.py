"""A cross-validated plan: a run for each fold, known again, and its predictions stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_plans import X, Y, plan, training
from nnx import Losses, Nets, NNModelParams, NNRun
from nnx.data_splits import SplitError, plan_folds
from nnx.plans import PlanError
from nnx.store.predictions import load_predictions
from torch.utils.data import DataLoader, Subset, TensorDataset

ROWS = TensorDataset(X, Y)
SPLITS = plan_folds(labels=Y.tolist(), k=3, source="made")


def test_each_fold_is_the_equally_seeded_script_and_predicts_its_own_rows() -> None:
    folds = plan().folds(ROWS, SPLITS, batch_size=8)
    assert folds.missing() == (0, 1, 2)
    runs = folds.train()
    assert folds.missing() == ()
    for split, run in zip(SPLITS, runs.values()):
        by_hand = plan(
            train_data=lambda split=split: DataLoader(Subset(ROWS, split.train), 8, shuffle=True),
            val_data=lambda split=split: DataLoader(Subset(ROWS, split.validation), 8),
        ).fit()
        same = [(a.train_edp, a.val_edp) for a in by_hand.run.idps]
        assert [(i.train_edp, i.val_edp) for i in run.idps] == same
        (stored,) = load_predictions(run.id)
        assert stored.split == "out-of-fold"
        assert list(map(int, stored.sample_ids)) == list(split.validation)
        assert list(map(int, stored.targets)) == Y[list(split.validation)].tolist()
        wanted = by_hand.model.predict(X[list(split.validation)]).classes
        assert list(map(int, stored.predicted)) == wanted.tolist()
        record = NNRun.load(run.id).provenance.manifest
        assert record.splits["fold"].value == split.digest()
    found = folds.out_of_fold()
    assert sorted(map(int, found.sample_ids)) == list(range(60))
    assert found.folds == tuple(np.repeat([0, 1, 2], [len(s.validation) for s in SPLITS]))


def test_folds_are_known_again_and_an_interrupted_one_goes_on(monkeypatch) -> None:
    first = plan().folds(ROWS, SPLITS)
    with pytest.raises(ValueError, match="fold 0, 1, 2 is not trained"):
        first.out_of_fold()
    plans = first.plans()
    from nnx.plans.continuing import train_or_continue

    train_or_continue(plans[1].with_epochs(3), "fold")
    assert first.missing() == (0, 2)
    runs = first.train()
    monkeypatch.setattr("nnx.plans.continuing.fit", lambda *a, **k: pytest.fail("it was trained"))
    again = plan().folds(ROWS, SPLITS).train()
    assert {fold: run.id for fold, run in again.items()} == {f: run.id for f, run in runs.items()}
    assert len(first.out_of_fold()) == 60


def test_loaders_of_ones_own_ids_and_regression() -> None:
    ids = [f"r{i}" for i in range(60)]
    splits = plan_folds(ids, k=2)
    target = X[:, :1] * 2
    rows = TensorDataset(X, target)

    def loaders(indices):
        return (
            DataLoader(Subset(rows, indices.train), 10, shuffle=True),
            DataLoader(Subset(rows, indices.validation), 10),
        )

    from made_plans import net

    base = plan(
        net=net(output_dim=1), model=NNModelParams(net=Nets.FEED_FWD, loss=Losses.MEAN_SQUARED_ERROR),
        train=training(metrics=[], monitor=None),
    )  # fmt: skip
    folds = base.folds(loaders, splits, ids=ids)
    folds.train()
    found = folds.out_of_fold()
    assert set(found.sample_ids) == set(ids)
    where = {sample: i for i, sample in enumerate(ids)}
    wanted = torch.stack([target[where[sample], 0] for sample in found.sample_ids])
    assert torch.allclose(torch.tensor(list(map(float, found.targets))), wanted)
    assert len(set(found.predicted)) > 10


@pytest.mark.parametrize(
    ("data", "splits", "options", "error", "message"),
    [
        (ROWS, (), {}, ValueError, "splits must be split manifests"),
        (ROWS, ("x",), {}, ValueError, "splits must be split manifests"),
        (3, SPLITS, {}, ValueError, "map-style dataset or a function"),
        (TensorDataset(X[:50]), SPLITS, {}, SplitError, "the source lacks 7 planned"),
        (lambda i: None, plan_folds(list("abcd"), k=2), {}, ValueError, "give the rows' ids="),
        (ROWS, SPLITS, {"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_what_cannot_be_folded_is_refused_before_anything_trains(
    data, splits, options, error, message
) -> None:
    with pytest.raises(error, match=message):
        plan().folds(data, splits, **options)


def test_only_last_and_best_weights_predict() -> None:
    with pytest.raises(ValueError, match='"last" or "best"'):
        plan().folds(ROWS, SPLITS).train(checkpoint="first")
    with pytest.raises(PlanError):
        plan(train=None).folds(ROWS, SPLITS).train()
