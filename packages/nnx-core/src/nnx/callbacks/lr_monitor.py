"""Remember the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnx.callbacks.base import Callback

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext as _CallbackContext


class LRMonitor(Callback):
    """The primary optimizer's learning rate, per epoch and per update.

    ``history`` has one rate per epoch. ``update_history`` has, for a scheduler on
    the update clock that NNx steps, one ``(update index from 1, rate after the
    scheduler's step)`` per committed update. Both go on over several fits. In a
    run with a history journal they keep the last ``retention`` entries, unless
    ``bounded=False``.
    """

    rank_behaviour = "every"

    def __init__(self, bounded: bool = True) -> None:
        self.bounded = bounded
        self.history: list[float] = []
        self.update_history: list[tuple[int, float]] = []

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        self.history.append(_rate(ctx))
        self._trim(self.history, ctx)

    def on_scheduler_step(self, ctx: _CallbackContext, update_idx: int) -> None:
        self.update_history.append((update_idx, _rate(ctx)))
        self._trim(self.update_history, ctx)

    def _trim(self, entries: list, ctx: _CallbackContext) -> None:
        if self.bounded and ctx.retention is not None:
            del entries[: -ctx.retention]


def _rate(ctx: _CallbackContext) -> float:
    return float(ctx.optimizer.param_groups[0]["lr"])
