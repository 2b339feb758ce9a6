"""The hooks of a fit's callbacks and the listeners to its updates, called in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nnx.callbacks.base import overrides
from nnx.engine.contexts import takes_an_argument
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext
    from nnx.objectives import UpdateEvent
    from nnx.store.writer import RunWriter


class Hooks:
    """The callbacks in progress. ``journal`` is the writer of a run that bounds its records."""

    def __init__(self, callbacks: Sequence[Any], ctx: CallbackContext) -> None:
        self.callbacks = callbacks
        self.ctx = ctx
        self.journal: RunWriter | None = None
        self._begun: list[Any] = []
        self._everything: Any = None  # the whole history, while a round of hooks reads it
        self._bound: tuple[Callable[..., Any], ...] = ()
        self._listeners: list[Callable[[], Any]] = []
        self._update_hooks: list[Any] = []
        self._schedule_hooks: list[Any] = []

    def any_override(self, hook: str) -> bool:
        """Whether a callback does anything in ``hook``."""
        return any(overrides(callback, hook) for callback in self.callbacks)

    def begin(self) -> None:
        """Run every ``on_train_begin`` and take up what the callbacks registered."""
        for callback in self.callbacks:
            self._begun.append(callback)
            self._call(callback, "on_train_begin")
        if self.ctx.update_listeners and self.ctx.trainer is not None:
            raise ValueError(
                "a callback registered an update listener, which only NNModel.train calls; "
                "use on_optimizer_update in Trainer.train(objective=...)"
            )
        self._bind_listeners()
        for callback in self.callbacks:
            if overrides(callback, "on_optimizer_update"):
                self._update_hooks.append(callback)
            if overrides(callback, "on_scheduler_step"):
                self._schedule_hooks.append(callback)

    def dispatch(self, hook: str) -> None:
        """Call ``hook`` of every callback."""
        self.ctx.idps = None
        try:
            for callback in self.callbacks:
                self._call(callback, hook)
        finally:
            self._everything = None

    def end(self) -> None:
        """Run every ``on_train_end``; when one fails, the others still close."""
        self.ctx.idps = None
        try:
            while self._begun:
                self._call(self._begun.pop(0), "on_train_end")
        except BaseException:
            self.clean_up()
            raise
        finally:
            self._everything = None

    def clean_up(self) -> None:
        """After a failure: let the callbacks that began close what they opened.

        Their own errors become warnings, so that the failure stays the error raised.
        """
        self.ctx.failed = True
        while self._begun:
            callback = self._begun.pop(0)
            try:
                callback.on_train_end(self.ctx)
            except Exception as error:
                warn_caller(
                    f"{type(callback).__name__}.on_train_end failed while cleaning up: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                )

    def updated(self, events: Sequence[UpdateEvent]) -> None:
        """Tell the callbacks of one committed window of the update engine."""
        for callback in self._update_hooks:
            self.ctx.caller = callback
            for event in events:
                callback.on_optimizer_update(self.ctx, event)
        self.ctx.caller = None

    def scheduled(self, position: int) -> None:
        """Tell the callbacks of a step of the primary scheduler."""
        for callback in self._schedule_hooks:
            self.ctx.caller = callback
            callback.on_scheduler_step(self.ctx, position)

    def tell_listeners(self) -> None:
        """Call the listeners after a committed update; their list may have grown."""
        if len(self._bound) != len(self.ctx.update_listeners):
            self._bind_listeners()
        for registered, listener in zip(self._bound, self._listeners):
            self.ctx.caller = registered
            listener()
        self.ctx.caller = None

    def _bind_listeners(self) -> None:
        self._bound = tuple(self.ctx.update_listeners)
        self._listeners = [partial(f, self.ctx) if takes_an_argument(f) else f for f in self._bound]

    def _call(self, callback: Any, hook: str) -> None:
        ctx, call = self.ctx, getattr(callback, hook)
        ctx.caller = callback
        held = ctx.held_idps
        whole = self.journal is not None and _reads_everything(callback, hook)
        if whole:
            ctx.idps = self._whole_history(callback, hook) or held
        try:
            call(ctx)
        finally:
            ctx.caller = None
            if whole:
                ctx.idps = held

    def _whole_history(self, callback: Any, hook: str) -> Any:
        """Every record, read back once for all callbacks of one round of hooks."""
        from nnx.history.journal import RecordWindow

        assert self.journal is not None
        if self._everything is None:
            try:
                with self.journal.full_history() as records:
                    self._everything = RecordWindow(records)
            except (OSError, ValueError) as error:
                if hook != "on_train_end":
                    raise
                warn_caller(
                    f"{type(callback).__name__} gets the last records only: the history could "
                    f"not be read back ({error})",
                    RuntimeWarning,
                )
        return self._everything


def _reads_everything(callback: Any, hook: str) -> bool:
    return hook in ("on_epoch_end", "on_train_end") and (
        getattr(callback, "history_access", "window") == "full"
    )
