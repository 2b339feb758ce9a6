"""The run ids of the original system, by the constructor and after a round trip."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import nnx
import pytest
from nnx.params import run_id, run_state

DATA = Path(__file__).parents[2] / "data"
ROWS = json.loads((DATA / "run_ids.json").read_text())
RUNS = [row for row in ROWS if "train" in row]


def build(expression: str):
    names = {
        name: getattr(nnx, name) for name in dir(nnx) if name[0].isupper() and name in expression
    }
    return eval(expression, {"__builtins__": {}}, names)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["name"])
def test_the_golden_state_and_id_are_reproduced(row):
    if "builder" in row["net"] + row["train"]:
        pytest.skip("needs a builder")
    net, model, train = build(row["net"]), build(row["model"]), build(row["train"])
    partial = {"model": model.state()}
    if net is not None:
        partial["net"] = net.state()
    partial["train"] = train.state()
    assert hashlib.md5(str(partial).encode()).hexdigest() == row["id"]
    assert run_state(net=net, model=model, train=train) == row["state"]
    salted = run_state(net=net, model=model, train=train, salt="replicate-2")
    assert salted["id"] == run_id(salted) == row["salted_id"]
