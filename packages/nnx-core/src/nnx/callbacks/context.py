"""What a callback sees of the fit it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from nnx.models import Model
    from nnx.records import NNIterationDataPoint
    from nnx.store import NNCheckpoint, NNRun


class FitView(Protocol):
    """What a context reads of its fit."""

    model: Model
    primary_optimizer: torch.optim.Optimizer
    epoch: int
    precision: Any
    committed_updates: int
    retention: int | None

    @property
    def run(self) -> NNRun: ...

    @property
    def trainer(self) -> Any: ...

    @property
    def named_optimizers(self) -> Mapping[str, torch.optim.Optimizer] | None: ...

    @property
    def scheduler(self) -> Any: ...

    @property
    def update_count(self) -> int | None: ...

    def records(self) -> Any: ...

    def snapshot(self) -> Callable[..., NNCheckpoint]: ...


class CallbackContext:
    """One per fit, handed to every hook; its attributes follow the fit.

    A callback may set ``should_stop`` (stop after this epoch), ``stop_at_update``
    (stop after the batch in progress) and ``idps``. A stop holds as long as the callback
    that asked for it does not take it back; no other can. It may append functions to
    ``update_listeners`` in ``on_train_begin``. Each of them is called after every
    committed optimizer update, with this context when it takes an argument.
    ``failed`` is true in an ``on_train_end`` that only cleans up after an error.
    """

    __slots__ = (
        "_asks_now", "_asks_stop", "_deferred", "_fit", "_idps", "caller", "failed", "idp",
        "update_listeners",
    )  # fmt: skip

    def __init__(self, fit: FitView) -> None:
        self._fit = fit
        self._idps: Any = None
        self._deferred: dict[str, Callable[..., NNCheckpoint]] = {}
        self.idp: NNIterationDataPoint | None = None
        self.failed = False
        self.caller: Any = None  # the callback or listener that is running
        self._asks_stop: set[int] = set()
        self._asks_now: set[int] = set()
        self.update_listeners: list[Callable[..., Any]] = []

    @property
    def should_stop(self) -> bool:
        """Whether some callback asks to stop after this epoch."""
        return bool(self._asks_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._ask(self._asks_stop, value)

    @property
    def stop_at_update(self) -> bool:
        """Whether some callback asks to stop after the batch in progress."""
        return bool(self._asks_now)

    @stop_at_update.setter
    def stop_at_update(self, value: bool) -> None:
        self._ask(self._asks_now, value)

    def _ask(self, asking: set[int], value: bool) -> None:
        (asking.add if value else asking.discard)(id(self.caller))

    @property
    def model(self) -> Model:
        """The model in training."""
        return self._fit.model

    @property
    def run(self) -> NNRun:
        """The run in progress."""
        return self._fit.run

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer] | None:
        """The named optimizers of a ``Trainer``; ``None`` in ``NNModel.train``."""
        return self._fit.named_optimizers

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; of a ``Trainer``'s, the one whose name sorts first."""
        return self._fit.primary_optimizer

    @property
    def trainer(self) -> Any:
        """The ``Trainer``, or ``None`` in ``NNModel.train``."""
        return self._fit.trainer

    @property
    def scheduler(self) -> Any:
        """The training scheduler, for reading; ``None`` in a ``Trainer``."""
        return self._fit.scheduler

    @property
    def epoch(self) -> int:
        """Index of the epoch in progress."""
        return self._fit.epoch

    @property
    def precision(self) -> Any:
        """The run's :class:`~nnx.precision.ResolvedPrecision`."""
        return self._fit.precision

    @property
    def committed_updates(self) -> int:
        """Optimizer updates committed so far, as they were reported."""
        return self._fit.committed_updates

    @property
    def update_count(self) -> int | None:
        """The update engine's counter in an objective run; ``None`` elsewhere."""
        return self._fit.update_count

    @property
    def retention(self) -> int | None:
        """How many records a history journal keeps in memory; ``None`` without one."""
        return self._fit.retention

    @property
    def idps(self) -> Any:
        """The records so far (with a history journal: the last of them)."""
        if self._idps is not None:
            return self._idps
        return self._fit.records()

    @idps.setter
    def idps(self, value: Sequence[NNIterationDataPoint] | None) -> None:
        self._idps = value

    @property
    def held_idps(self) -> Any:
        """What a callback put in place of the records during this round of hooks."""
        return self._idps

    def defer_checkpoint(self, tag: str) -> None:
        """Ask for a weights-only checkpoint ``<tag>.pt``, written once LAST has committed.

        It holds the weights as they are now, whatever a later callback makes of them.
        With the tag ``"best"`` they are BEST's if the epoch turns out to be the best, and
        nothing is written otherwise.
        """
        self._deferred[tag] = self._fit.snapshot()

    def take_deferred(self) -> dict[str, Callable[..., NNCheckpoint]]:
        """The checkpoints asked for since the last call by tag; each wants its ``idp``."""
        taken, self._deferred = self._deferred, {}
        return taken
