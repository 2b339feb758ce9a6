"""Standardization fitted on the training rows only, and views that transform inputs only."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nnx.data.columns import (
    Array,
    ColumnLabel,
    column_labels,
    is_frame,
    is_series,
    locate_labels,
    numeric_array,
)
from nnx.data.statistics import (
    PreprocessingError,
    as_table,
    column_chunks,
    frame_column,
    moments,
    row_chunks,
    row_positions,
    to_numpy,
)
from nnx.utils import validation as check
from nnx.utils.files import atomic_write
from nnx.utils.identity import IdentityRef
from nnx.utils.topology import qualified_name

__all__ = ["FORMAT", "PreprocessingError", "SplitView", "Standardizer", "describe_transform"]

FORMAT = "nnx.preprocessing/1"
_DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standardizer:
    """``(x - mean) / scale`` per column, in float64, returned as ``dtype``.

    ``mean`` and ``scale`` are the population mean and standard deviation of the
    rows it was fitted on; a constant column keeps its value as the mean and has
    scale 1. ``columns`` names the columns in order (``None``: by position).
    ``fit_membership`` says which rows were read.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    columns: tuple[ColumnLabel, ...] | None = None
    dtype: str = "float32"
    fit_rows: int = 0
    fit_membership: IdentityRef = field(default_factory=IdentityRef.unknown)

    def __post_init__(self) -> None:
        try:
            mean = tuple(
                float(check.real("Standardizer", f"mean[{i}]", v)) for i, v in enumerate(self.mean)
            )
            scale = tuple(
                float(check.real("Standardizer", f"scale[{i}]", v, above=0))
                for i, v in enumerate(self.scale)
            )
            rows = check.count("Standardizer", "fit_rows", self.fit_rows, at_least=0)
            membership = check.instance(
                "Standardizer", "fit_membership", self.fit_membership, IdentityRef
            )
        except (ValueError, TypeError) as error:
            raise PreprocessingError(str(error)) from None
        columns = None if self.columns is None else column_labels(self.columns, PreprocessingError)
        if (
            not mean
            or len(mean) != len(scale)
            or (columns is not None and len(columns) != len(mean))
        ):
            raise PreprocessingError(
                f"a Standardizer needs one mean, scale and label per column, got {len(mean)} "
                f"means, {len(scale)} scales and {columns and len(columns)} labels"
            )
        values = {
            "mean": mean, "scale": scale, "columns": columns, "dtype": _dtype_name(self.dtype),
            "fit_rows": rows, "fit_membership": membership,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def fit(
        cls,
        source: Any,
        *,
        rows: Iterable[Any],
        columns: Sequence[ColumnLabel] | None = None,
        dtype: str | torch.dtype = "float32",
        membership: Any = None,
    ) -> Standardizer:
        """Fit on ``rows`` (integer positions) of ``source``; no other row is read.

        ``source`` is a DataFrame (``columns`` defaults to all of them), a 2-D
        tensor or array, or anything whose items are rows, or samples that start
        with a row. ``membership`` (a split manifest or an identity) names the rows;
        by default that is a digest of the positions.
        """
        name = _dtype_name(dtype)
        positions = row_positions(rows, source)
        labels = None if columns is None else column_labels(columns, PreprocessingError)
        if is_frame(source):
            labels = labels or column_labels(source.columns, PreprocessingError)
            where = locate_labels(list(source.columns), labels, PreprocessingError)
            table = [frame_column(source, positions, c, n) for c, n in zip(where, labels)]
            found = moments(lambda: column_chunks(table), labels)
        else:
            source, chosen = as_table(source, positions)
            width = source.shape[1]
            if labels is not None and len(labels) != width:
                raise PreprocessingError(f"{len(labels)} columns are named but rows have {width}")
            found = moments(lambda: row_chunks(source, chosen), labels or range(width))
        return cls(
            mean=tuple(mean for mean, _ in found),
            scale=tuple(scale for _, scale in found),
            columns=labels,
            dtype=name,
            fit_rows=len(positions),
            fit_membership=_membership(membership, positions),
        )

    @property
    def n_features(self) -> int:
        return len(self.mean)

    # -- use -------------------------------------------------------------------------

    def transform(self, data: Any) -> torch.Tensor:
        """``(rows, n_features)`` of prepared features.

        ``data`` is a DataFrame that holds the fitted columns in the fitted order
        (others are ignored), or a 2-D tensor or array of the fitted width. Raises
        :class:`PreprocessingError` for anything else, and for values that are not
        finite numbers, before or after.
        """
        if is_frame(data):
            where = self._locate(list(data.columns))
            columns = [frame_column(data, None, c, data.columns[c]) for c in where]
            chunks = column_chunks(columns)
        elif not isinstance(data, (torch.Tensor, np.ndarray)):
            raise PreprocessingError(
                f"transform takes a DataFrame, or a 2-D tensor or array, not {type(data).__name__}"
            )
        elif data.ndim != 2 or data.shape[1] != self.n_features:
            raise PreprocessingError(
                f"transform expects shape (rows, {self.n_features}), got {tuple(data.shape)}"
            )
        else:
            chunks = row_chunks(data, np.arange(len(data)))
        result = torch.empty(len(data), self.n_features, dtype=_DTYPES[self.dtype])
        start = 0
        for chunk in chunks:
            self._scale_into(result[start : start + len(chunk)], chunk, start)
            start += len(chunk)
        return result.to(data.device) if isinstance(data, torch.Tensor) else result

    def __call__(self, sample: Any) -> torch.Tensor:
        """One row, ``(n_features,)``: exactly what :meth:`transform` gives for it.

        A pandas Series is checked by name; any other 1-D row is by position.
        """
        if is_series(sample):
            where = self._locate(list(sample.index))
            values: Any = [sample.iloc[place] for place in where]
        else:
            values = sample
        row = numeric_array(to_numpy(values), "the row", PreprocessingError)
        if row.shape != (self.n_features,):
            raise PreprocessingError(
                f"a row has {self.n_features} values, got shape {row.shape}; "
                f"use transform() for several rows"
            )
        result = torch.empty(self.n_features, dtype=_DTYPES[self.dtype])
        self._scale_into(result[None], row[None], 0)
        return result.to(sample.device) if isinstance(sample, torch.Tensor) else result

    def _locate(self, present: list[Any]) -> list[int]:
        if self.columns is None:
            raise PreprocessingError(
                "this Standardizer was fitted without column names; pass a tensor or an array"
            )
        where = locate_labels(present, self.columns, PreprocessingError)
        if where != sorted(where):
            found = [present[place] for place in sorted(where)]
            raise PreprocessingError(
                f"columns are in another order: fitted {list(self.columns)}, got {found}"
            )
        return where

    def _scale_into(self, result: torch.Tensor, rows: Array, start: int) -> None:
        values = np.asarray(rows, dtype=np.float64) - np.asarray(self.mean)
        values /= np.asarray(self.scale)
        result.copy_(torch.from_numpy(values))
        if math.isfinite(result.sum(dtype=torch.float64)):
            return  # one value that is not finite would make the sum so
        finite = torch.isfinite(result)
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            label = self.columns[column] if self.columns else column
            raise PreprocessingError(
                f"row {start + row}, column {label!r}: {rows[row, column]} does not become a "
                f"finite {self.dtype}; drop or impute it first"
            )

    # -- identity and serialization --------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything as JSON-like data; floats reload exactly."""
        return {
            "format": FORMAT,
            "mean": list(self.mean),
            "scale": list(self.scale),
            "columns": None if self.columns is None else list(self.columns),
            "dtype": self.dtype,
            "fit_rows": self.fit_rows,
            "fit_membership": self.fit_membership.state(),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Standardizer:
        """Rebuild from :meth:`state`; anything that does not belong there is refused."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise PreprocessingError(f"this is not a {FORMAT} document (format: {found!r})")
        fields = {name: value for name, value in state.items() if name != "format"}
        known = set(Standardizer.__dataclass_fields__)
        if fields.keys() != known:
            raise PreprocessingError(
                f"a {FORMAT} document has unknown or missing keys: {sorted(fields.keys() ^ known)}"
            )
        try:
            fields["fit_membership"] = IdentityRef.from_state(fields["fit_membership"])
            return Standardizer(**fields)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise PreprocessingError(str(error)) from None

    def canonical_bytes(self) -> bytes:
        """The one spelling of this state: UTF-8 JSON, sorted keys, no spaces."""
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "surrogatepass")

    def digest(self) -> str:
        """SHA-256 (hex) over statistics, schema and fit membership."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.state(), indent=1)

    @staticmethod
    def from_json(text: str) -> Standardizer:
        try:
            state = json.loads(text)
        except json.JSONDecodeError as error:
            raise PreprocessingError(f"a Standardizer must be JSON: {error}") from None
        return Standardizer.from_state(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON; the old or the new file survives."""
        with atomic_write(path) as stream:
            stream.write(self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Standardizer:
        """Read what :meth:`save` wrote."""
        return Standardizer.from_json(Path(path).read_text(encoding="utf-8"))


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES or not isinstance(dtype, (str, torch.dtype)):
        raise PreprocessingError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    return name


def _membership(membership: Any, positions: Array) -> IdentityRef:
    if membership is None:
        digest = hashlib.sha256(np.sort(positions).astype("<i8").tobytes()).hexdigest()
        return IdentityRef("digest", f"sha256:{digest}")
    identity = getattr(membership, "identity", None)
    return IdentityRef.of(identity() if callable(identity) else membership)


# -- views ---------------------------------------------------------------------------


class SplitView(Dataset[Any]):
    """Rows of a dataset with a transform of their own, applied to the input only.

    ``base``'s own transform runs first. Targets and whatever else a sample
    holds pass through, and tuples, named tuples and lists keep their type. The
    base is never changed and a view holds no state that changes, so views of
    one base can be read in turn and by workers.
    """

    def __init__(
        self,
        base: Any,
        indices: Iterable[int],
        *,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise PreprocessingError(f"transform must be callable, not {transform!r}")
        self.base = base
        self.indices = tuple(_view_indices(indices, len(base)))
        self.transform = transform

    @property
    def dataset(self) -> Any:
        """The base dataset, under the name that ``Subset`` uses."""
        return self.base

    @property
    def classes(self) -> Any:
        """The base dataset's class names."""
        return self.base.classes

    @property
    def reconstructible(self) -> bool:
        """Whether :meth:`state` is enough to rebuild the transform."""
        return self.transform is None or isinstance(self.transform, Standardizer)

    def state(self) -> dict[str, Any]:
        """How many rows, and the transform as :func:`describe_transform` tells it."""
        return {
            "rows": len(self.indices),
            "transform": describe_transform(self.transform),
            "reconstructible": self.reconstructible,
        }

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        sample = self.base[self.indices[index]]
        return sample if self.transform is None else self._apply(self.transform, sample)

    @staticmethod
    def _apply(transform: Callable[..., Any], sample: Any) -> Any:
        if isinstance(sample, Mapping):
            raise PreprocessingError(
                f"a split transform cannot tell which entry of a mapping sample is the input "
                f"(entries: {sorted(map(str, sample))}); transform it in the dataset itself"
            )
        if isinstance(sample, tuple) and hasattr(sample, "_make"):
            return sample._make((transform(sample[0]), *sample[1:]))
        if isinstance(sample, (tuple, list)):
            return type(sample)((transform(sample[0]), *sample[1:]))
        return transform(sample)


def _view_indices(indices: Iterable[int], size: int) -> Iterator[int]:
    for index in indices:
        if isinstance(index, (bool, np.bool_)) or not hasattr(index, "__index__"):
            raise PreprocessingError(f"view indices must be integers, not {index!r}")
        position = index.__index__()
        if not 0 <= position < size:
            raise PreprocessingError(f"view index {position} is not in the {size} rows of the base")
        yield position


def describe_transform(transform: Callable[..., Any] | None) -> dict[str, Any] | None:
    """A transform as data: a Standardizer by its state, anything else by name only.

    ``reconstructible`` says whether the record is enough to rebuild it.
    """
    if transform is None:
        return None
    if isinstance(transform, Standardizer):
        return {"kind": "standardizer", "state": transform.state(), "reconstructible": True}
    inner = transform
    while isinstance(inner, functools.partial):
        inner = inner.func
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return {"kind": "runtime", "name": qualified_name(named), "reconstructible": False}  # type: ignore[arg-type]
