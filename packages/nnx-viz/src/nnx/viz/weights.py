"""How the weights of a model are distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.viz._common import PALETTE, require, subplots, unwrap

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import torch
    from torch import nn


def weight_histogram(
    model: nn.Module | Any,
    *,
    bins: int = 64,
    cols: int = 3,
    fig_width: int = 1000,
    row_height: int = 200,
) -> go.Figure:
    """One histogram per parameter tensor, in a grid.

    The values are binned here, so the figure holds ``bins`` numbers per tensor
    however large the model is. NaN and infinite entries are left out of the
    bars and counted in the title; empty tensors are skipped. Sizes are pixels.

    Raises ``ValueError`` when the model has no non-empty parameter, or when
    ``bins`` or ``cols`` is not a positive integer.
    """
    graph = require("plotly.graph_objects", "nnx.viz.weight_histogram")
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be an integer >= 1, not {bins!r}")
    named = [(n, p.detach()) for n, p in unwrap(model).named_parameters() if p.numel()]
    if not named:
        raise ValueError("the model has no parameters to draw")
    binned = [_bin(tensor, bins) for _, tensor in named]
    titles = [name + note for (name, _), (*_, note) in zip(named, binned)]
    figure, cols = subplots(titles, cols, cell=row_height, width=fig_width)
    traces = [
        graph.Histogram(
            x=centres,
            y=counts,
            histfunc="sum",
            xbins={"start": centres[0] - size / 2, "end": centres[-1] + size / 2, "size": size},
            autobinx=False,
            name=name,
            showlegend=False,
            marker_color=PALETTE[0],
        )
        for (name, _), (centres, counts, size, _) in zip(named, binned)
    ]
    places = [divmod(index, cols) for index in range(len(traces))]
    figure.add_traces(traces, rows=[r + 1 for r, _ in places], cols=[c + 1 for _, c in places])
    figure.update_layout(title="Weights")
    return figure


def _bin(tensor: torch.Tensor, bins: int) -> tuple[list[float], list[int], float, str]:
    """Bin centres, counts, bin width and what the title adds about non-finite entries."""
    import torch

    values = tensor.flatten().to(torch.float32)
    finite = values[torch.isfinite(values)]
    lost = values.numel() - finite.numel()
    note = f" ({lost:,} not finite)" if lost else ""
    if not finite.numel():
        return [0.0], [0], 1.0, note
    low, high = finite.min().item(), finite.max().item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite, bins=bins, min=low, max=high)
    size = (high - low) / bins
    centres = [float(f"{low + (i + 0.5) * size:.6g}") for i in range(bins)]
    return centres, counts.to(torch.int64).tolist(), size, note
