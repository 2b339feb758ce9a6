"""The report of one or more runs: a self-contained page, and the notebook chart."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"page": ["notebook_chart", "write_report"], "reading": ["RunView", "read_run"]},
)
