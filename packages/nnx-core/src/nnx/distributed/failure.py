"""What ends a distributed fit in the processes where nothing went wrong."""

from __future__ import annotations

from nnx.errors import NNxError


class DistributedFailure(RuntimeError, NNxError):
    """Another process failed or was lost, so this one stopped too.

    The message names the ranks and what happened on each. A process that failed raises
    its own error instead.
    """
