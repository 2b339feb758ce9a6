"""One self-contained HTML file: what was run, how it went, and whether it can be trusted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnx.utils.caller import warn_caller
from nnx.utils.files import atomic_write
from nnx.viz._common import PALETTE, require
from nnx.viz.report import lineage
from nnx.viz.report.charts import charts_of, monitor_traces
from nnx.viz.report.reading import RunView, read_run, view_of
from nnx.viz.report.scores import SplitScores, matrix_chart, split_scores

if TYPE_CHECKING:
    from nnx.records import NNIterationDataPoint
    from nnx.store import NNRun


def write_report(
    run_ids: Sequence[str],
    path: str | os.PathLike[str] = "report.html",
    *,
    root: str | None = None,
    title: str | None = None,
) -> str:
    """Write the report of one or more runs to ``path`` (atomically) and return it.

    The file holds everything it shows, Plotly included, and asks the network
    for nothing. Runs are only read: no checkpoint is loaded, though each one's
    digests are verified.

    Raises ``ValueError`` for no run or a run named twice, and what
    ``NNRun.load`` raises for a run that is not there, before anything is
    written.
    """
    require("plotly.offline", "the run report")
    require("jinja2", "the run report")
    if not run_ids:
        raise ValueError("a report needs at least one run id")
    views = [read_run(run_id, root) for run_id in run_ids]
    if len({v.id for v in views}) != len(views):
        raise ValueError("a run is named twice; name each run of the report once")
    html = render(views, title)
    with atomic_write(path) as stream:
        stream.write(html)
    return os.fspath(path)


def render(views: Sequence[RunView], title: str | None = None) -> str:
    """The page of ``views`` as text."""
    offline = require("plotly.offline", "the run report")
    scores = _scores(views)
    charts: list[Mapping[str, Any]] = [
        {
            "id": c.id,
            "title": c.title,
            "caption": c.caption,
            "log": c.log,
            # The page takes positions from "meta", by its axis.
            "traces": [{k: v for k, v in t.items() if k != "x"} for t in c.traces],
        }
        for c in charts_of(views)
    ]
    matrices = [matrix_chart(s, f"matrix-{i}") for i, s in enumerate(scores) if s.drawable]
    return _template("report.html.j2").render(
        title=title or _title(views),
        views=views,
        colours=[PALETTE[i % len(PALETTE)] for i in range(len(views))],
        config=_compared([v.config for v in views]),
        environment=_compared([_environment(v) for v in views]),
        charts=charts,
        matrices=matrices,
        scores=scores,
        headlines=[_headline(v) for v in views],
        lineages=[(v, lineage.as_svg(v)) for v in views],
        data=_script_json({"charts": charts, "matrices": matrices}),
        plotly=offline.get_plotlyjs(),
    )


def notebook_chart(run: NNRun) -> str:
    """The chart of one run for a notebook: an HTML fragment.

    Draws the whole-epoch losses, the declared monitor and its improving epochs
    from the run's records in memory, or a journal's per-epoch rows.
    """
    graph = require("plotly.graph_objects", "the notebook chart")
    view = view_of(run, epoch_rows(run))
    monitor = monitor_traces(view, 0)
    charts = charts_of([view])
    if not charts:
        return f"<p>Run {run.id} has no recorded epoch.</p>"
    loss = charts[0]
    traces = [t for t in loss.traces if not (monitor and t["name"].endswith("wrote BEST"))]
    for trace in (traces := [*traces, *monitor]):
        trace["name"] = trace["name"].removeprefix(f"{view.short} ")
    figure = graph.Figure(traces)
    figure.update_layout(
        title=f"Run {run.id}",
        template="plotly_white",
        height=380,
        xaxis_title="epochs completed",
        yaxis={"title": "loss", "type": "log" if loss.log else "linear"},
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=True))


def epoch_rows(run: NNRun) -> list[NNIterationDataPoint]:
    """The run's records, or the last one of each epoch of a journal, without its chunks."""
    if not run.history:
        return list(run.idps or [])
    from nnx.history.reading import HistoryCorruptionError, Journal
    from nnx.records import NNIterationDataPoint

    try:
        rows = Journal.open(run.history).epochs(run.idps[-1].epoch_idx if run.idps else -1)
        return [NNIterationDataPoint.from_state(row["last"]) for row in rows]
    except (HistoryCorruptionError, KeyError, TypeError) as error:
        shown = list(run.idps or [])
        warn_caller(
            f"the chart of run {run.id} shows its last {len(shown)} records: {error}",
            RuntimeWarning,
        )
        return shown


def _title(views: Sequence[RunView]) -> str:
    return f"Run {views[0].short}" if len(views) == 1 else f"{len(views)} runs compared"


def _headline(view: RunView) -> dict[str, str]:
    last = view.epochs[-1] if view.epochs else None
    best = max(view.improved, default=None)
    planned = (view.run.trainer or view.run.train).n_epochs
    facts = {
        "epochs": f"{len(view.epochs)} recorded, {planned} asked for",
        "steps": f"{view.total_steps:,}",
        "best epoch": "none" if best is None else str(best),
        "last written": view.modified or "unknown",
    }
    if last is not None and last.val_edp is not None:
        for name in ("loss", "accuracy"):
            value = getattr(last.val_edp, name)
            if value is not None:
                facts[f"validation {name}"] = f"{value:.4g}"
    return facts


def _environment(view: RunView) -> dict[str, Any]:
    from nnx.utils.tables import flatten_dict

    rows = flatten_dict(dict(view.metadata))
    record = view.run.provenance
    if record is None:
        rows["provenance"] = "not recorded"
    else:
        rows["provenance.fingerprint"] = getattr(record, "fingerprint", None)
        attempt = getattr(record, "attempt", None)
        if attempt is not None:
            rows["provenance.attempt"] = attempt.attempt_id
            rows["provenance.status"] = attempt.status
    return rows


def _compared(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per key: the value in each column, and whether they differ."""
    keys = dict.fromkeys(k for column in columns for k in column)
    rows = []
    for key in keys:
        values = ["—" if key not in c else str(c[key]) for c in columns]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows


def _scores(views: Sequence[RunView]) -> list[SplitScores]:
    found = (split_scores(v.short, p) for v in views for p in v.predictions)
    return [s for s in found if s is not None]


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _template(name: str) -> Any:
    jinja2 = require("jinja2", "the run report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nnx.viz.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name)
