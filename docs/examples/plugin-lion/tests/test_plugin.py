"""What every NNx plugin promises, checked by NNx, and the parts in a real run."""

from __future__ import annotations

import numpy as np
from nnx import MetricSpec, NNRun
from nnx.plugins.testing import check_plugin, tiny_training

CONFIGS = {"acme.lion": {"betas": [0.9, 0.99]}}


def test_the_plugin_conforms(nnx_runs):
    report = check_plugin("acme-lion", prefix="acme.", configs=CONFIGS)
    assert report.problems == ()
    assert report.checked == (
        "exporter acme.npz",
        "metric acme.kappa@v1",
        "optimizer factory acme.lion@v1",
    )


def test_kappa_is_reported_and_the_export_holds_the_weights(nnx_runs):
    model, params = tiny_training(metrics=[MetricSpec("acme.kappa")])
    run = model.train(params)
    kappa = NNRun.load(run.id).idps[-1].val_edp.metrics["acme.kappa"]
    assert -1.0 <= kappa <= 1.0
    with np.load(model.export("weights.npz", "acme.npz", compressed=True)) as arrays:
        for name, tensor in model.net.state_dict().items():
            np.testing.assert_array_equal(arrays[name], tensor.numpy())
