"""The charts of a report, as plain Plotly JSON that the page can re-colour and re-scale.

Each trace carries its positions twice, per optimizer step and per epoch; the
page switches between them. Colours come from the page, so that dark and light
agree with it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nnx.viz._common import PALETTE
from nnx.viz.report.reading import RunView

Value = Callable[[Any], "float | None"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: an element id, a caption that says what it shows, and its traces."""

    id: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    log: bool = False


def charts_of(views: Sequence[RunView]) -> list[Chart]:
    """Loss, error, scores, declared metrics and learning rate, where there are values."""
    charts = [_loss(views), _monitor(views)]
    for name in ("error", "accuracy", "f1", "precision", "recall"):
        charts.append(_epochs(views, name, name.capitalize(), operator.attrgetter(name)))
    for name in _metric_names(views):
        charts.append(_epochs(views, f"metric-{name}", name, functools.partial(_named, name=name)))
    charts.append(_learning_rate(views))
    return [c for c in charts if any(t["y"] for t in c.traces)]


def _loss(views: Sequence[RunView]) -> Chart:
    traces = []
    for index, view in enumerate(views):
        traces.append(
            _trace(view, index, "training, per step", view.steps,
                   lambda r: r.train_edp.loss, width=1, faint=True)
        )  # fmt: skip
        traces.append(
            _trace(view, index, "training, whole epoch", view.epochs,
                   lambda r: r.train_summary.loss if r.train_summary else None, dash="dot")
        )  # fmt: skip
        traces.append(
            _trace(view, index, "validation", view.epochs,
                   lambda r: r.val_edp.loss if r.val_edp else None, markers=True)
        )  # fmt: skip
        traces.append(_improvements(view, index))
    return Chart("loss", "Loss", "Lower is better. Stars mark epochs that wrote BEST.",
                 [t for t in traces if t["y"]], log=_spans_decades(traces))  # fmt: skip


def _monitor(views: Sequence[RunView]) -> Chart:
    """The value that decides BEST, for the runs that declare a monitor."""
    traces = []
    for index, view in enumerate(views):
        traces += monitor_traces(view, index)
    return Chart("monitor", "Monitor", "What decides BEST; stars mark the epochs that improved.",
                 [t for t in traces if t["y"]])  # fmt: skip


def monitor_traces(view: RunView, index: int) -> list[dict[str, Any]]:
    """The monitor's series and a star at each improving epoch; empty without a monitor."""
    keys = {r.selection.monitor.key for r in view.epochs if r.selection is not None}
    if not keys:
        return []
    series = _trace(
        view, index, f"monitor {keys.pop()}", view.epochs,
        lambda r: r.selection.value if r.selection else None, dash="dash", markers=True,
    )  # fmt: skip
    return [series, _stars(view, index, lambda r: r.selection.value if r.selection else None)]


def _improvements(view: RunView, index: int) -> dict[str, Any]:
    """Stars where BEST was written, on the curve that has a value there."""

    def height(record: Any) -> float | None:
        for edp in (record.val_edp, record.train_summary, record.train_edp):
            if edp is not None and edp.loss is not None:
                return float(edp.loss)
        return None

    return _stars(view, index, height)


def _stars(view: RunView, index: int, height: Value) -> dict[str, Any]:
    def improved(record: Any) -> float | None:
        return height(record) if record.epoch_idx in view.improved else None

    trace = _trace(view, index, "wrote BEST", view.epochs, improved)
    trace["mode"] = "markers"
    trace["marker"] = {"symbol": "star", "size": 11, "color": PALETTE[index % len(PALETTE)],
                       "line": {"width": 1, "color": "#ffffff"}}  # fmt: skip
    return trace


def _epochs(views: Sequence[RunView], id: str, title: str, value: Value) -> Chart:
    traces = []
    for index, view in enumerate(views):
        traces.append(
            _trace(view, index, "training, whole epoch", view.epochs,
                   lambda r: value(r.train_summary) if r.train_summary else None, dash="dot")
        )  # fmt: skip
        traces.append(
            _trace(view, index, "validation", view.epochs,
                   lambda r: value(r.val_edp) if r.val_edp else None, markers=True)
        )  # fmt: skip
    return Chart(_slug(id), title, f"{title} at each epoch's end.", [t for t in traces if t["y"]])


def _learning_rate(views: Sequence[RunView]) -> Chart:
    traces = [
        _trace(view, index, "learning rate", view.steps, lambda r: r.lr, shape="hv")
        for index, view in enumerate(views)
    ]
    return Chart("lr", "Learning rate", "Of the (first) optimizer, at each recorded step.", traces,
                 log=_spans_decades(traces))  # fmt: skip


def _trace(
    view: RunView,
    index: int,
    name: str,
    records: Iterable[Any],
    value: Value,
    *,
    width: int = 2,
    dash: str = "solid",
    faint: bool = False,
    markers: bool = False,
    shape: str = "linear",
) -> dict[str, Any]:
    by_step, by_epoch, ys = [], [], []
    for record in records:
        y = value(record)
        if y is None or not math.isfinite(y):
            continue
        by_step.append(record.iter_idx + 1)
        by_epoch.append(round(view.epoch_position(record), 6))
        ys.append(float(f"{y:.7g}"))
    mode = "lines+markers" if markers or len(ys) == 1 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": f"{view.short} {name}",
        "legendgroup": view.short,
        "x": by_epoch,
        "y": ys,
        "opacity": 0.35 if faint else 1.0,
        "line": {"color": PALETTE[index % len(PALETTE)], "width": width, "dash": dash,
                 "shape": shape},
        "marker": {"size": 6, "color": PALETTE[index % len(PALETTE)]},
        "meta": {"step": by_step, "epoch": by_epoch},
    }  # fmt: skip


def _metric_names(views: Sequence[RunView]) -> list[str]:
    names: dict[str, None] = {}
    for view in views:
        for record in view.epochs:
            for edp in (record.val_edp, record.train_summary):
                if edp is not None:
                    names.update(dict.fromkeys([*edp.metrics, *edp.extra]))
    return list(names)


def _named(edp: Any, name: str) -> float | None:
    value = edp.metrics.get(name, edp.extra.get(name))
    return None if value is None else float(value)


def _spans_decades(traces: Iterable[dict[str, Any]]) -> bool:
    values = [y for t in traces for y in t["y"]]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())
