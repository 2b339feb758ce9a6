"""For the authors of plugins: fixtures for pytest, and a check of what a plugin promises.

``check_plugin("acme-lion").check()`` raises one ``AssertionError`` that lists
every problem. In ``conftest.py``, ``from nnx.plugins.testing.fixtures import *``
brings the fixtures. Nothing here is imported by NNx itself.
"""

from __future__ import annotations

from nnx.plugins.testing.conformance import Report, check_plugin
from nnx.plugins.testing.problems import side_effects
from nnx.plugins.testing.training import tiny_training

__all__ = ["Report", "check_plugin", "side_effects", "tiny_training"]
