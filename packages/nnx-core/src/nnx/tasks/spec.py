"""The declaration of a task; it lives with the other parameters."""

from __future__ import annotations

from nnx.params.task import TaskSpec as TaskSpec
