"""Two processes sample, train and validate as one that reads both of their batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("rank_worker.py")


def test_two_processes_train_on_sampled_nodes_as_one(tmp_path):
    """A node's neighbours are drawn for the node, so they are the same in any process."""
    found = {}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, *launcher, str(WORKER), "out.pt"], cwd=folder, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = torch.load(folder / "out.pt", weights_only=True)
    one, two = found["one"], found["two"]
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=0, atol=1e-6)
    assert two["val"] == pytest.approx(one["val"], abs=1e-6)
