"""A run for the eye: plain text, and HTML for a notebook."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from typing import Any, Protocol

from nnx.plugins import manager
from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.utils.tables import flatten_dict, print_table

RENDERER = "run.html"


class Shown(Protocol):
    """What is shown of an ``NNRun``."""

    @property
    def id(self) -> str: ...
    @property
    def idps(self) -> list[NNIterationDataPoint] | None: ...
    @property
    def history(self) -> str | None: ...
    @property
    def resume_status(self) -> ResumeStatus | None: ...
    def state(self) -> dict[str, Any]: ...


def summary(run: Shown) -> dict[str, Any]:
    """What there is to say of a run: its configuration and its last epoch."""
    rows: dict[str, Any] = _shown(run.state())
    idps = run.idps or []
    if idps:
        last = idps[-1]
        rows["epochs"] = last.epoch_idx + 1
        rows["records"] = f"{len(idps)} (the last ones)" if run.history else len(idps)
        rows["last"] = {
            "lr": last.lr,
            "train": _scores(last.monitored_train_edp()),
            **({} if last.val_edp is None else {"val": _scores(last.val_edp)}),
        }
    else:
        rows["epochs"] = 0
    if run.resume_status is not None and run.resume_status.mode != "fresh":
        rows["resumed from"] = f"{run.resume_status.source_run_id} ({run.resume_status.mode})"
    return rows


def as_text(run: Shown) -> str:
    """A two-column table."""
    out = io.StringIO()
    print_table(summary(run), header=False, title=f"Run {run.id}", file=out)
    return out.getvalue().rstrip("\n")


def as_html(run: Shown) -> str:
    """A table, and the chart of an installed renderer below it."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(str(key))}</th>"
        f"<td>{escape(f'{value:.6g}' if isinstance(value, float) else str(value))}</td></tr>"
        for key, value in flatten_dict(summary(run)).items()
    )
    return f"<table><caption>Run {escape(run.id)}</caption>{rows}</table>{_chart(run)}"


def _chart(run: Shown) -> str:
    renderers = manager.registry("renderer")
    if (RENDERER, 1) not in renderers:
        return ""
    try:
        return str(renderers.resolve(RENDERER)(run))
    except ImportError:  # the renderer's own optional library is not there
        return ""


def _shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with registered things by ``id@vN`` and modules by their class."""
    if state.get("kind") == "runtime":
        return {"kind": "runtime", "module": state["module"], "reconstructible": False}
    shown: dict[str, Any] = {}
    for key, value in state.items():
        if key == "factory" and isinstance(value, Mapping):
            shown.update(_registered(value))
        elif isinstance(value, Mapping) and value.get("kind") == "registered":
            shown[key] = {"kind": "registered", **_registered(value), "seed": value["seed"]}
        else:
            shown[key] = _shown(value) if isinstance(value, Mapping) else value
    return shown


def _registered(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"factory": f"{value['id']}@v{value['version']}", "config": value["config"]}


def _scores(record: Any) -> dict[str, float]:
    names = ("loss", "error", "accuracy", "f1")
    known = {n: getattr(record, n) for n in names if getattr(record, n) is not None}
    return {**known, **record.metrics}
