"""The one error that ends a distributed fit."""

from __future__ import annotations


class DistributedFailure(RuntimeError):
    """Some process failed or was lost, so every process stopped.

    The message names the ranks and what happened on each. On the process where it
    happened, ``__cause__`` is the original error.
    """
