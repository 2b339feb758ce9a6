"""What a benchmark times and what it leaves out, on nets that count their calls."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from made_plans import plan
from nnx import CompileSpec, benchmarking
from nnx.benchmarking import benchmark_forward, benchmark_run, compare_compile, profile_forward
from nnx.cli.app import build
from torch import nn
from typer.testing import CliRunner


class Slow(nn.Module):
    """Its first four calls (the first and three to warm up) take longest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls: list[bool] = []

    def forward(self, x):
        import time

        self.calls.append(self.training or torch.is_grad_enabled())
        time.sleep(0.05 if len(self.calls) <= 4 else 0.0)
        return self.linear(x)


def test_the_first_call_and_the_warm_up_are_not_in_the_latencies() -> None:
    net = Slow().train()
    report = benchmark_forward(net, torch.zeros(5, 3), warmup=3, repeats=7)
    assert report.first_call_seconds > 0.05
    assert len(report.latencies) == report.repeats == 7
    assert report.max_seconds < 0.05
    assert len(net.calls) == 11
    assert not any(net.calls)  # eval mode, no gradients
    assert net.training
    assert (report.shapes, report.dtypes, report.batch_size) == (((5, 3),), ("float32",), 5)
    assert (report.backend, report.device, report.peak_memory_bytes) == (None, "cpu", None)
    assert report.throughput == pytest.approx(5 / report.mean_seconds)
    assert report.min_seconds <= report.median_seconds <= report.max_seconds
    json.dumps(report.state(), allow_nan=False)


def test_inputs_may_be_positional_or_by_name() -> None:
    bilinear = nn.Bilinear(3, 4, 2)
    left, right = torch.zeros(2, 3), torch.zeros(2, 4)
    assert benchmark_forward(bilinear, (left, right), repeats=1).stdev_seconds == 0.0
    named = benchmark_forward(bilinear, {"input1": left, "input2": right}, repeats=1)
    assert named.shapes == ((2, 3), (2, 4))


def test_the_digest_is_that_of_the_weights() -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    digests = [
        benchmark_forward(net, torch.zeros(1, 3), repeats=1).weights_digest
        for net in (one, one, other)
    ]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == len(hashlib.sha256().hexdigest())


def test_the_interval_of_the_median_is_of_order_statistics() -> None:
    def report(latencies):
        base = benchmark_forward(nn.Identity(), torch.zeros(1), repeats=1, warmup=0)
        return type(base)(
            **{**{f: getattr(base, f) for f in base.__slots__}, "latencies": latencies}
        )

    ten = report(tuple(float(i) for i in range(1, 11)))
    assert ten.median_interval(0.95) == (2.0, 9.0)  # 97.9 %; the next pair has 89.1 %
    inside = sum(math.comb(10, i) for i in range(2, 9)) / 2**10
    assert 0.95 < inside < 0.99
    assert report((1.0, 2.0, 3.0)).median_interval(0.95) is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_eager_copies_have_the_same_weights(backend) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = list(net.state_dict())
    found = compare_compile(net, torch.randn(6, 3), compile=CompileSpec(backend=backend), repeats=3)
    assert found.eager.weights_digest == found.compiled.weights_digest
    assert (found.eager.backend, found.compiled.backend) == (None, backend)
    assert found.max_abs_diff < 1e-6
    assert found.speedup == pytest.approx(
        found.eager.median_seconds / found.compiled.median_seconds
    )
    assert list(net.state_dict()) == before
    json.dumps(found.state())


def test_a_profile_is_finite_and_leaves_traces_where_it_was_told(tmp_path) -> None:
    net = Slow()
    report = profile_forward(
        net, torch.zeros(2, 3), output_dir=tmp_path / "traces", active=2, repeat=2
    )
    assert report.steps == 8
    assert len(net.calls) == 9
    assert dict(report.schedule) == {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    assert len(report.trace_files) == 2
    assert all(json.loads(Path(path).read_text())["traceEvents"] for path in report.trace_files)
    assert "aten::" in report.table

    class Broken(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_forward(Broken(), torch.zeros(1), output_dir=tmp_path / "none")
    assert not os.path.exists(tmp_path / "none")
    assert profile_forward(net, torch.zeros(2, 3), output_dir=tmp_path / "again").trace_files


def test_a_run_is_measured_by_batch_size_and_by_layer() -> None:
    run = plan().fit().run
    before = sorted(os.listdir(f"runs/{run.id}"))
    found = benchmark_run(
        run.id, batch_sizes=(2, 16), repeats=3, compile=CompileSpec(backend="eager")
    )
    assert [report.batch_size for report in found.eager] == [2, 16]
    assert [report.batch_size for report in found.compiled] == [2, 16]
    assert found.n_parameters == 58
    assert found.parameter_bytes == 58 * 4
    linear = {cost.name: cost.flops for cost in found.layers if cost.kind == "Linear"}
    assert linear == {"layers.0": 2 * 16 * 4 * 8, "layers.1": 2 * 16 * 8 * 2}
    assert found.flops == sum(linear.values())
    assert all(cost.seconds > 0 for cost in found.layers if cost.kind == "Linear")
    assert sorted(os.listdir(f"runs/{run.id}")) == before
    json.dumps(found.state(), allow_nan=False)
    with pytest.raises(FileNotFoundError, match="no checkpoint 'q9'"):
        benchmark_run(run.id, checkpoint="q9")


def test_the_command_shows_the_costs_of_a_run() -> None:
    run = plan().fit().run
    command = ["bench", run.id[:8], "--batch", "1,4", "--repeats", "8"]
    done = CliRunner().invoke(build(), command)
    assert done.exit_code == 0, done.output
    for part in ("eager, batch 4", "layers.1", "58 parameters", "384 FLOPs"):
        assert part in done.output
    done = CliRunner().invoke(build(), [*command, "--json"])
    assert [
        r["batch_size"] for r in json.loads(done.output[done.output.index("{") :])["eager"]
    ] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"repeats": 0}, "repeats"), ({"warmup": -1}, "warmup"), ({"compile": "inductor"}, "CompileSpec"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments, error) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        benchmark_forward(nn.Identity(), torch.zeros(1), **arguments)
    with pytest.raises(TypeError, match="inputs must be"):
        benchmark_forward(nn.Identity(), [1])
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no device 'cuda'"):
            benchmark_forward(nn.Identity(), torch.zeros(1), device="cuda")
    assert benchmarking.benchmark_forward is benchmark_forward
