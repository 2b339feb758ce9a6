"""Putting a fit where its checkpoint was, as a whole or not at all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from nnx.engine import rng
from nnx.engine.batches import is_stateful
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.engine.session import FitSession


@contextlib.contextmanager
def undone_on_error(session: FitSession) -> Iterator[None]:
    """Put the model and every random stream back when a restore fails."""
    net, streams = session.model.net, rng.capture(session.loaders)
    before = {name: _kept(value) for name, value in net.state_dict().items()}
    try:
        yield
    except BaseException:
        try:
            session.model.net.load_state_dict(before)
        except Exception as error:
            warn_caller(
                f"the model could not be rolled back after a failed resume: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
            )
        rng.restore(streams, session.loaders)
        raise


def _kept(value: Any) -> Any:
    """A copy in main memory: a device holds the model and the checkpoint already."""
    return value.detach().cpu().clone() if hasattr(value, "detach") else copy.deepcopy(value)


def restore_tensors(session: FitSession) -> None:
    """Load weights, optimizers, schedulers and scaler. Callbacks have not begun."""
    start = session.start
    session.model.net.load_state_dict(start.net_state)  # type: ignore[arg-type]
    state = start.state
    if state is None:
        return
    saved = session.naming.unpack(state) or {}
    for name, optimizer in session.optimizers.items():
        one = saved[name]
        if one["optimizer_state"] is not None:
            optimizer.load_state_dict(one["optimizer_state"])
        if one["scheduler_state"] is not None:
            session.schedulers[name].load_state_dict(one["scheduler_state"])
            session.clocks[name].restored()
    if session.scaler is not None and state.get("scaler_state") is not None:
        session.scaler.load_state_dict(state["scaler_state"])


def restore_streams(session: FitSession) -> None:
    """Set every random stream to the checkpoint's, right before the first resumed epoch."""
    start = session.start
    if start.state is None:
        return
    saved = session.ranks.streams(start.state)
    if saved is None:
        warn_caller(
            "the checkpoint holds no random state: the resumed run draws other numbers than an "
            "uninterrupted one",
            RuntimeWarning,
        )
        return
    unmatched = rng.restore(saved, session.loaders)
    if unmatched:
        warn_caller(
            f"the checkpoint's state of {', '.join(unmatched)} fits no generator of the same seed, "
            "nor a loader with persistent workers, in this run's loaders; those streams start fresh",
            RuntimeWarning,
        )
    _warn_of_workers(session.loaders, saved)


def _warn_of_workers(loaders: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Worker processes have random states of their own, which no checkpoint holds."""
    workers = {
        name: part
        for name, part in rng.parts_of(loaders)
        if isinstance(part, DataLoader) and part.num_workers and not is_stateful(part)
    }
    if not workers:
        return
    lasting = [name for name, loader in workers.items() if loader.persistent_workers]
    if lasting and "workers" not in saved:
        what = "; nor does the checkpoint say whether they had been started"
    else:
        what = ""
    exception = "" if lasting else " from anything but the streams that torch seeds each epoch"
    warn_caller(
        f"the loaders {', '.join(workers)} use workers, whose own random state is not saved{what}. "
        "The resumed batches are those of an uninterrupted run only if the workers draw nothing "
        f"themselves{exception}",
        RuntimeWarning,
    )
