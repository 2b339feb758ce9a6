"""A pandas DataFrame as loaders of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from nnx.data.base import (
    BatchSizes,
    NNDatasetBase,
    checked_batch_sizes,
    checked_proportions,
    random_parts,
)
from nnx.data.columns import Array, is_frame, locate_columns, numeric_array
from nnx.data_splits import SplitManifest
from nnx.errors import NNxError
from nnx.plugins.siblings import install_line
from nnx.preprocessing import Standardizer
from nnx.utils import validation as check
from nnx.utils.identity import IdentityRef

if TYPE_CHECKING:
    import pandas as pd

_OWNER = "NNTabularDataset"


@dataclass
class NNTabularDataset(NNDatasetBase):
    """Columns of ``df`` as ``(features, target)`` batches for three splits.

    Features are ``(B, len(feature_cols))`` of ``feature_dtype``. Targets are
    ``(B,)`` class indices (``int64``) by default, from 0 on without a gap (negative
    ones may mark rows to ignore), and ``(B, 1)`` values for a floating
    ``target_dtype`` (a regression; NaN marks an unknown target). ``output_dim`` is
    the number of classes, or 1.

    Rows are split by ``random_split`` (``seed``, or the global torch stream), or
    by ``split`` (without a ``seed``), a manifest over the ids in ``id_col`` that asks for its
    ``source_identity`` again. ``standardize=True`` fits a ``standardizer`` on the
    training rows; a fitted one is applied as it is. ``df`` is never changed.
    ``batch_sizes`` are (train, val, test), ``None`` for the whole split.
    """

    df: pd.DataFrame
    feature_cols: list[str]
    target_col: str
    batch_sizes: BatchSizes = (None, None, None)
    val_proportion: float = 0.15
    test_proportion: float = 0.15
    name_override: str | None = None
    feature_dtype: torch.dtype = torch.float32
    target_dtype: torch.dtype | None = None
    seed: int | None = None
    split: SplitManifest | None = None
    id_col: str | None = None
    source_identity: IdentityRef | str | None = None
    standardize: bool | Standardizer = False
    standardizer: Standardizer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._check()
        stream = torch.get_rng_state()
        try:
            self._build()
        except BaseException:
            torch.set_rng_state(stream)  # the draw of a split that came to nothing
            raise

    def _build(self) -> None:
        parts, excluded = self._membership()
        admitted = np.setdiff1d(np.arange(len(self.df)), np.asarray(excluded, dtype=np.int64))
        self._fit(parts[0])
        X = self._features(admitted)
        y = self._targets(admitted)
        self.name = self.name_override or "tabular"
        self.input_dim = len(self.feature_cols)
        table = TensorDataset(X, y)
        self._publish([Subset(table, list(rows)) for rows in parts], self.batch_sizes)

    def state(self) -> dict[str, Any]:
        """What the dataset is, with the number of rows in each split."""
        state = super().state()
        for name in ("train", "val", "test"):
            loader = getattr(self, f"{name}_loader")
            state[f"{name}_size"] = 0 if loader is None else len(loader.dataset)
        if self.split is not None:
            state["split"] = self.split.digest()
        if self.standardizer is not None:
            state["standardizer"] = self.standardizer.state()
        return state

    # -- refusals, before anything is drawn or read ------------------------------------

    def _check(self) -> None:
        self.batch_sizes = checked_batch_sizes(_OWNER, self.batch_sizes)
        self._proportions = checked_proportions(
            _OWNER, val_proportion=self.val_proportion, test_proportion=self.test_proportion
        )
        if not is_frame(self.df):
            raise TypeError(
                f"NNTabularDataset.df must be a pandas DataFrame, not {type(self.df).__name__} "
                f"(pandas comes with: {install_line('nnx-core', 'tabular')})"
            )
        columns: Any = self.feature_cols
        if isinstance(columns, (str, bytes)) or not hasattr(columns, "__iter__"):
            check.refuse(_OWNER, "feature_cols", columns, "a list of column labels")
        self.feature_cols = list(columns)
        if not self.feature_cols:
            check.refuse(_OWNER, "feature_cols", self.feature_cols, "a list of column labels")
        if self.target_col in self.feature_cols:
            raise ValueError(f"the target column {self.target_col!r} is among feature_cols")
        ids = [] if self.id_col is None else [self.id_col]
        self._places = locate_columns(self.df, list(self.feature_cols), _ColumnError)
        self._target = locate_columns(self.df, [self.target_col], _ColumnError)[0]
        self._id = [locate_columns(self.df, [i], _ColumnError)[0] for i in ids]
        if not len(self.df):
            raise ValueError("NNTabularDataset.df has no rows")
        if self.seed is not None:
            self.seed = check.integer(_OWNER, "seed", self.seed)
        self._check_split()
        self._check_standardize()

    def _check_split(self) -> None:
        if self.split is None:
            if self.source_identity is not None:
                raise ValueError(
                    "source_identity is checked against a split manifest, and split is None"
                )
            return
        check.instance(_OWNER, "split", self.split, SplitManifest)
        if self.seed is not None:
            raise ValueError(
                f"{_OWNER}.seed draws a split, and split= gives one already; pass one of them"
            )
        if self.split.ids == "sample" and not self._id:
            raise ValueError(
                "this split names samples by id: say which column holds the ids with id_col="
            )
        if self.split.ids == "position" and self._id:
            raise ValueError("this split holds row positions, so id_col cannot be used with it")

    def _check_standardize(self) -> None:
        fitted = self.standardize
        if isinstance(fitted, bool):
            if fitted and not self.feature_dtype.is_floating_point:
                check.refuse(_OWNER, "feature_dtype", self.feature_dtype, "floating to standardize")
            return
        check.instance(_OWNER, "standardize", fitted, (bool, Standardizer))
        if fitted.columns != tuple(self.feature_cols):
            raise ValueError(
                f"the standardizer was fitted on {fitted.columns}, "
                f"but feature_cols are {list(self.feature_cols)}"
            )
        if f"torch.{fitted.dtype}" != str(self.feature_dtype):
            raise ValueError(
                f"the standardizer gives {fitted.dtype}, but feature_dtype is {self.feature_dtype}"
            )

    # -- the parts -------------------------------------------------------------------

    def _membership(self) -> tuple[list[Any], Any]:
        """Row positions of the three splits, and of the rows left out."""
        if self.split is None:
            rows: Any = range(len(self.df))
            parts = random_parts(rows, self._proportions, self.seed)
            return [part.indices for part in parts], ()  # type: ignore[attr-defined]
        ids = self.df.iloc[:, self._id[0]] if self._id else range(len(self.df))
        found = self.split.resolve(ids, source=self.source_identity)
        return [found.train, found.validation, found.test], found.excluded

    def _fit(self, rows: Any) -> None:
        if isinstance(self.standardize, Standardizer):
            self.standardizer = self.standardize
        elif self.standardize:
            self.standardizer = Standardizer.fit(
                self.df,
                rows=rows,
                columns=list(self.feature_cols),
                dtype=self.feature_dtype,
                membership=self.split,
            )

    def _features(self, admitted: Array) -> torch.Tensor:
        """All rows; those left out stay zero and are in no split."""
        everything = len(admitted) == len(self.df)
        X = torch.zeros(len(self.df), len(self.feature_cols), dtype=self.feature_dtype)
        if self.standardizer is not None:
            frame = self.df.iloc[:, self._places]
            rows = frame if everything else frame.iloc[admitted]
            X[torch.from_numpy(admitted)] = self.standardizer.transform(rows)
            return X
        for j, place in enumerate(self._places):
            column = self.df.iloc[:, place]
            label = f"feature column {self.feature_cols[j]!r}"
            values = numeric_array(
                column if everything else column.iloc[admitted], label, ValueError
            )
            X[torch.from_numpy(admitted), j] = exactly(values, self.feature_dtype, label, admitted)
        return X

    def _targets(self, admitted: Array) -> torch.Tensor:
        label = f"target column {self.target_col!r}"
        values = numeric_array(self.df.iloc[admitted, self._target], label, ValueError)
        dtype = self.target_dtype
        if dtype is None:
            dtype = torch.int64
            if values.dtype.kind == "f" and not (values == np.floor(values)).all():
                row = int(np.argmax(values != np.floor(values)))
                raise ValueError(
                    f"{label} holds {values[row]} in row {admitted[row]}, which is not a class "
                    f"index; for a regression pass target_dtype=torch.float32"
                )
        y = torch.zeros(len(self.df), dtype=dtype)
        y[torch.from_numpy(admitted)] = exactly(
            values, dtype, label, admitted, missing=dtype.is_floating_point
        )
        if dtype.is_floating_point:
            self.output_dim = 1
            return y[:, None]
        self.output_dim = _count_classes(y[torch.from_numpy(admitted)], label)
        return y


def _count_classes(y: torch.Tensor, label: str) -> int:
    present = torch.unique(y[y >= 0]).tolist()
    if not present:
        raise ValueError(f"{label} holds no class: every value is negative")
    missing = next((i for i, c in enumerate(present) if i != c), None)
    if missing is not None:
        raise ValueError(
            f"{label} has a gap: no row is of class {missing}, and the highest class is "
            f"{present[-1]}. Number the classes from 0 on without gaps, for example with "
            f'.astype("category").cat.codes'
        )
    return len(present)


class _ColumnError(ValueError, NNxError):
    def __init__(self, message: str) -> None:
        super().__init__(f"NNTabularDataset: {message}")


def exactly(
    values: Array, dtype: torch.dtype, label: str, rows: Array, *, missing: bool = False
) -> torch.Tensor:
    """``values`` as ``dtype``. One that it cannot hold is refused with its row.

    ``missing`` allows NaN. Rounding to a narrower float is no loss here.
    """
    if values.dtype.kind == "f":
        wrong = np.isinf(values) if missing else ~np.isfinite(values)
        _refuse(wrong, values, label, rows, "is not finite; drop or impute it first")
    if values.dtype.kind == "u":
        values = values.astype(np.int64) if values.max(initial=0) < 2**63 else values.astype(float)
    result = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(dtype)
    if dtype.is_floating_point:
        wrong = torch.isinf(result).numpy()
    else:
        back = result.to(torch.float64 if values.dtype.kind == "f" else torch.int64).numpy()
        wrong = back != values
    _refuse(wrong, values, label, rows, f"does not fit {dtype}")
    return result


def _refuse(wrong: Array, values: Array, label: str, rows: Array, problem: str) -> None:
    if wrong.any():
        first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(f"{label}, row {rows[first[0]]}: {values[first]} {problem}")
