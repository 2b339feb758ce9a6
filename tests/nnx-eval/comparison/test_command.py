"""``nnx compare A B --metric``: the seeds of both configurations are found and paired."""

from __future__ import annotations

import json

from made_plans import net, plan
from nnx import NNRun
from nnx.cli.app import build
from typer.testing import CliRunner


def nnx(*arguments: str):
    return CliRunner().invoke(build(), list(arguments))


def test_the_seeds_of_two_configurations_are_paired() -> None:
    narrow = plan().replicates([1, 2, 3]).train()
    wide = plan(net=net(hidden_dims=[16])).replicates([2, 3, 4]).train()
    done = nnx("compare", narrow[1].id[:10], wide[4].id[:10], "--metric", "nll", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)

    def value(runs, seed):
        return NNRun.load(runs[seed].id).idps[-1].val_edp.metrics["nll"]

    assert {p["replicate"]: p["delta"] for p in found["pairs"]} == {
        f"seed={seed}": value(wide, seed) - value(narrow, seed) for seed in (2, 3)
    }
    assert [item[0] for item in found["unmatched_a"]] == ["seed=1"]
    assert [item[0] for item in found["unmatched_b"]] == ["seed=4"]
    assert set(found["tests"]) == {"paired t", "wilcoxon", "permutation"}
    assert found["configurations"] == 2

    shown = nnx("compare", narrow[1].id, wide[4].id, "--metric", "nll").output
    for part in ("nll (min), B - A, 2 pairs", "seed=4: on side B alone", "2 configurations"):
        assert part in shown
    refused = nnx("compare", narrow[1].id, narrow[2].id, "--metric", "nll")
    assert refused.exit_code == 1
    assert "one configuration" in refused.output


def test_without_a_metric_configurations_are_compared_as_before() -> None:
    runs = plan().replicates([1, 2]).train()
    done = nnx("compare", runs[1].id, runs[2].id)
    assert done.exit_code == 0
    assert "train.seed" in done.output
