"""A trained run and its bundle."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from nnx.bundles import export_bundle

sys.path.insert(0, str(Path(__file__).parent))
from made_bundles import X, make_model, make_params, patience


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two epochs and its bundle, made once: ``(folder, run, outputs of X)``."""
    folder = tmp_path_factory.mktemp("trained")
    before = os.getcwd()
    os.chdir(folder)
    try:
        model = make_model()
        run = model.train(make_params(), callbacks=[patience()])
        export_bundle(run.id, "bundle")
        return folder, run, torch.from_numpy(model.predict(X).logits)
    finally:
        os.chdir(before)


@pytest.fixture
def bundle(trained, tmp_path):
    """A copy of the bundle, to change."""
    shutil.copytree(trained[0] / "bundle", tmp_path / "bundle")
    return tmp_path / "bundle"
