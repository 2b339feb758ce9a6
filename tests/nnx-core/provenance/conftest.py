"""The store's parts, shared."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[1] / "store" / "conftest.py"
_spec = importlib.util.spec_from_file_location("store_parts", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

parts, root, train = _module.parts, _module.root, _module.train
