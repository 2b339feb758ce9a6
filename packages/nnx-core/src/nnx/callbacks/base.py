"""The hooks of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext as _CallbackContext
    from nnx.objectives import UpdateEvent
    from nnx.params import NNCheckpointTransform

HISTORY_ACCESS = ("window", "full")


class Callback:
    """Base class: override the hooks you need; each does nothing here.

    ``ctx`` carries ``model``, ``run``, ``optimizer`` (the first by name in a
    ``Trainer``), ``optimizers`` and ``trainer`` (``Trainer`` only), ``scheduler``,
    ``epoch``, ``idp``, ``idps`` and the writable ``should_stop``. To carry state
    across a resume, implement the component protocol of ``nnx.components``.

    ``history_access = "full"`` asks for every record of the run as ``ctx.idps``
    at ``on_epoch_end`` and ``on_train_end`` of a run with a history journal,
    which otherwise shows the last ones.
    """

    history_access: str = "window"
    # Where it runs in distributed training: "every" process, or the "writer" alone.
    # ``distributed = "all"`` or "writer" says the same. Undeclared, it is refused there.
    rank_behaviour: str | None = None

    def on_train_begin(self, ctx: _CallbackContext) -> None:
        """Before the first epoch, and before a resume restores component state."""

    def on_epoch_begin(self, ctx: _CallbackContext) -> None:
        """Before an epoch's first batch."""

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        """After validation and the epoch's scheduler step; ``ctx.idp`` is the epoch's record."""

    def on_train_end(self, ctx: _CallbackContext) -> None:
        """After the last epoch."""

    def on_optimizer_update(self, ctx: _CallbackContext, event: UpdateEvent) -> None:
        """After each committed optimizer update of an objective run, before its scheduler."""

    def on_scheduler_step(self, ctx: _CallbackContext, update_idx: int) -> None:
        """After the primary scheduler followed the ``update_idx``-th committed update (from 1)."""

    def checkpoint_transforms(self) -> tuple[NNCheckpointTransform, ...]:
        """What must be replayed on a fresh net before the final weights fit it."""
        return ()


class FunctionCallback(Callback):
    """A plain function of all records, called at the end of every epoch."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        self.function(ctx.idps)


def as_callback(callback: Any) -> Callback:
    """``callback`` itself, or a plain function of the records as a callback."""
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type):
        raise TypeError(
            f"callbacks takes instances: pass {callback.__name__}(), not the class itself"
        )
    if not callable(callback):
        raise TypeError(
            "a callback must be a Callback or a function of the records, not "
            f"{type(callback).__name__}"
        )
    return FunctionCallback(callback)


def overrides(callback: Any, hook: str) -> bool:
    """Whether ``callback`` does anything in ``hook``."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(Callback, hook)


def history_access_of(callback: Any) -> str:
    """``"window"`` or ``"full"``; refuses any other ``history_access``."""
    access = getattr(callback, "history_access", "window")
    if access not in HISTORY_ACCESS:
        raise ValueError(
            f"{type(callback).__name__}.history_access must be one of "
            f"{', '.join(HISTORY_ACCESS)}, not {access!r}"
        )
    return str(access)
