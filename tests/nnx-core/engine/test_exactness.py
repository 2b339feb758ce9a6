"""A split run, resumed in a new process, is the uninterrupted run bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Some two hundred runs, each with real commits: whole, split and resumed.
pytestmark = pytest.mark.slow
SOURCE = Path(__file__).with_name("exactness_cases.py")


def load_cases():
    spec = importlib.util.spec_from_file_location("exactness_cases", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # datasets and callbacks are looked up by module
    spec.loader.exec_module(module)
    return module


cases = load_cases()
CASES = {cases.name_of(case): case for case in cases.covering_cases()}


def in_a_new_process(jobs, folder):
    """Run ``{key: (case, arguments)}`` in one fresh interpreter; its results."""
    job_file, out = folder / "jobs.json", folder / "results.pt"
    job_file.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(SOURCE), str(job_file), str(out)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """Every case whole, split at every epoch boundary, and resumed elsewhere."""
    folder = tmp_path_factory.mktemp("exactness")
    before = os.getcwd()
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        whole, jobs = {}, {}
        for name, case in CASES.items():
            whole[name] = cases.run_case(case)
            trained = whole[name]["history"][-1]["epoch_idx"] + 1
            for boundary in range(trained - 1):
                arguments = {"stop_after": boundary}
                if case["facade"].startswith("trainer"):
                    arguments["n_epochs"] = boundary + 1
                first = cases.run_case(case, **arguments)
                rest = {"resume": first["id"]}
                if case["facade"].startswith("trainer"):
                    rest["n_epochs"] = cases.N_EPOCHS - boundary - 1
                jobs[f"{name}@{boundary}"] = (case, rest)
        resumed = in_a_new_process(jobs, folder)
    finally:
        os.chdir(before)
    return whole, resumed


def equal(left, right, path=""):
    """Bit-for-bit equality of nested data; the path of the first difference."""
    if isinstance(left, torch.Tensor):
        return None if torch.equal(left, right) else path
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{path} keys {left.keys() ^ right.keys()}"
        return next((d for k in left if (d := equal(left[k], right[k], f"{path}.{k}"))), None)
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{path} length {len(left)} != {len(right)}"
        pairs = enumerate(zip(left, right))
        return next((d for i, (a, b) in pairs if (d := equal(a, b, f"{path}[{i}]"))), None)
    return None if left == right or (left != left and right != right) else f"{path}: {left} {right}"


def test_the_matrix_holds_every_pair_of_choices():
    assert 40 <= len(CASES) <= 80
    for name, values in cases.DIMENSIONS.items():
        assert {case[name] for case in CASES.values()} == set(values)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(matrix, name):
    whole, resumed = matrix
    expected = whole[name]
    splits = [key for key in resumed if key.rpartition("@")[0] == name]
    assert splits or expected["history"][-1]["epoch_idx"] == 0
    for key in splits:
        boundary = int(key.rpartition("@")[2])
        got = resumed[key]
        for part in ("weights", "optimizers", "torch", "python", "numpy"):
            assert equal(expected[part], got[part], f"{key}.{part}") is None
        assert equal(expected["rates"][boundary + 1 :], got["rates"], f"{key}.rates") is None
        history = [row for row in expected["history"] if row["epoch_idx"] > boundary]
        rows = got["history"]
        if CASES[name]["facade"].startswith("trainer"):  # its step counter starts anew
            history = [{**row, "iter_idx": i} for i, row in enumerate(history)]
        assert equal(history, rows, f"{key}.history") is None
