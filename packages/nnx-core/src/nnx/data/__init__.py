"""Data: dataset wrappers that publish loaders, split views, and fast batches in memory."""

from __future__ import annotations
