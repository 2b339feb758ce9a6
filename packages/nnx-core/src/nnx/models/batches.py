"""Batch adapters: how a module sees a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class BatchAdapter:
    """How a module sees a batch. Subclass it for a layout that is not here.

    Runtime only: an adapter is never stored and never part of a run id.
    """

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``(args, kwargs, target)`` of one batch: ``module(*args, **kwargs)``.

        ``target`` is ``None`` for a batch that has none.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement split(batch)")

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of inputs given without a target, as to ``predict``."""
        if isinstance(X, Mapping):
            return (), dict(X)
        return (tuple(X), {}) if isinstance(X, (tuple, list)) else ((X,), {})

    def output(self, raw: Any) -> torch.Tensor:
        """The tensor in what the module returned. The default takes a tensor only."""
        if isinstance(raw, torch.Tensor):
            return raw
        raise ValueError(
            f"the module returned {type(raw).__name__}, not a tensor; pass a batch_adapter "
            f"whose output(raw) extracts one, for example raw.logits"
        )


class PositionalInputs(BatchAdapter):
    """``(x1, ..., xn, y)`` batches: ``module(x1, ..., xn)``; without ``y`` to predict."""

    def __init__(self, n_inputs: int = 1) -> None:
        if isinstance(n_inputs, bool) or not isinstance(n_inputs, int) or n_inputs < 1:
            raise ValueError(f"PositionalInputs.n_inputs must be an integer >= 1, not {n_inputs!r}")
        self.n_inputs = n_inputs

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        n = self.n_inputs
        if n == 1 and isinstance(batch, torch.Tensor):
            return (batch,), {}, None
        if not isinstance(batch, (tuple, list)) or len(batch) not in (n, n + 1):
            raise ValueError(
                f"{self!r} expects a batch of {n} input(s) and a target, got {_layout(batch)}; "
                f"pass a batch_adapter that fits the loader"
            )
        return tuple(batch[:n]), {}, batch[n] if len(batch) > n else None

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().inputs(X)
        if kwargs or len(args) != self.n_inputs:
            raise ValueError(f"{self!r} expects {self.n_inputs} input(s), got {_layout(X)}")
        return args, kwargs

    def __repr__(self) -> str:
        return f"PositionalInputs({self.n_inputs})"


class KeywordInputs(BatchAdapter):
    """Mapping batches: ``module(**{name: batch[name] for name in inputs})``.

    ``target`` is the entry to learn; a batch without it (or ``target=None``) is
    one to predict. Other entries of the batch are ignored.
    """

    def __init__(self, inputs: Sequence[str], target: str | None = "labels") -> None:
        names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"KeywordInputs.inputs must name at least one entry, got {inputs!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"KeywordInputs.inputs repeats a name: {list(names)}")
        if target is not None and (not isinstance(target, str) or target in names):
            raise ValueError(
                f"KeywordInputs.target must be a string that is not an input, not {target!r}"
            )
        self.names = names
        self.target = target

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        _, kwargs = self.inputs(batch)
        return (), kwargs, batch.get(self.target)

    def inputs(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(X, Mapping):
            raise ValueError(f"{self!r} expects a mapping, got {_layout(X)}")
        missing = [name for name in self.names if name not in X]
        if missing:
            raise ValueError(f"the batch lacks the input(s) {missing}: {_layout(X)}")
        return (), {name: X[name] for name in self.names}

    def __repr__(self) -> str:
        return f"KeywordInputs({list(self.names)}, target={self.target!r})"


class ModuleInputs(BatchAdapter):
    """The layout that a module declares itself: ``unpack_batch(batch) -> (X, target)``."""

    def __init__(self, module: nn.Module) -> None:
        self._unpack = module.unpack_batch

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        X, target = self._unpack(batch)  # type: ignore[operator]
        return (*self.inputs(X), target)


def adapter_for(module: nn.Module, batch_adapter: BatchAdapter | None = None) -> BatchAdapter:
    """The adapter in force: the given one, the module's own layout, or one input."""
    if batch_adapter is not None:
        if not isinstance(batch_adapter, BatchAdapter):
            raise TypeError(
                f"batch_adapter must be a nnx.models.BatchAdapter, "
                f"not {type(batch_adapter).__name__}"
            )
        return batch_adapter
    return ModuleInputs(module) if _declares_layout(module) else _ONE_INPUT


def _declares_layout(module: nn.Module) -> bool:
    kind = type(module)
    if hasattr(kind, "unpack_batch") or "unpack_batch" in vars(module):
        return True
    # A wrapper may forward attributes. For a plain module, hasattr() would raise and
    # format an error on every batch.
    return kind.__getattr__ is not nn.Module.__getattr__ and hasattr(module, "unpack_batch")


_ONE_INPUT = PositionalInputs()


def _layout(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with {sorted(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return type(batch).__name__
