"""Which rows something was fitted on, as hashes, so that "disjoint" can be verified."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import as_numpy
from .errors import CalibrationError


@dataclass(frozen=True, slots=True)
class RowSet:
    """The distinct rows of a split by 64-bit hashes, as base64 of the sorted little-endian values.

    Two different rows share a hash with a chance of 2^-64 for each pair, so that
    an overlap may be reported that is none, and none is missed.
    """

    hashes: str

    @staticmethod
    def of(rows: Any) -> RowSet:
        """Of (N, ...) inputs by their values, or of (N,) ids (integers or texts)."""
        ordered = np.unique(row_hashes(rows))
        return RowSet(base64.b64encode(ordered.tobytes()).decode())

    def __post_init__(self) -> None:
        try:
            values = self.values()
        except (ValueError, TypeError):
            raise CalibrationError("the hashes of a RowSet are base64 of 64-bit values") from None
        if not len(values) or (values[1:] <= values[:-1]).any():
            raise CalibrationError("the hashes of a RowSet are sorted and distinct")

    def values(self) -> np.ndarray:
        """The sorted hashes."""
        return np.frombuffer(base64.b64decode(self.hashes, validate=True), dtype="<u8")

    def __len__(self) -> int:
        """The number of distinct rows."""
        return len(self.values())

    def contains(self, rows: Any) -> np.ndarray:
        """(N,) whether each of ``rows``, given as to :meth:`of`, is among these."""
        return np.isin(row_hashes(rows), self.values())

    def common(self, other: RowSet) -> int:
        """How many rows both have."""
        return len(np.intersect1d(self.values(), other.values(), assume_unique=True))

    def state(self) -> dict[str, Any]:
        return {"hashes": self.hashes, "n": len(self)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RowSet:
        if not isinstance(state, Mapping) or set(state) != {"hashes", "n"}:
            raise CalibrationError("the state of a RowSet has the keys hashes and n")
        rows = RowSet(state["hashes"])
        if len(rows) != state["n"]:
            raise CalibrationError(f"a RowSet of {state['n']} rows has {len(rows)} hashes")
        return rows


def row_hashes(rows: Any) -> np.ndarray:
    """(N,) 64-bit hashes of (N, ...) inputs, or of (N,) ids."""
    values = as_numpy(rows, "rows", CalibrationError)
    if values.ndim == 0 or not len(values):
        raise CalibrationError("rows are an array with at least one row")
    if values.dtype.kind in "fiub":
        wide = np.float64 if values.dtype.kind == "f" else np.int64
        table = np.ascontiguousarray(values.reshape(len(values), -1).astype(wide)) + wide(0)
        parts = (row.tobytes() for row in table)
        tag = table.dtype.str.encode() + str(table.shape[1:]).encode()
    elif values.ndim == 1 and values.dtype.kind in "UO" and all(
        isinstance(value, str) for value in values.tolist()
    ):  # fmt: skip
        parts, tag = (str(value).encode() for value in values.tolist()), b"text"
    else:
        raise CalibrationError(f"rows are numbers or (N,) texts, not {values.dtype}")
    found = [hashlib.blake2b(part, digest_size=8, key=tag[:64]).digest() for part in parts]
    return np.frombuffer(b"".join(found), dtype="<u8")
