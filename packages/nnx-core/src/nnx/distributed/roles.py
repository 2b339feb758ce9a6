"""Which processes a callback runs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnx.callbacks import Callback
from nnx.distributed.process import rank_and_world

EVERY, WRITER = "every", "writer"


# What a callback's ``distributed`` may say, and the rank_behaviour that it means.
_DISTRIBUTED = {"all": EVERY, "writer": WRITER}


def behaviour_of(callback: Any) -> str | None:
    """Where a callback runs: its ``rank_behaviour``, or what its ``distributed`` means.

    ``None`` when it says neither, or something else.
    """
    declared = getattr(callback, "rank_behaviour", None)
    if declared is None:
        declared = _DISTRIBUTED.get(str(getattr(callback, "distributed", None)))
    return declared if declared in (EVERY, WRITER) else None


class _Elsewhere(Callback):
    """Stands in for a callback that only the writer builds."""

    rank_behaviour = EVERY


def writer_only(factory: Callable[[], Any], *, writer_rank: int = 0) -> Any:
    """The callback that ``factory()`` builds in the writer process, nothing elsewhere.

    For callbacks that talk to the outside (a logger, a notifier): the factory is
    called in the writer alone, and its callback may run there without declaring a
    ``rank_behaviour``. Without a process group, this process is the writer.
    """
    rank, _ = rank_and_world()
    if rank != writer_rank:
        return _Elsewhere()
    callback = factory()
    if behaviour_of(callback) is None:
        callback.rank_behaviour = WRITER
    return callback
