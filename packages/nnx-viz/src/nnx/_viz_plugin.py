"""What nnx-viz contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping

from nnx.plugins.hookspecs import hookimpl


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {
        "LRFinderResult": "nnx.lr_finder:LRFinderResult",
        "VisUtils": "nnx.vis_utils:VisUtils",
        "lr_finder": "nnx.lr_finder:lr_finder",
    }
