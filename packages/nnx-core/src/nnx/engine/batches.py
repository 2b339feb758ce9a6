"""An epoch's batches: where they start, which is the last, where they stand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from nnx.data.loading import fast_batches

_END = object()


def loader_length(loader: Any) -> int | None:
    """``len(loader)``, or ``None`` where it has none (an iterable dataset, some samplers)."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def announce_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader that defines ``set_epoch`` which epoch it will be read for.

    Without one of its own, the loader's sampler and batch sampler are told.
    """
    for target in (
        loader,
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
    ):
        tell = getattr(target, "set_epoch", None)
        if callable(tell):
            tell(epoch)
            return


class EpochBatches:
    """One pass over a loader, yielding ``(index, batch, is_last)``.

    ``is_last`` comes from the loader's length; with ``look_ahead`` and no length,
    one batch is fetched in advance to know it, and copied, since a loader may fill the
    same buffers again. ``start`` is the index of the first
    batch, for an epoch that goes on in the middle. ``before_fetch`` is called before
    each batch is fetched in advance.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        length: int | None,
        start: int = 0,
        look_ahead: bool = False,
        before_fetch: Callable[[], object] | None = None,
    ) -> None:
        self._source = source
        self._length = length
        self._index = start
        self._before_fetch = before_fetch
        self.peeks = look_ahead and length is None
        self._held: Any = self._fetch_ahead() if self.peeks else _END

    def __iter__(self) -> Iterator[tuple[int, Any, bool]]:
        if self.peeks:
            yield from self._one_ahead()
            return
        index, last = self._index, None if self._length is None else self._length - 1
        for batch in self._source:
            yield index, batch, index == last
            index += 1
        if self._held is not _END:  # fetched by `exhausted`, and training went on
            raise RuntimeError("a batch was peeked at and never trained on")

    def _one_ahead(self) -> Iterator[tuple[int, Any, bool]]:
        index = self._index
        while self._held is not _END:
            batch = _copied(self._held)
            self._held = self._fetch_ahead()
            yield index, batch, self._held is _END
            index += 1

    def _fetch_ahead(self) -> Any:
        if self._before_fetch is not None:
            self._before_fetch()
        return next(self._source, _END)

    def exhausted(self) -> bool:
        """Whether the batch just yielded was the last. Ends the pass when it was not."""
        if not self.peeks:
            self._held = next(self._source, _END)
        return self._held is _END


def _copied(value: Any) -> Any:
    """A batch in memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    own = getattr(value, "clone", None)  # a graph
    return own() if callable(own) else copy.deepcopy(value)


def open_epoch(loader: Iterable[Any], *, skip: int = 0, state: Any = None) -> Iterator[Any]:
    """An iterator over ``loader``'s batches from the ``skip``-th on.

    A loader that keeps its own position (torchdata's ``StatefulDataLoader``) is set
    to ``state``; any other is read again from the start, without training, so that
    its sampler and every draw it makes are where they were.
    """
    if state is not None:
        loader.load_state_dict(state)  # type: ignore[attr-defined]
        return iter(loader)
    batches = fast_batches(loader)
    for _ in range(skip):
        if next(batches, _END) is _END:
            raise ValueError(
                f"train_loader ended before batch {skip}, where the resumed epoch stood: it is "
                "not the loader that the checkpoint was written with"
            )
    return batches


def is_stateful(loader: Any) -> bool:
    """Whether a loader saves and restores its own position inside an epoch."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )
