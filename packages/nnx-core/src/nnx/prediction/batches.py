"""Reading batches: inputs, targets, rows that count, and the ids of the rows.

Everything works on a :class:`~nnx.models.Model`. Other kinds of outputs join
through optional attributes, looked up on the batch adapter and then on the net:
of graph batches the methods ``seed_count(batch)`` (only the first rows count)
and ``sample_ids(batch)``; ``class_axis = -1`` of outputs with their classes last,
as a language model's (B, T, vocab), whose every position is a row to score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nnx.data.columns import is_frame, is_series
from nnx.models import Model, adapter_for
from nnx.precision import inference_precision
from nnx.tasks.batch_error import forward_error
from nnx.utils.caller import warn_caller


def forward_batch(model: Model, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw outputs and targets of one batch, on the model's device.

    Splits the batch, moves it, runs the net and keeps the seed rows. Gradients,
    modes and autocast are the caller's. Raises ``ValueError`` for a batch
    without a target.
    """
    net, device = model.net, model.device
    adapter = adapter_for(net, model.batch_adapter)
    args, kwargs, target = adapter.split(batch)
    if target is None:
        raise ValueError(
            "the batch has no target to learn from or to score; give (inputs, target) batches, "
            "or use predict() for inputs alone"
        )
    output = _forward(model, adapter, args, kwargs)
    target = _to(target, device)
    if output.ndim > 2 and class_axis(model) == -1:
        if target.shape != output.shape[:-1]:
            raise ValueError(
                f"the batch has targets {tuple(target.shape)} for outputs {tuple(output.shape)}, "
                f"whose classes are last; give one target for each position"
            )
        return output.flatten(0, -2), target.flatten()
    seeds = seed_count(model, batch)
    return (output, target) if seeds is None else (output[:seeds], target[:seeds])


def forward_inputs(model: Model, batch: Any, *, in_memory: bool = False) -> torch.Tensor:
    """Raw outputs of one batch; targets, if there are any, are not read.

    ``in_memory`` inputs are all of them inputs (a tuple: one per argument). Of
    a loader, a bare tensor or a 1-tuple is inputs alone.
    """
    adapter = adapter_for(model.net, model.batch_adapter)
    alone = isinstance(batch, (torch.Tensor, np.ndarray))
    alone |= type(batch) in (tuple, list) and len(batch) == 1
    if alone or (in_memory and isinstance(batch, (tuple, Mapping))):
        args, kwargs = adapter.inputs(batch)
    else:
        args, kwargs, _ = adapter.split(batch)
    output = _forward(model, adapter, args, kwargs)
    seeds = seed_count(model, batch)
    return output if seeds is None else output[:seeds]


def runner_of(model: Model) -> Any:
    """What is called for a forward: the net, or the compiled forward of a fit in progress."""
    return getattr(model, "compiled", None) or model.net


def _forward(
    model: Model, adapter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    net, device = runner_of(model), model.device
    moved = [_to(value, device) for value in args]
    named = {name: _to(value, device) for name, value in kwargs.items()} if kwargs else kwargs
    try:
        return adapter.output(net(*moved, **named))
    except RuntimeError as error:
        explained = forward_error(model.net, moved, error)
        if explained is None:
            raise
        raise explained from error


@contextmanager
def inference_context(model: Model) -> Iterator[None]:
    """No gradients, and the autocast of the model's explicit precision policy."""
    precision = inference_precision(model.params, model.device)
    with torch.no_grad(), precision.autocast():
        yield


def seed_count(model: Model, batch: Any) -> int | None:
    """How many leading rows of a sampled subgraph are seeds; ``None``: all rows count."""
    find = _method(model, "seed_count")
    return None if find is None else find(batch)


def class_axis(model: Model) -> int:
    """Where the outputs have their classes: -1 where the adapter or the net says so, else 1."""
    return -1 if _method(model, "class_axis") == -1 else 1


class SampleIds:
    """Numbers the rows of a loader's batches.

    A net (or adapter) with ``sample_ids(batch)`` names them itself; seed rows
    carry their global node index; all other rows their position in the
    iteration, which means nothing over a shuffling loader: that warns, once.
    """

    def __init__(self, model: Model, loader: Any) -> None:
        self._model = model
        self._shuffles = shuffles(loader)
        self._position = 0

    def of(self, batch: Any, rows: int) -> np.ndarray:
        """The ids of a batch whose output has ``rows`` rows."""
        named = _method(self._model, "sample_ids")
        if named is not None:
            return _checked(named(batch), rows)
        seeds = seed_count(self._model, batch)
        if seeds is not None and getattr(batch, "n_id", None) is not None:
            return _checked(batch.n_id[:seeds], rows)
        if self._shuffles:
            self._shuffles = False
            warn_caller(
                "sample_ids are iteration positions, but this DataLoader shuffles: they do not "
                "identify rows of the dataset. Predict over a loader with shuffle=False.",
                UserWarning,
            )
        ids = np.arange(self._position, self._position + rows)
        self._position += rows
        return ids


def shuffles(loader: Any) -> bool:
    """Whether iterating ``loader`` visits its rows in a random order, as far as it says."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, _RANDOM_SAMPLERS):
            return True
        if getattr(sampler, "shuffle", False) is True:  # DistributedSampler and its kind
            return True
    return getattr(loader, "shuffle", False) is True


_RANDOM_SAMPLERS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def is_loader(X: Any) -> bool:
    """Whether ``X`` is an iterable of batches rather than one batch of inputs."""
    if isinstance(X, (torch.Tensor, np.ndarray, tuple, Mapping, str, bytes)):
        return False
    refuse_frames(
        X, 'give its numbers, in the order of training: frame[columns].to_numpy("float32")'
    )
    return not hasattr(X, "edge_index") and isinstance(X, Iterable)


def refuse_frames(X: Any, instead: str) -> None:
    """Refuse a table of pandas, whose iteration gives the names of its columns."""
    if is_frame(X) or is_series(X):
        raise TypeError(f"a pandas {type(X).__name__} is neither a batch nor a loader; {instead}")


def single_batch(model: Model, X: Any) -> Any:
    """In-memory inputs as one batch.

    Arrays become tensors; floating arrays take the dtype of the net's
    parameters. Tensors are used as they are.
    """
    if isinstance(X, Mapping):
        return {name: _tensor(model, value) for name, value in X.items()}
    if isinstance(X, tuple):
        return tuple(_tensor(model, value) for value in X)
    if isinstance(X, (np.ndarray, torch.Tensor)):
        return _tensor(model, X)
    return X


def _tensor(model: Model, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    if not tensor.is_floating_point():
        return tensor
    floating = (p.dtype for p in model.net.parameters() if p.is_floating_point())
    return tensor.to(next(floating, torch.get_default_dtype()))


def _method(model: Model, name: str) -> Any:
    for owner in (model.batch_adapter, model.net):
        # A module's own getattr is slow to miss, and this runs for every batch.
        if hasattr(type(owner), name) or name in getattr(owner, "__dict__", ()):
            return getattr(owner, name)
    return None


def _checked(ids: Any, rows: int) -> np.ndarray:
    ids = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if ids.shape != (rows,):
        raise ValueError(f"the batch names {ids.shape} sample ids for {rows} output rows")
    return ids


def _to(value: Any, device: torch.device) -> Any:
    """Move tensors, also inside tuples, lists and mappings; other objects by their ``to``."""
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        return value.to(device, non_blocking=value.device.type == "cpu" and value.is_pinned())
    if isinstance(value, Mapping):
        return {name: _to(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_to(item, device) for item in value)
    move = getattr(value, "to", None)
    return move(device) if callable(move) else value
