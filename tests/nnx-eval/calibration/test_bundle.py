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
from nnx.calibration import RowSet, fit_calibrator, fit_temperature, model_fingerprint
from nnx.conformal import fit_sets
from nnx.decisions import CostPolicy, TrustChain
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


def test_a_whole_chain_travels_in_a_bundle_and_serves_from_it(tmp_path) -> None:
    import json

    random = torch.Generator().manual_seed(1)
    X = torch.randn(320, 4, generator=random)
    y = (X[:, :3] + torch.randn(320, 3, generator=random)).argmax(1)
    model = NNModel(
        net_params=NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(
            net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(labels=LABELS)
        ),
    )
    run = model.train(
        NNTrainParams(
            n_epochs=2, seed=0, optim=NNOptimParams.builder().adam(max_lr=0.05).build(),
            train_loader=DataLoader(TensorDataset(X[:80], y[:80]), batch_size=16),
        )
    )  # fmt: skip
    id = model_fingerprint(model)
    parts = {"train": X[:80], "calibrator": X[80:160], "conformal": X[160:240], "test": X[240:]}
    calibrator = fit_temperature(
        model.predict_proba(parts["calibrator"]), y[80:160], model_id=id, split_id="cal"
    ).require()
    calibrated = calibrator.transform(model.predict_proba(parts["conformal"]), model_id=id)
    chain = TrustChain(
        id,
        calibrator,
        conformal=fit_sets(calibrated, y[160:240], alpha=0.2, split_id="conf"),
        costs=CostPolicy(
            actions=(*LABELS, "ask"),
            labels=LABELS,
            costs=np.vstack([1 - np.eye(3), np.full(3, 0.3)]),
            model_id=id,
            calibrator_id=calibrator.id,
        ),
        rows={name: RowSet.of(rows) for name, rows in parts.items()},
    )
    info = export_bundle(run.id, tmp_path / "bundle", calibrators=[chain])
    assert info.calibrators[0]["links"] == ["conformal", "costs"]
    assert info.calibrators[0]["kind"] == "temperature"

    arrived = reconstruct_bundle(tmp_path / "bundle")
    (served,) = arrived.calibrators
    assert isinstance(served, TrustChain)
    assert served.id == chain.id
    assert set(served.disjointness.values()) == {"verified"}
    logits = model.predict_proba(parts["test"])
    decision = served.decide(
        arrived.model.predict_proba(parts["test"]), model_id=model_fingerprint(arrived.model)
    )
    assert decision.actions.tolist() == chain.decide(logits, model_id=id).actions.tolist()
    assert decision.sets.sizes.tolist() == chain.decide(logits, model_id=id).sets.sizes.tolist()

    class Altered:
        def __init__(self, **changes):
            self.changes = changes

        def state(self):
            return {**json.loads(json.dumps(chain.state())), **self.changes}

    for changes, told in (
        ({"model_id": "sha256:" + "1" * 64}, "of different models"),
        ({"calibrator": None}, "the calibrator of .* is not the record of a calibrator"),
        ({"calibrator": chain.state()}, "the calibrator of .* is not the record of a calibrator"),
    ):
        with pytest.raises(BundleError, match=told):
            export_bundle(run.id, tmp_path / "no", calibrators=[Altered(**changes)])
        assert not (tmp_path / "no").exists()
    export_bundle(run.id, tmp_path / "odd", calibrators=[Altered(conformal={"format": "x"})])
    with pytest.raises(BundleError, match="calibrator-0.json is no calibrator: .*conformal"):
        reconstruct_bundle(tmp_path / "odd")
