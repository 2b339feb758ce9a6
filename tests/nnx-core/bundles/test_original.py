"""A bundle of the original NNx: opened, its outputs and its continuation reproduced."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_bundles import X, Y
from nnx import NNTrainParams
from nnx.bundles import inspect_bundle, reconstruct_bundle, validate_bundle
from torch.utils.data import DataLoader, TensorDataset

ORIGINAL = Path(__file__).parents[2] / "data" / "original-bundle"
VALUES = json.loads((ORIGINAL / "values.json").read_text())["bundle-resume"]


def test_it_is_read_and_checked():
    info = validate_bundle(ORIGINAL / "bundle-resume")
    assert info == inspect_bundle(ORIGINAL / "bundle-resume").__class__(
        **{**{f: getattr(info, f) for f in info.__slots__}, "verified": True}
    )
    assert (info.source_run_id, info.epoch, info.capability) == (VALUES["run"], 2, "resume")
    assert info.calibrators[0]["labels"] == ["a", "b", "c"]


def test_its_model_predicts_what_it_predicted():
    rebuilt = reconstruct_bundle(ORIGINAL / "bundle-resume")
    found = rebuilt.model.predict(X[:3]).logits.ravel()
    np.testing.assert_allclose(found, VALUES["predict"], atol=1e-6)


@pytest.mark.parametrize("lineage", [{}, {"resume_from_run_id": VALUES["run"]}])
def test_it_continues_as_it_would_have(lineage):
    data = TensorDataset(X, Y)
    params = NNTrainParams(
        n_epochs=2,
        seed=3,
        train_loader=DataLoader(data, batch_size=16, shuffle=True),
        val_loader=DataLoader(data, batch_size=16),
        **lineage,
    )
    rebuilt = reconstruct_bundle(ORIGINAL / "bundle-resume")
    run = rebuilt.resume(params)
    wanted = VALUES["after_two_more"]
    np.testing.assert_allclose([r.train_edp.loss for r in run.idps], wanted["loss"], atol=1e-6)
    weight = sum(float(p.detach().abs().sum()) for p in rebuilt.model.net.parameters())
    assert weight == pytest.approx(wanted["weight"], abs=1e-5)
    # The original recorded "last" as its parent; so does a request that names the run.
    assert (run.id == wanted["run"]) == bool(lineage)
    assert torch.isfinite(torch.tensor(run.idps[-1].val_edp.loss))
