"""A calibrator travels with its model, and serves where it arrives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nnx import (
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    TaskSpec,
)
from nnx.bundles import BundleError, export_bundle, reconstruct_bundle
from nnx.calibration import fit_calibrator, fit_temperature, model_fingerprint
from nnx.conformal import fit_sets
from nnx.decisions import TrustChain
from torch.utils.data import DataLoader, TensorDataset

LABELS = ("a", "b", "c")


@pytest.mark.parametrize("method", ["temperature", "vector", "isotonic"])
def test_a_bundle_brings_the_calibrator_that_its_chain_needs(tmp_path, method) -> None:
    random = torch.Generator().manual_seed(0)
    X = torch.randn(240, 4, generator=random)
    y = (X[:, :3] + torch.randn(240, 3, generator=random)).argmax(1)
    model = NNModel(
        net_params=NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(
            net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(labels=LABELS)
        ),
    )
    run = model.train(
        NNTrainParams(
            n_epochs=3, seed=0, optim=NNOptimParams.builder().adam(max_lr=0.05).build(),
            train_loader=DataLoader(TensorDataset(X[:80], y[:80]), batch_size=16),
        )
    )  # fmt: skip
    bound = {"model_id": model_fingerprint(model), "split_id": "cal"}
    calibrator = fit_calibrator(model.predict_proba(X[80:160]), y[80:160], method=method, **bound)
    prediction = calibrator.transform(model.predict_proba(X[160:]), model_id=bound["model_id"])
    sets = fit_sets(prediction, y[160:], alpha=0.2, split_id="conf")
    TrustChain(bound["model_id"], calibrator, conformal=sets).save(tmp_path / "chain.json")
    export_bundle(run.id, tmp_path / "bundle", calibrators=[calibrator])

    arrived = reconstruct_bundle(tmp_path / "bundle")
    assert arrived.calibrators == (calibrator,)
    chain = TrustChain.load(tmp_path / "chain.json")
    assert chain.calibrator == arrived.calibrators[0]
    found = chain.decide(
        arrived.model.predict_proba(X[160:]), model_id=model_fingerprint(arrived.model)
    )
    np.testing.assert_allclose(
        found.prediction.calibrated_probabilities, prediction.calibrated_probabilities, atol=1e-6
    )

    other = fit_temperature(
        model.predict_proba(X[80:160]), y[80:160], model_id="sha256:" + "0" * 64, split_id="cal"
    ).require()
    with pytest.raises(BundleError, match="fitted for the weights"):
        export_bundle(run.id, tmp_path / "no", calibrators=[other])
