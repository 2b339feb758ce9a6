from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
sys.path.insert(0, str(WORKER.parent))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment():
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "NNX_TQDM_DISABLE": "1",
        "NNX_RUNS": "",
    }


def torchrun(
    folder, scenario, world, args=None, *, extra=(), check=True, timeout=150, worker=WORKER
):
    """Run a scenario in ``world`` processes; what each rank found, by rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
        *(extra or ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))),
        str(worker), scenario, str(folder), json.dumps(args or {}),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    if check and done.returncode:
        pytest.fail(f"torchrun failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return results(folder, scenario, world)


def results(folder, scenario, world):
    paths = [Path(folder) / f"{scenario}-{world}-{rank}.json" for rank in range(world)]
    return [json.loads(p.read_text()) if p.exists() else None for p in paths]


TOLERANCE = 1e-5  # relative, of losses and weights: what docs/distributed.md promises


def close(one, two, tolerance=TOLERANCE):
    """Assert that two results are equal, their numbers within a tolerance."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            close(one[key], two[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(two)
        for a, b in zip(one, two):
            close(a, b, tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(two, rel=tolerance, abs=tolerance)
    else:
        assert one == two
