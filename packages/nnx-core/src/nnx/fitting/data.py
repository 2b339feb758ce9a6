"""What a person has at hand, as batches: loaders, datasets, tensors, arrays, tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nnx.data.columns import is_frame, is_series, numeric_array
from nnx.data.tabular import exactly
from nnx.utils import validation as check

DEFAULT_BATCH_SIZE = 32
# What these losses compare outputs with: a number for each, or the index of a class.
_OF_NUMBERS = frozenset(
    {
        "mean_squared_error",
        "binary_cross_entropy",
        "bce",
        "mse",
        "huber",
        "l1",
        "smooth_l1",
        "poisson",
        "gaussian_nll",
    }
)
_OF_CLASSES = frozenset({"cross_entropy", "negative_log_likelihood", "focal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How data become batches of ``(*inputs, targets)``.

    A ``DataLoader``, a list of batches and any other loader are taken as they are, and tensors
    too. Arrays and the columns of a table become tensors: floating inputs float32, whole
    ones int64. Targets are class indices ``(B,)`` int64 where they are whole numbers, else
    float32 values, ``(B, 1)`` where they are one per row; under a ``loss`` that compares
    numbers whole ones too. Batches for training are shuffled.
    """

    target: str | int | None = None
    batch_size: int | None = None
    loss: Any = None
    columns: tuple[Any, ...] | None = None

    def of(self, train: Any) -> Batches:
        """The same for what is trained on: every later table has its columns."""
        return replace(self, columns=self._features(train)) if is_frame(train) else self

    def loader(self, data: Any, name: str, *, shuffle: bool) -> Iterable[Any]:
        """The batches of ``data``, which is the argument ``name``."""
        dataset = self._dataset(data, name)
        if dataset is None:
            if self.batch_size is not None:
                raise ValueError(
                    f"{name} is a loader, which has batches of its own; leave batch_size out, or "
                    "pass its dataset"
                )
            loader: Iterable[Any] = data
            return loader
        if not isinstance(dataset, IterableDataset) and not len(dataset):  # type: ignore[arg-type]
            raise ValueError(f"{name} has no rows")
        size = self.batch_size or DEFAULT_BATCH_SIZE
        ordered = isinstance(dataset, IterableDataset) or not shuffle
        return DataLoader(dataset, batch_size=size, shuffle=not ordered)

    def inputs(self, X: Any) -> Any:
        """What to predict for, as ``NNModel.predict`` takes it."""
        if is_frame(X):
            return _matrix(X, self.columns or self._features(X))
        if isinstance(X, tuple):
            return tuple(_inputs(part, f"X[{i}]") for i, part in enumerate(X))
        if isinstance(X, Dataset):
            return self.loader(X, "X", shuffle=False)
        return _inputs(X, "X") if isinstance(X, np.ndarray) else X

    def _features(self, frame: Any) -> tuple[Any, ...]:
        return tuple(column for column in frame.columns if column != self.target)

    def _dataset(self, data: Any, name: str) -> Dataset[Any] | None:
        """``data`` as a dataset; ``None`` where it is a loader."""
        if is_frame(data):
            return self._of_table(data, name)
        if self.target is not None:
            raise ValueError(f"target= names a column of a DataFrame; {name} is none")
        if isinstance(data, Dataset):
            return data
        if isinstance(data, (torch.Tensor, np.ndarray)) or is_series(data):
            raise ValueError(f"{name} needs inputs and targets: a tuple ({name}_x, {name}_y)")
        if not isinstance(data, tuple):
            return None
        if len(data) < 2:
            raise ValueError(f"{name} needs inputs and targets, not a tuple of {len(data)}")
        *inputs, targets = data
        parts = [_inputs(part, f"{name}[{i}]") for i, part in enumerate(inputs)]
        parts.append(self._targets(targets, f"{name}[{len(inputs)}]"))
        rows = [len(part) for part in parts]
        if len(set(rows)) != 1:
            raise ValueError(f"the parts of {name} have different numbers of rows: {rows}")
        return TensorDataset(*parts)

    def _of_table(self, frame: Any, name: str) -> TensorDataset:
        columns = list(frame.columns)
        if self.target is None:
            raise ValueError(
                f"{name} is a DataFrame: say which column is to be predicted, with target="
            )
        if self.target not in columns:
            near = check.close(str(self.target), [str(column) for column in columns])
            raise ValueError(f"{name} has no column {self.target!r}{near}")
        features = self.columns or self._features(frame)
        missing = [column for column in features if column not in columns]
        if missing:
            raise ValueError(f"{name} lacks the columns {missing}, which train has")
        targets = self._targets(frame[self.target], f"{name}, column {self.target!r}")
        return TensorDataset(_matrix(frame, features), targets)

    def _targets(self, values: Any, where: str) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values
        array = numeric_array(values, where, ValueError)
        kind = str(getattr(self.loss, "id", self.loss)).rpartition(".")[2]
        if kind in _OF_CLASSES:
            array = _classes(array, where)
        if kind not in _OF_NUMBERS and array.dtype.kind in "biu":
            return exactly(array, torch.int64, where, _rows(array))
        tensor = exactly(array, torch.float32, where, _rows(array), missing=True)
        return tensor[:, None] if tensor.dim() == 1 else tensor


def _classes(array: Any, where: str) -> Any:
    """One class for each row, as whole numbers; probabilities of all classes stay."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind != "f":
        return array
    broken = np.flatnonzero(array != np.floor(array))
    if len(broken):
        raise ValueError(
            f"{where} holds {array[broken[0]]} in row {broken[0]}, which is not the index of a "
            'class; for numbers give a loss that compares them, such as "mean_squared_error"'
        )
    return array.astype(np.int64)


def _matrix(frame: Any, columns: tuple[Any, ...]) -> torch.Tensor:
    """The columns as ``(rows, columns)`` float32."""
    parts = []
    for column in columns:
        where = f"column {column!r}"
        values = numeric_array(frame[column], where, ValueError)
        parts.append(exactly(values, torch.float32, where, _rows(values)))
    return torch.stack(parts, dim=1)


def _inputs(values: Any, where: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    if is_frame(values):
        return _matrix(values, tuple(values.columns))
    array = numeric_array(values, where, ValueError)
    dtype = torch.float32 if array.dtype.kind == "f" else torch.int64
    return exactly(array, dtype, where, _rows(array))


def _rows(values: Any) -> Any:
    return np.arange(len(values))
