"""What a stored model costs: latency by batch size, memory, FLOPs, and each layer's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nnx.benchmarking.forward import (
    BenchmarkReport,
    benchmark_forward,
    called,
    prepared,
    synchronize,
)
from nnx.enums import Nets
from nnx.nn_model import NNModel
from nnx.params import CompileSpec
from nnx.store import NNCheckpoint
from nnx.store.pointer import locate_run
from nnx.utils import validation as check
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The median seconds of one module's forward, and its floating-point operations."""

    name: str
    kind: str
    seconds: float
    flops: int


@dataclass(frozen=True, slots=True)
class RunBenchmark:
    """The costs of a run's model; ``layers`` and ``flops`` are those of the largest batch.

    FLOPs are those of matrix products and convolutions, a multiply-add counting two.
    """

    run_id: str
    checkpoint: str
    n_parameters: int
    parameter_bytes: int
    eager: tuple[BenchmarkReport, ...]
    compiled: tuple[BenchmarkReport, ...]
    layers: tuple[LayerCost, ...]
    flops: int

    def state(self) -> dict[str, Any]:
        """Everything as JSON-like values."""
        return {
            "run_id": self.run_id,
            "checkpoint": self.checkpoint,
            "n_parameters": self.n_parameters,
            "parameter_bytes": self.parameter_bytes,
            "eager": [report.state() for report in self.eager],
            "compiled": [report.state() for report in self.compiled],
            "layers": [
                {"name": c.name, "kind": c.kind, "seconds": c.seconds, "flops": c.flops}
                for c in self.layers
            ],
            "flops": self.flops,
        }


def benchmark_run(
    run_id: str,
    *,
    checkpoint: str = "last",
    shape: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (1, 8, 64),
    compile: CompileSpec | None = None,
    warmup: int = 3,
    repeats: int = 20,
    root: str | None = None,
) -> RunBenchmark:
    """Measure the model of a stored checkpoint on made-up inputs.

    ``shape`` is that of one input, without the batch; a feed-forward net knows its own.
    With ``compile`` the same is measured compiled too. No run is written to.
    """
    sizes = tuple(check.count("benchmark_run", "batch_sizes", size) for size in batch_sizes)
    if not sizes:
        raise ValueError("batch_sizes must name one size or more")
    id = locate_run(run_id, root).id
    tag: Any = checkpoint  # or a stem of one's own
    stored = NNCheckpoint.load(id, tag, root)
    if stored is None:
        raise FileNotFoundError(f"run {id} has no checkpoint {checkpoint!r}")
    model = NNModel.from_checkpoint(stored)
    one = _input_shape(model, shape)
    batches = {size: torch.randn(size, *one, generator=_generator()) for size in sizes}

    def measured(spec: CompileSpec | None) -> tuple[BenchmarkReport, ...]:
        kind = "eager" if spec is None else "compiled"
        return tuple(
            benchmark_forward(
                model.net, batch, compile=spec, warmup=warmup, repeats=repeats,
                label=f"{kind}, batch {size}",
            )
            for size, batch in batches.items()
        )  # fmt: skip

    layers, flops = layer_costs(model.net, batches[max(sizes)], warmup=warmup, repeats=repeats)
    parameters = list(model.net.parameters())
    return RunBenchmark(
        run_id=id,
        checkpoint=checkpoint,
        n_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        eager=measured(None),
        compiled=() if compile is None else measured(compile),
        layers=layers,
        flops=flops,
    )


def layer_costs(
    net: torch.nn.Module, inputs: Any, *, warmup: int = 3, repeats: int = 20
) -> tuple[tuple[LayerCost, ...], int]:
    """The cost of each module without children, and the FLOPs of the whole forward.

    The device is synchronized around each module, so the sum is above the whole's latency.
    """
    with prepared(net, inputs, device=None) as (call, moved, device):
        counter = FlopCounterMode(display=False)
        with counter:
            called(call, moved)
        for _ in range(warmup):
            called(call, moved)
        leaves = {name: m for name, m in net.named_modules() if name and not any(m.children())}
        seconds: dict[str, list[float]] = {name: [] for name in leaves}
        with _clocks(leaves, seconds, device):
            for _ in range(repeats):
                called(call, moved)
    counts = counter.get_flop_counts()
    top = type(net).__name__
    costs = tuple(
        LayerCost(
            name,
            type(module).__name__,
            statistics.median(seconds[name]) if seconds[name] else 0.0,
            int(sum(counts.get(f"{top}.{name}", {}).values())),
        )
        for name, module in leaves.items()
    )
    return costs, int(counter.get_total_flops())


@contextmanager
def _clocks(
    leaves: dict[str, torch.nn.Module], seconds: dict[str, list[float]], device: torch.device
) -> Iterator[None]:
    """Time each module; its hooks are removed at the end, whatever happens."""
    handles, began = [], {}
    for name, module in leaves.items():

        def before(module: Any, inputs: Any, name: str = name) -> None:
            synchronize(device)
            began[name] = time.perf_counter()

        def after(module: Any, inputs: Any, output: Any, name: str = name) -> None:
            synchronize(device)
            seconds[name].append(time.perf_counter() - began[name])

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_shape(model: NNModel, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is not None:
        return tuple(check.count("benchmark_run", "shape", size) for size in shape)
    if model.params.net is Nets.FEED_FWD and model.net_params is not None:
        return (int(model.net_params.input_dim),)
    raise ValueError(
        "the model does not say what one input looks like; give shape=(...), without the batch"
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
