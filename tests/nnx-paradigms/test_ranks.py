"""Several processes train as one on their joined batches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import rank_worker

WORKER = Path(__file__).with_name("rank_worker.py")
NAMES = ("simclr", "vicreg", "byol", "dino", "jepa", "moe")


@pytest.mark.parametrize("world", [2, 4] if os.environ.get("NNX_THOROUGH") == "1" else [4])
def test_the_number_of_processes_changes_nothing(world, tmp_path):
    """Negatives and balance are those of all processes' rows; some experts get no row."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        str(WORKER), ",".join(NAMES), str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((tmp_path / f"{world}-{r}.json").read_text()) for r in range(world)]
    for name in NAMES:
        alone = rank_worker.train(name, 1, tmp_path)
        for rank in ranks:
            assert rank[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert rank[name]["probed"] == pytest.approx(alone["probed"], rel=1e-3)
            assert rank[name]["averaged"] == pytest.approx(alone["averaged"], abs=1e-4)
            for weight, values in alone["weights"].items():
                assert rank[name]["weights"][weight] == pytest.approx(values, abs=1e-5), weight
