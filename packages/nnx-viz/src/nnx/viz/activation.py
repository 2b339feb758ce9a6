"""What one layer computes for one input."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from nnx.utils.modules import module_paths
from nnx.viz._common import (
    borrowed,
    heatmap,
    inputs_of,
    output_of,
    require,
    subplots,
    to_device_of,
    unwrap,
)

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go
    import torch
    from torch import nn


def activation_map(
    model: nn.Module | Any,
    x: torch.Tensor,
    layer_name: str,
    *,
    max_channels: int = 16,
    cols: int = 4,
    fig_width: int = 900,
    cell_size: int = 180,
) -> go.Figure:
    """A heatmap of the output of ``layer_name`` for the input ``x``.

    ``x`` is what the model takes: a tensor, or, for an NNModel whose batch adapter
    says so, a tuple of positional or a mapping of keyword inputs. The output is
    what the layer computed, also where a later layer changes it in place.

    ``layer_name`` is a dotted name from ``named_modules()``; ``""`` is the
    model itself. An output of shape (N, C, H, W) gives one heatmap per channel
    of the first sample, at most ``max_channels``; (N, F) gives one heatmap of N
    rows; any other shape one row of the flattened values. Sizes are pixels.

    Raises ``ValueError`` for a name that is not a layer, and ``RuntimeError``
    when the forward pass does not reach the layer.
    """
    require("plotly.graph_objects", "nnx.viz.activation_map")
    if isinstance(max_channels, bool) or not isinstance(max_channels, int) or max_channels < 1:
        raise ValueError(f"max_channels must be an integer >= 1, not {max_channels!r}")
    net = unwrap(model)
    values = _capture(model, net, _layer(net, layer_name), layer_name, x)
    label = layer_name or type(net).__name__
    if values.ndim == 4:
        channels = values[0][:max_channels]
        figure, cols = subplots(
            [f"channel {i}" for i in range(len(channels))], cols, cell=cell_size, width=fig_width
        )
        for index, channel in enumerate(channels):
            figure.add_trace(
                heatmap(channel, coloraxis="coloraxis", colorscale=None),
                row=index // cols + 1,
                col=index % cols + 1,
            )
        figure.update_layout(coloraxis={"colorscale": "Viridis"})
        figure.update_yaxes(autorange="reversed", showticklabels=False)
        figure.update_xaxes(showticklabels=False)
        shown = f", {len(channels)} of {values.shape[1]} channels"
    else:
        rows = values if values.ndim == 2 else values.reshape(1, -1)
        figure, _ = subplots([""], 1, cell=max(cell_size, 2 * cell_size), width=fig_width)
        figure.add_trace(heatmap(rows), row=1, col=1)
        figure.update_yaxes(title="sample", autorange="reversed")
        figure.update_xaxes(title="feature")
        shown = ""
    figure.update_layout(title=f"Activations of {label}{shown}")
    return figure


def _layer(net: nn.Module, name: str) -> nn.Module:
    layers = dict(module_paths(net))
    if name not in layers:
        names = [n for n in layers if n]
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        raise ValueError(
            f"the model has no layer {name!r}{hint} Its first layers: {', '.join(names[:10])}"
        )
    return layers[name]


def _capture(model: Any, net: nn.Module, layer: nn.Module, name: str, x: Any) -> np.ndarray:
    import torch

    args, kwargs = inputs_of(model, net, x)
    captured: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if layer is net and not isinstance(first, torch.Tensor):
            first = output_of(model, net, output)
        if isinstance(first, torch.Tensor):
            # A copy: the next layer may work in place.
            captured.append(first.detach().to("cpu", torch.float32, copy=True))

    handle = layer.register_forward_hook(keep)
    try:
        with borrowed(net), torch.no_grad():
            net(*to_device_of(net, args), **to_device_of(net, kwargs))
    finally:
        handle.remove()
    if not captured:
        raise RuntimeError(
            f"the forward pass did not reach {name!r}, or it returned no tensor there"
        )
    return captured[-1].numpy()
