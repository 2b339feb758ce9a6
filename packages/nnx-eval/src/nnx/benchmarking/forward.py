"""The latency of a network's forward, eager and compiled."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nnx.params import CompileSpec
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch.utils._pytree import tree_leaves, tree_map

Inputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """The first call, which may compile, and the latencies of the warm ones, in seconds.

    ``peak_memory_bytes`` is the most that CUDA held during the warm calls (``None``
    elsewhere), ``weights_digest`` the SHA-256 of the network's state.
    """

    label: str
    backend: str | None
    device: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    batch_size: int
    warmup: int
    repeats: int
    first_call_seconds: float
    latencies: tuple[float, ...]
    peak_memory_bytes: int | None
    weights_digest: str
    torch_version: str

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.latencies)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.latencies)

    @property
    def stdev_seconds(self) -> float:
        """The standard deviation; 0 of one call."""
        return statistics.stdev(self.latencies) if len(self.latencies) > 1 else 0.0

    @property
    def min_seconds(self) -> float:
        return min(self.latencies)

    @property
    def max_seconds(self) -> float:
        return max(self.latencies)

    @property
    def throughput(self) -> float:
        """Samples per second, at the mean latency."""
        return self.batch_size / self.mean_seconds

    def median_interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Two of the latencies between which the median is with ``level``, whatever their
        distribution; ``None`` when there are too few calls for that."""
        ordered, count = sorted(self.latencies), len(self.latencies)
        tail, below = (1 - level) / 2, 0.0
        for place in range(count // 2):  # the chance that the median is under ordered[place]
            below += math.comb(count, place) / 2**count
            if below > tail:
                return None if place == 0 else (ordered[place - 1], ordered[count - place])
        return (ordered[count // 2 - 1], ordered[count - count // 2]) if count > 1 else None

    def state(self) -> dict[str, Any]:
        """The fields and the statistics, as JSON-like values."""
        state = dataclasses.asdict(self)
        state["shapes"] = [list(shape) for shape in self.shapes]
        state |= {"dtypes": list(self.dtypes), "latencies": list(self.latencies)}
        names = ("mean", "median", "stdev", "min", "max")
        state |= {f"{name}_seconds": getattr(self, f"{name}_seconds") for name in names}
        return {**state, "throughput": self.throughput}


@dataclass(frozen=True, slots=True)
class CompileComparison:
    """The same weights and inputs, eager and compiled."""

    eager: BenchmarkReport
    compiled: BenchmarkReport
    max_abs_diff: float

    @property
    def speedup(self) -> float:
        """How many times shorter the compiled median is."""
        return self.eager.median_seconds / self.compiled.median_seconds

    def state(self) -> dict[str, Any]:
        return {
            "eager": self.eager.state(),
            "compiled": self.compiled.state(),
            "max_abs_diff": self.max_abs_diff,
            "speedup": self.speedup,
        }


def benchmark_forward(
    net: torch.nn.Module,
    inputs: Inputs,
    *,
    compile: CompileSpec | None = None,
    warmup: int = 3,
    repeats: int = 10,
    device: str | torch.device | None = None,
    label: str | None = None,
) -> BenchmarkReport:
    """Time ``repeats`` warm calls of ``net(*inputs)``, after the first and ``warmup`` untimed ones.

    ``inputs`` is a tensor, a tuple of positional or a mapping of keyword arguments. The
    device is synchronized around each timed call. Eval mode, no gradients; modes are given
    back. On another ``device`` than the network's, a copy of it is measured.
    """
    with prepared(net, inputs, device=device, compile=compile) as (call, moved, where):
        report, _ = _measure(
            call, moved, net, where, warmup=warmup, repeats=repeats, compile=compile, label=label
        )
    return report


def compare_compile(
    net: torch.nn.Module,
    inputs: Inputs,
    *,
    compile: CompileSpec | None = None,
    warmup: int = 3,
    repeats: int = 10,
    device: str | torch.device | None = None,
) -> CompileComparison:
    """Measure copies of ``net`` eager and compiled, and the greatest difference of their outputs."""
    spec = CompileSpec() if compile is None else compile
    results = []
    for chosen in (None, spec):
        twin = copy.deepcopy(net)
        with prepared(twin, inputs, device=device, compile=chosen) as (call, moved, where):
            results.append(
                _measure(call, moved, twin, where, warmup=warmup, repeats=repeats, compile=chosen)
            )
    (eager, left), (compiled, right) = results
    return CompileComparison(eager, compiled, _greatest_difference(left, right))


@contextmanager
def prepared(
    net: torch.nn.Module,
    inputs: Inputs,
    *,
    device: str | torch.device | None,
    compile: CompileSpec | None = None,
) -> Iterator[tuple[Callable[..., Any], Inputs, torch.device]]:
    """What to call, the inputs on its device, and that device; modes are given back."""
    if not isinstance(net, torch.nn.Module):
        raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
    if not isinstance(inputs, (torch.Tensor, tuple, Mapping)):
        raise TypeError(
            f"inputs must be a tensor, a tuple or a mapping, not {type(inputs).__name__}"
        )
    if compile is not None and not isinstance(compile, CompileSpec):
        raise TypeError(f"compile must be a CompileSpec or None, not {type(compile).__name__}")
    own = next((tensor.device for tensor in tree_leaves(net.state_dict())), torch.device("cpu"))
    where = own if device is None else torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"this machine has no device {str(where)!r}")
    same = where == own or (where.type == own.type and where.index is None)
    measured = net if same else copy.deepcopy(net).to(where)
    moved = tree_map(lambda v: v.to(where) if isinstance(v, torch.Tensor) else v, inputs)
    with eval_mode(measured), torch.no_grad():
        if compile is None:
            yield measured, moved, where
        else:
            from nnx.compilation.forward import CompiledForward

            with CompiledForward(measured, compile) as forward:
                yield forward, moved, where


def called(call: Callable[..., Any], inputs: Inputs) -> Any:
    """The output for inputs of any of the three kinds."""
    if isinstance(inputs, torch.Tensor):
        return call(inputs)
    return call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)


def synchronize(device: torch.device) -> None:
    """Wait for what the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of one call, the device synchronized before and after, and what it gave."""
    synchronize(device)
    start = time.perf_counter()
    output = call()
    synchronize(device)
    return time.perf_counter() - start, output


def _measure(
    call: Callable[..., Any],
    inputs: Inputs,
    net: torch.nn.Module,
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    compile: CompileSpec | None,
    label: str | None = None,
) -> tuple[BenchmarkReport, Any]:
    warmup = check.count("benchmark_forward", "warmup", warmup, at_least=0)
    repeats = check.count("benchmark_forward", "repeats", repeats)
    first, output = timed(lambda: called(call, inputs), device)
    for _ in range(warmup):
        called(call, inputs)
    synchronize(device)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    latencies = tuple(timed(lambda: called(call, inputs), device)[0] for _ in range(repeats))
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    backend = None if compile is None else compile.backend
    report = BenchmarkReport(
        label=label or ("eager" if backend is None else f"compiled ({backend})"),
        backend=backend,
        device=str(device),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        batch_size=next((len(tensor) for tensor in tensors if tensor.ndim), 1),
        warmup=warmup,
        repeats=repeats,
        first_call_seconds=first,
        latencies=latencies,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        weights_digest=_digest(net),
        torch_version=str(torch.__version__),
    )
    return report, output


def _digest(net: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        digest.update(f"{name}\0".encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}\0".encode())
            raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def _greatest_difference(left: Any, right: Any) -> float:
    pairs = zip(tree_leaves(left), tree_leaves(right))
    found = [
        float((a.double() - b.double()).abs().max())
        for a, b in pairs
        if isinstance(a, torch.Tensor) and a.numel()
    ]
    return max(found, default=0.0)
