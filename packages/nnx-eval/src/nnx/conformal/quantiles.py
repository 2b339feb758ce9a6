"""The one quantile of conformal prediction, and what it guarantees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from nnx.calibration.rows import RowSet
from nnx.utils import validation as check
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.validation import show

from .errors import ConformalError

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = "nnx.conformal/1"
EVERYTHING = "all"  # the key of the one cell that is not conditional


def check_alpha(alpha: Any) -> float:
    """An error level strictly between 0 and 1."""
    try:
        return float(check.real("conformal", "alpha", alpha, above=0, below=1))
    except ValueError as error:
        raise ConformalError(str(error)) from None


def conformal_rank(n: int, alpha: float) -> int:
    """``ceil((n + 1) * (1 - alpha))``, exact in the decimals of ``alpha``."""
    return math.ceil((n + 1) * (1 - Fraction(repr(float(alpha)))))


@dataclass(frozen=True, slots=True)
class Cell:
    """The calibration of one group: its rows, the rank used, and the score of that rank.

    ``threshold`` is ``None`` when ``rank`` is beyond ``n``: everything is then
    in the set, since so few rows promise nothing smaller.
    """

    n: int
    rank: int
    threshold: float | None

    @staticmethod
    def of(scores: np.ndarray, alpha: float) -> Cell:
        """The cell of the scores of its calibration rows."""
        n = len(scores)
        rank = conformal_rank(n, alpha)
        if rank > n:
            return Cell(n, rank, None)
        return Cell(n, rank, float(np.partition(scores, rank - 1)[rank - 1]))

    @property
    def level(self) -> float:
        """The coverage that is guaranteed: rank / (n + 1), or 1 for everything."""
        return min(1.0, self.rank / (self.n + 1))

    @property
    def limit(self) -> float:
        """The threshold as a number; infinite for everything."""
        return math.inf if self.threshold is None else self.threshold

    def state(self) -> dict[str, Any]:
        return {"n": self.n, "rank": self.rank, "threshold": self.threshold}

    @staticmethod
    def from_state(state: Any, alpha: float) -> Cell:
        """Rebuild from :meth:`state`; a rank that is not that of ``n`` and alpha is refused."""
        if not isinstance(state, Mapping) or set(state) != {"n", "rank", "threshold"}:
            raise ConformalError("a cell has the keys n, rank and threshold")
        n, rank, threshold = state["n"], state["rank"], state["threshold"]
        if type(n) is not int or n < 0 or rank != conformal_rank(n, alpha):
            raise ConformalError(f"a cell of {show(n)} rows at alpha {alpha} has no rank {rank!r}")
        if (threshold is None) != (rank > n):
            raise ConformalError(f"rank {rank} of {n} rows does not have threshold {threshold!r}")
        if threshold is not None and (
            isinstance(threshold, bool)
            or not isinstance(threshold, (int, float))
            or not math.isfinite(threshold)
        ):
            raise ConformalError(f"threshold must be a finite number, not {show(threshold)}")
        return Cell(n, rank, None if threshold is None else float(threshold))


def cells_of(scores: np.ndarray, keys: np.ndarray | None, alpha: float) -> dict[str, Cell]:
    """A cell for each key, or one for everything."""
    if not np.isfinite(scores).all():
        raise ConformalError("conformity scores must be finite")
    if keys is None:
        return {EVERYTHING: Cell.of(scores, alpha)}
    return {str(key): Cell.of(scores[keys == key], alpha) for key in np.unique(keys).tolist()}


def limits_of(cells: Mapping[str, Cell], keys: np.ndarray | None, rows: int) -> np.ndarray:
    """The threshold of each row; infinite for a group that was not calibrated."""
    if keys is None:
        return np.full(rows, cells[EVERYTHING].limit)
    known = {key: cell.limit for key, cell in cells.items()}
    return np.array([known.get(key, math.inf) for key in keys.tolist()], dtype=np.float64)


def group_keys(groups: Any, rows: int) -> np.ndarray:
    """(N,) groups, integers or texts, as texts."""
    values = np.asarray(groups)
    if values.shape != (rows,) or values.dtype.kind not in "iuUO":
        raise ConformalError(
            f"groups are one integer or text for each of {rows} rows, not {values.dtype} of "
            f"{values.shape}"
        )
    return np.asarray([str(value) for value in values.tolist()], dtype=object)


def guarantee(cells: Mapping[str, Cell], alpha: float, what: str, conditional: str) -> str:
    """The promise in words and numbers."""
    lines = [
        f"{what} hold the truth with probability at least {1 - alpha:g}{conditional}, over "
        "calibration rows and a new row that are exchangeable; ties count as inside"
    ]
    for key, cell in cells.items():
        name = "" if key == EVERYTHING else f"{key}: "
        if cell.threshold is None:
            lines.append(
                f"{name}n = {cell.n} is too few (rank {cell.rank} is needed): everything is inside"
            )
        else:
            lines.append(
                f"{name}n = {cell.n}, rank {cell.rank}, attained level "
                f"{cell.rank}/{cell.n + 1} = {cell.level:.6g}"
            )
    return "; ".join(lines)


class ConformalArtifact(JsonArtifact):
    """Base of what is calibrated to a level: its digest, and its stored form.

    A subclass states its ``KIND`` and, as ``KEYS``, the fields that are stored.
    """

    __slots__ = ()
    FORMAT: ClassVar[str] = FORMAT
    KIND: ClassVar[str]
    KEYS: ClassVar[tuple[str, ...]]
    _error: ClassVar[type[ValueError]] = ConformalError
    cells: Mapping[str, Cell]
    rows: RowSet | None

    @property
    def id(self) -> str:
        """The digest."""
        return self.digest()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"format": FORMAT, "kind": self.KIND}
        for name in self.KEYS:
            value = getattr(self, name)
            state[name] = list(value) if isinstance(value, tuple) else value
        state["cells"] = {key: cell.state() for key, cell in self.cells.items()}
        state["rows"] = None if self.rows is None else self.rows.state()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        fields = cls._open(state, dict.fromkeys(cls.KEYS, True), kind=cls.KIND)
        alpha = check_alpha(fields["alpha"])
        if not isinstance(fields["cells"], Mapping) or not fields["cells"]:
            raise ConformalError(f"cells are a mapping of groups, not {show(fields['cells'])}")
        fields["cells"] = {key: Cell.from_state(c, alpha) for key, c in fields["cells"].items()}
        if fields["rows"] is not None:
            try:
                fields["rows"] = RowSet.from_state(fields["rows"])
            except ValueError as error:
                raise ConformalError(str(error)) from None
        return cls(**fields)
