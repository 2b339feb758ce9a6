"""Where the time of a forward goes, by ``torch.profiler``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from nnx.benchmarking.forward import Inputs, called, prepared, synchronize
from nnx.params import CompileSpec
from nnx.utils import validation as check


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """The traces that were written, and the operations that took most of the time."""

    output_dir: str
    trace_files: tuple[str, ...]
    schedule: Mapping[str, int]
    steps: int
    table: str


def profile_forward(
    net: torch.nn.Module,
    inputs: Inputs,
    *,
    output_dir: str | os.PathLike[str],
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
    compile: CompileSpec | None = None,
    device: str | torch.device | None = None,
    row_limit: int = 10,
) -> ProfileReport:
    """Profile ``repeat`` cycles of ``wait`` idle, ``warmup`` and ``active`` recorded calls.

    Each cycle's Chrome trace is written to ``output_dir``. The profiler is closed whatever
    happens, and it never runs inside a timed region.
    """
    owner = "profile_forward"
    schedule = {
        "wait": check.count(owner, "wait", wait, at_least=0),
        "warmup": check.count(owner, "warmup", warmup, at_least=0),
        "active": check.count(owner, "active", active),
        "repeat": check.count(owner, "repeat", repeat),
    }
    check.count(owner, "row_limit", row_limit)
    steps = (wait + warmup + active) * repeat
    folder = os.fspath(output_dir)
    written: list[str] = []

    def keep(profiler: Any) -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"trace-{len(written)}.json")
        profiler.export_chrome_trace(path)
        written.append(path)

    with prepared(net, inputs, device=device, compile=compile) as (call, moved, where):
        called(call, moved)  # a first call may compile
        synchronize(where)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if where.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(**schedule),
            on_trace_ready=keep,
        ) as profiler:
            for _ in range(steps):
                called(call, moved)
                synchronize(where)
                profiler.step()
        order = "self_cuda_time_total" if where.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=row_limit)
    return ProfileReport(folder, tuple(written), MappingProxyType(schedule), steps, table)
