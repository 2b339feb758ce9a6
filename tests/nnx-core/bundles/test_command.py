"""``nnx bundle`` as a person runs it."""

from __future__ import annotations

import json
import os

import pytest
from nnx.cli.app import build
from typer.testing import CliRunner


@pytest.fixture
def nnx(monkeypatch):
    monkeypatch.setenv("NNX_RUNS", "")

    def nnx(*arguments):
        os.environ["NNX_RUNS"] = ""
        done = CliRunner().invoke(build(), arguments)
        return done.exit_code, done.stdout, done.stderr

    return nnx


def test_export_inspect_validate_diff(nnx, trained):
    folder, run, _ = trained
    runs = str(folder / "runs")
    code, out, _ = nnx("bundle", "export", run.id[:8], "b", "--runs", runs)
    assert (code, "a resume bundle of run" in out) == (0, True)
    code, out, _ = nnx("bundle", "inspect", "b")
    assert (code, f"run         {run.id}" in out, "every byte" in out) == (0, True, False)
    code, out, _ = nnx("bundle", "validate", "b", "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    nnx("bundle", "export", run.id, "c", "--runs", runs, "--checkpoint", "first")
    assert nnx("bundle", "diff", "b", "b")[0:2] == (
        0, "equal: weights, training state and records\n",
    )  # fmt: skip
    code, out, _ = nnx("bundle", "diff", "b", "c")
    assert (code, "epoch: 1 | 0" in out) == (1, True)


def test_a_refusal_is_one_line(nnx):
    code, _, err = nnx("bundle", "inspect", "nowhere")
    assert (code, err) == (1, "nnx: there is no bundle at nowhere\n")


def test_resume_by_a_function_of_ones_own(nnx, bundle):
    with open("mine.py", "w") as stream:
        stream.write(
            f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
            "from made_bundles import make_params, patience\n"
            "def params(info):\n"
            "    return make_params(1), {'callbacks': [patience()]}\n"
        )
    code, out, err = nnx("bundle", "resume", str(bundle), "mine.py:params", "--quiet")
    assert code == 0, err
    assert "Run saved to runs/" in out
    assert nnx("bundle", "resume", str(bundle), "mine.py")[0] == 2
    assert "has no function" in nnx("bundle", "resume", str(bundle), "mine.py:other")[2]
