"""What nnx-viz contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {
        "LRFinderResult": "nnx.lr_finder:LRFinderResult",
        "VisUtils": "nnx.vis_utils:VisUtils",
        "lr_finder": "nnx.lr_finder:lr_finder",
    }


@hookimpl
def nnx_renderers() -> Mapping[str, Any]:
    return {
        "run.html": "nnx.viz.report.page:notebook_chart",
        "run.page": "nnx.viz.report.page:write_report",
        "run.svg": "nnx.viz.report.image:training_svg",
    }


@hookimpl
def nnx_commands() -> Mapping[str, Any]:
    return {"report": "nnx.viz.commands:report", "watch": "nnx.viz.commands:watch"}
