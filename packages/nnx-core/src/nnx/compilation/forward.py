"""A network's forward through ``torch.compile``, for the time of one fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nnx.compilation.record import CompileFailed, CompileRecord
from nnx.params.compilation import CompileSpec


class CompiledForward:
    """Calls ``net`` compiled; ``net`` itself is never touched and keeps its parameters.

    A compiled call that raises is tried again eagerly, from the RNG state and the
    buffers it started with. When that fails too, the error is the forward's own
    and propagates. Otherwise compilation failed: under ``on_failure="eager"`` the
    eager output is used and every later call is eager, under ``"error"``
    :class:`CompileFailed` is raised with RNG and buffers put back.

    Use it as a context manager: inside, hitting dynamo's recompile limit is an
    error, and the limit counts on top of what earlier fits of the same class hold.
    """

    def __init__(self, net: nn.Module, spec: CompileSpec) -> None:
        self._net = net
        self._spec = spec
        self._compiled: Any = torch.compile(net, **spec.options())
        self._fresh_graph = False
        self._config: AbstractContextManager[Any] | None = None
        self.epoch: int | None = None
        self.batch: int | None = None
        options = {key: value for key, value in spec.options().items() if key != "backend"}
        self.record = CompileRecord(
            spec.backend, options, spec.on_failure, torch_version=str(torch.__version__)
        )

    def __enter__(self) -> CompiledForward:
        self._config = torch._dynamo.config.patch(**_strict_config(self._net))
        self._config.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        config, self._config = self._config, None
        if config is not None:
            config.__exit__(None, None, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            return self._net(*args, **kwargs)
        before = _Snapshot(self._net)
        graphs, breaks = _graphs(), _graph_breaks()
        try:
            output = self._compiled(*args, **kwargs)
        except Exception as error:
            failure = error
        else:
            self._note(new_graphs=_graphs() - graphs, breaks=_graph_breaks() - breaks)
            return output
        return self._recover(failure, before, args, kwargs)

    def backward_failed(self, error: BaseException) -> None:
        """Record a backward pass that failed right after a new graph was compiled."""
        if self._fresh_graph:
            self._fresh_graph = False
            self._record_failure("failed", "backward", error)

    def _note(self, *, new_graphs: int, breaks: int) -> None:
        if torch.is_grad_enabled():
            self._fresh_graph = new_graphs > 0
        if self.record.effective == "pending":
            self.record = replace(
                self.record, effective="compiled", graph_breaks=breaks if new_graphs else None
            )

    def _recover(
        self, failure: Exception, before: _Snapshot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before.restore()
        try:
            output = self._net(*args, **kwargs)
        except Exception:
            before.restore()
            raise
        if self._spec.on_failure == "eager":
            self._compiled = None
            self._record_failure("eager", "forward", failure)
            return output
        before.restore()
        self._record_failure("failed", "forward", failure)
        raise CompileFailed(
            f"torch.compile(backend={self._spec.backend!r}) failed on {self._where()}: "
            f'{_summary(failure)}. The forward works eagerly: CompileSpec(on_failure="eager") '
            "goes on without the compiler.",
            self.record,
        ) from failure

    def _record_failure(self, effective: str, stage: str, error: BaseException) -> None:
        phase = "train" if stage == "backward" or torch.is_grad_enabled() else "validation"
        self.record = replace(
            self.record,
            effective=effective,
            restart={
                "stage": stage,
                "phase": phase,
                "epoch": self.epoch,
                "batch": self.batch if phase == "train" else None,
                "error": _summary(error),
            },
        )

    def _where(self) -> str:
        restart = self.record.restart or {}
        return f"{restart['phase']} epoch {restart['epoch']}, batch {restart['batch']}"


class _Snapshot:
    """The random streams and buffers that a forward may change."""

    def __init__(self, net: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
        self._cpu = torch.get_rng_state()
        self._cuda = {
            device: torch.cuda.get_rng_state(device)
            for device in {p.device for p in net.parameters() if p.is_cuda}
        }

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def _strict_config(net: nn.Module) -> dict[str, Any]:
    """Dynamo settings under which a fit gets its own recompile limit, as a hard one."""
    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    strict = {limit: getattr(config, limit) + _held_entries(net), "suppress_errors": False}
    if hasattr(config, "fail_on_recompile_limit_hit"):  # torch >= 2.6
        strict["fail_on_recompile_limit_hit"] = True
    return strict


def _held_entries(net: nn.Module) -> int:
    """The most compiled entries that earlier fits left on a forward of this net's classes."""
    entries = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    if entries is None:
        return 0
    codes = {getattr(type(module).forward, "__code__", None) for module in net.modules()}
    return max((len(entries(code)) for code in codes if code is not None), default=0)


def _graphs() -> int:
    return int(_counted("stats").get("unique_graphs", 0))


def _graph_breaks() -> int:
    return sum(_counted("graph_break").values())


def _counted(kind: str) -> Mapping[str, int]:
    """Dynamo's own count; nothing where a torch keeps none, and a capture is unknown then."""
    return getattr(torch._dynamo.utils, "counters", {}).get(kind, {})


def _summary(error: BaseException) -> str:
    """The error in one line; dynamo puts the cause on the second line of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])
