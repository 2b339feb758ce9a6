"""Two processes sample, train and validate as one that reads both of their batches."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("rank_worker.py")


def started(folder: Path, **environment: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(WORKER), "out.pt"], cwd=folder, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def test_two_processes_train_on_sampled_nodes_as_one(tmp_path):
    """A node's neighbours are drawn for the node, so they are the same in any process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": str(i), "LOCAL_RANK": str(i), **group} for i in range(2)]
    processes = [started(tmp_path / "one"), *(started(tmp_path / "two", **r) for r in ranks)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
    one, two = (torch.load(tmp_path / n / "out.pt", weights_only=True) for n in ("one", "two"))
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=0, atol=1e-6)
    assert two["val"] == pytest.approx(one["val"], abs=1e-6)
