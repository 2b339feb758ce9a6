"""These tests describe an environment with nothing optional in it, so they need one."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("nnx._peft_plugin") else []
