"""What the pictures share: optional parts, borrowed models, drawable sizes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nnx.plugins.siblings import install_line

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go
    import torch
    from torch import nn

# Okabe & Ito: told apart with any kind of colour vision, on white and on black.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")

# A heatmap of more cells than this per side is averaged down before it is drawn.
MAX_CELLS = 256


def require(module: str, feature: str, *, extra: str | None = None) -> ModuleType:
    """Import an optional part, or refuse with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{feature} needs {module.partition('.')[0]}, which cannot be imported ({error}). "
            f"Install it with: {install_line('nnx-viz', extra)}"
        ) from error


def unwrap(model: Any) -> nn.Module:
    """The ``nn.Module`` of an ``NNModel``, or the module itself."""
    from torch import nn

    net = model if isinstance(model, nn.Module) else getattr(model, "net", None)
    if not isinstance(net, nn.Module):
        raise TypeError(f"expected a torch.nn.Module or an NNModel, not {type(model).__name__}")
    return net


def inputs_of(model: Any, net: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``net`` is called for the inputs ``x``: an NNModel's adapter says it."""
    from nnx.models import adapter_for

    if model is net:
        return (x,), {}
    adapter = adapter_for(net, getattr(model, "batch_adapter", None))
    if isinstance(x, (tuple, Mapping)) or not hasattr(x, "edge_index"):
        return adapter.inputs(x)
    args, kwargs, _ = adapter.split(x)  # a graph is a batch of its own
    return args, kwargs


def output_of(model: Any, net: nn.Module, raw: Any) -> Any:
    """The tensor in what ``net`` returned, as an NNModel's adapter reads it."""
    from nnx.models import adapter_for

    if model is net:
        return raw
    return adapter_for(net, getattr(model, "batch_adapter", None)).output(raw)


def to_device_of(net: nn.Module, value: Any) -> Any:
    """``value`` with copies of its tensors on the device of ``net``.

    Copies, since a network may change its input in place.
    """
    import torch

    first = next(itertools.chain(net.parameters(), net.buffers()), None)
    return _copy(value, None if first is None else first.device, torch.Tensor)


def _copy(value: Any, device: torch.device | None, tensor: type) -> Any:
    if isinstance(value, tensor):
        return value.detach().to(device or value.device, copy=True)  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: _copy(item, device, tensor) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copy(item, device, tensor) for item in value)
    return value.to(device) if hasattr(value, "edge_index") and device else value


@contextmanager
def borrowed(net: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule's mode and all random streams restored after."""
    from nnx.seeding import isolated_rng
    from nnx.utils.modes import eval_mode

    with isolated_rng(), eval_mode(net):
        yield


def heatmap(values: np.ndarray, *, signed: bool = False, **options: Any) -> go.Heatmap:
    """A heatmap of a 2-D array; ``signed`` centres the colours at zero."""
    graph = require("plotly.graph_objects", "a picture")
    colours = {"colorscale": "RdBu", "zmid": 0.0} if signed else {"colorscale": "Viridis"}
    return graph.Heatmap(z=shrink(values), **{**colours, **options})


def shrink(values: np.ndarray, limit: int = MAX_CELLS) -> np.ndarray:
    """Average neighbouring cells of a 2-D array until no side has over ``limit``."""
    import numpy as np

    for axis in (0, 1):
        size = values.shape[axis]
        if size > limit:
            edges = np.linspace(0, size, limit + 1).astype(int)
            sums = np.add.reduceat(values.astype(np.float64), edges[:-1], axis=axis)
            widths = np.diff(edges)
            values = sums / (widths[:, None] if axis == 0 else widths[None, :])
    return values.astype(np.float32)


def grid(count: int, cols: int) -> tuple[int, int]:
    """Rows and columns of a grid that holds ``count`` pictures."""
    if isinstance(cols, bool) or not isinstance(cols, int) or cols < 1:
        raise ValueError(f"cols must be an integer >= 1, not {cols!r}")
    cols = min(cols, count)
    return -(-count // cols), cols


def subplots(titles: Sequence[str], cols: int, *, cell: int, width: int) -> tuple[go.Figure, int]:
    """An empty figure with one subplot per title, and its number of columns."""
    plotly = require("plotly.subplots", "a picture")
    rows, cols = grid(len(titles), cols)
    # Room for a title above each row, whatever the number of rows.
    spacing = min(48 / (cell * rows), 1.0 / max(rows - 1, 1) * 0.5)
    figure = plotly.make_subplots(
        rows=rows, cols=cols, subplot_titles=list(titles), vertical_spacing=spacing
    )
    figure.update_annotations(font_size=11)
    figure.update_layout(
        template="plotly_white", width=width, height=cell * rows + 100, margin={"t": 80, "b": 40}
    )
    return figure, cols
