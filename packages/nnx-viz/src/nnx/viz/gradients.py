"""How gradients flow back through a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.viz._common import PALETTE, require, unwrap

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from torch import nn


def gradient_flow(model: nn.Module | Any) -> go.Figure:
    """A bar per trainable parameter: the L2 norm of its gradient.

    Call it after ``loss.backward()`` and before ``optimizer.zero_grad()``.
    Frozen parameters, and those that the backward pass did not reach, are left
    out. Raises ``ValueError`` when no parameter has a gradient.
    """
    graph = require("plotly.graph_objects", "nnx.viz.gradient_flow")
    norms = {
        name: float(p.grad.detach().float().norm())
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and p.grad is not None
    }
    if not norms:
        raise ValueError(
            "no trainable parameter has a gradient; call loss.backward() first "
            "(and look before optimizer.zero_grad())"
        )
    figure = graph.Figure(graph.Bar(x=list(norms), y=list(norms.values()), marker_color=PALETTE[0]))
    figure.update_layout(
        title="Gradient norms, first layer to last",
        template="plotly_white",
        yaxis_title="L2 norm of the gradient",
        xaxis_tickangle=-45,
    )
    return figure
