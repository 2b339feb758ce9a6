"""How far probabilities can be trusted: reliability, and risk by coverage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from nnx.viz._common import PALETTE, require

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Bin(Protocol):
    """What of a reliability bin is drawn; ``nnx.calibration.ReliabilityBin`` is one."""

    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...
    @property
    def count(self) -> int: ...
    @property
    def confidence(self) -> float | None: ...
    @property
    def accuracy(self) -> float | None: ...


class Point(Protocol):
    """What of a risk-coverage point is drawn; ``nnx.abstention.CurvePoint`` is one."""

    @property
    def threshold(self) -> float | None: ...
    @property
    def coverage(self) -> float | None: ...
    @property
    def risk(self) -> float | None: ...


def reliability(bins: Mapping[str, Iterable[Bin]] | Iterable[Bin]) -> go.Figure:
    """Accuracy by confidence, a line for each named set of bins, and the diagonal.

    A marker's area is the share of the rows in its bin; empty bins have none.
    Give ``{"before": report.before.bins, "after": report.after.bins}``, or bins alone.
    """
    graph = require("plotly.graph_objects", "nnx.viz.reliability")
    named = bins if isinstance(bins, Mapping) else {"": bins}
    figure = graph.Figure()
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"dash": "dot", "color": "#7F7F7F"},
        name="as promised", hoverinfo="skip",
    )  # fmt: skip
    for (name, some), color in zip(named.items(), PALETTE * (1 + len(named) // len(PALETTE))):
        filled = [b for b in some if b.count]
        total = sum(b.count for b in filled)
        if not total:
            raise ValueError(f"the bins {name!r} hold no rows" if name else "the bins hold no rows")
        figure.add_scatter(
            x=[b.confidence for b in filled], y=[b.accuracy for b in filled], name=name,
            mode="lines+markers", line={"color": color}, showlegend=bool(name),
            marker={"size": [6 + 34 * (b.count / total) ** 0.5 for b in filled], "opacity": 0.7},
            customdata=[[b.lower, b.upper, b.count] for b in filled],
            hovertemplate=(
                "confidence %{x:.3f}, accuracy %{y:.3f}<br>bin %{customdata[0]:.2f} to "
                "%{customdata[1]:.2f}, %{customdata[2]} rows<extra></extra>"
            ),
        )  # fmt: skip
    figure.update_xaxes(title="mean confidence", range=[0, 1.02])
    figure.update_yaxes(title="accuracy", range=[-0.02, 1.02])
    return figure


def risk_coverage(
    points: Mapping[str, Iterable[Point]] | Iterable[Point], *, ceiling: float | None = None
) -> go.Figure:
    """Selective risk by coverage, a line for each named curve, and the ceiling that was asked.

    Points that accept nothing have no risk and are left out.
    """
    graph = require("plotly.graph_objects", "nnx.viz.risk_coverage")
    named = points if isinstance(points, Mapping) else {"": points}
    figure = graph.Figure()
    for (name, some), color in zip(named.items(), PALETTE * (1 + len(named) // len(PALETTE))):
        drawn = sorted((p for p in some if p.risk is not None), key=lambda p: p.coverage or 0.0)
        if not drawn:
            raise ValueError(f"the curve {name!r} accepts nothing anywhere")
        figure.add_scatter(
            x=[p.coverage for p in drawn], y=[p.risk for p in drawn], name=name, mode="lines",
            line={"color": color, "shape": "hv"}, showlegend=bool(name),
            customdata=[p.threshold for p in drawn],
            hovertemplate=(
                "coverage %{x:.3f}, risk %{y:.4f}<br>threshold %{customdata:.4f}<extra></extra>"
            ),
        )  # fmt: skip
    if ceiling is not None:
        figure.add_hline(y=ceiling, line={"dash": "dot", "color": "#7F7F7F"})
    figure.update_xaxes(title="coverage", range=[0, 1.02])
    figure.update_yaxes(title="selective risk", rangemode="tozero")
    return figure
