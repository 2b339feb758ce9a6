"""Two denominators: coverage over every row, risk over the accepted rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from nnx.utils import validation as check
from nnx.utils.artifacts import JsonArtifact

from .errors import AbstentionError, AbstentionSchemaError
from .scores import unit

if TYPE_CHECKING:
    from .result import AbstentionResult

FORMAT = "nnx.abstention/1"


class _Counted:
    """Coverage and risk of three counts."""

    __slots__ = ()
    accepted: int
    incorrect: int
    total: int

    def _check_counts(self) -> None:
        for name in ("total", "accepted", "incorrect"):
            try:
                check.count(type(self).__name__, name, getattr(self, name), at_least=0)
            except ValueError as error:
                raise AbstentionError(str(error)) from None
        if not self.incorrect <= self.accepted <= self.total:
            raise AbstentionError(
                f"{type(self).__name__} counts {self.incorrect} incorrect of {self.accepted} "
                f"accepted of {self.total} rows"
            )

    @property
    def coverage(self) -> float | None:
        """accepted / total; ``None`` of no rows at all."""
        return self.accepted / self.total if self.total else None

    @property
    def risk(self) -> float | None:
        """incorrect / accepted; ``None``, never 0, when nothing was accepted."""
        return self.incorrect / self.accepted if self.accepted else None

    @property
    def selective_risk(self) -> float | None:
        """:attr:`risk` by its full name."""
        return self.risk

    @property
    def status(self) -> str:
        """ "ok", or "no_accepted" where there is no risk to speak of."""
        return "ok" if self.accepted else "no_accepted"


@dataclass(frozen=True, slots=True)
class CurvePoint(_Counted):
    """What one threshold accepts. Without a threshold it is the end that accepts nothing."""

    threshold: float | None
    accepted: int
    incorrect: int
    total: int

    def __post_init__(self) -> None:
        self._check_counts()
        if self.threshold is not None:
            object.__setattr__(self, "threshold", unit("threshold", self.threshold))

    @property
    def deployable(self) -> bool:
        """Whether a policy can have this threshold and accepts something with it."""
        return self.threshold is not None and self.accepted > 0

    def state(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "accepted": self.accepted,
            "incorrect": self.incorrect,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True, eq=False)
class CoverageReport(_Counted, JsonArtifact):
    """Coverage and selective risk of a set of rows, with the ids of all of them."""

    policy_id: str | None
    total: int
    accepted: int
    incorrect: int
    sample_ids: np.ndarray
    accepted_ids: np.ndarray

    FORMAT: ClassVar[str] = FORMAT
    _error: ClassVar[type[ValueError]] = AbstentionError

    def __post_init__(self) -> None:
        self._check_counts()
        for name, count in (("sample_ids", self.total), ("accepted_ids", self.accepted)):
            ids = np.asarray(getattr(self, name))
            if ids.shape != (count,):
                raise AbstentionError(f"a report of {count} rows has {ids.shape} {name}")
            object.__setattr__(self, name, ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoverageReport) and self.state() == other.state()

    __hash__ = None  # type: ignore[assignment]

    def summary(self) -> str:
        """One sentence with both denominators."""
        if not self.accepted:
            return f"0 of {self.total} rows accepted; the selective risk is unavailable"
        return (
            f"{self.accepted} of {self.total} rows accepted (coverage {self.coverage:.4g}), "
            f"{self.incorrect} of them incorrect (selective risk {self.risk:.4g})"
        )

    def state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "type": "coverage",
            "policy_id": self.policy_id,
            "total": self.total,
            "accepted": self.accepted,
            "incorrect": self.incorrect,
            "sample_ids": self.sample_ids.tolist(),
            "accepted_ids": self.accepted_ids.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CoverageReport:
        names = ("policy_id", "total", "accepted", "incorrect", "sample_ids", "accepted_ids")
        fields = open_typed(cls, state, dict.fromkeys(names, True), "coverage")
        for name in ("sample_ids", "accepted_ids"):
            fields[name] = ids_array(fields[name])
        return cls(**fields)


def ids_array(values: Any) -> np.ndarray:
    """Stored sample ids: integers or texts."""
    kinds = {type(v) for v in values} if isinstance(values, (list, tuple)) else {type(values)}
    if not kinds <= {int} and not kinds <= {str}:
        raise AbstentionError("sample ids are a list of integers or of texts")
    return np.asarray(values, dtype=object if kinds == {str} else np.int64)


def open_typed(
    cls: type[JsonArtifact], state: Any, keys: Mapping[str, bool], type_: str
) -> dict[str, Any]:
    """The fields of a document of this format and type."""
    fields = cls._open(state, {**keys, "type": True})
    if fields.pop("type") != type_:
        raise AbstentionError(f"this {FORMAT} document is no {type_}, but a {state['type']}")
    return fields


class CoverageAccumulator:
    """The report of a split that arrives in chunks; exactly that of the whole.

    An id that was seen before is refused, since the default ids 0 to n-1 repeat
    from chunk to chunk; ``allow_repeated_ids`` is for a split whose own repeat.
    """

    def __init__(self, *, allow_repeated_ids: bool = False) -> None:
        self._repeat = check.flag("CoverageAccumulator", "allow_repeated_ids", allow_repeated_ids)
        self._seen: set[Any] = set()
        self._ids: list[Any] = []
        self._accepted: list[Any] = []
        self._incorrect = 0
        self._bound: tuple[str, Mapping[str, Any] | None] | None = None

    def update(self, result: AbstentionResult, targets: Any) -> None:
        """Add one chunk; a refused one leaves the sums as they were."""
        bound = (result.policy_id, result.calibration_override)
        if self._bound is not None and self._bound != bound:
            raise AbstentionSchemaError(
                "this chunk was decided by another policy, or under another calibration override"
            )
        report = result.report(targets)
        ids = report.sample_ids.tolist()
        if self._ids and ids and type(ids[0]) is not type(self._ids[0]):
            raise AbstentionError("this chunk's sample_ids are of another type than earlier ones")
        if not self._repeat:
            fresh = set(ids)
            repeated = fresh & self._seen
            if repeated or len(fresh) != len(ids):
                shown = next(iter(repeated)) if repeated else "one of its own"
                raise AbstentionError(
                    f"sample id {shown!r} repeats; give each chunk its own sample_ids=, or "
                    "CoverageAccumulator(allow_repeated_ids=True) when the split repeats rows"
                )
            self._seen |= fresh
        self._bound = bound
        self._ids += ids
        self._accepted += report.accepted_ids.tolist()
        self._incorrect += report.incorrect

    def report(self) -> CoverageReport:
        """Of everything added."""
        return CoverageReport(
            policy_id=None if self._bound is None else self._bound[0],
            total=len(self._ids),
            accepted=len(self._accepted),
            incorrect=self._incorrect,
            sample_ids=ids_array(self._ids),
            accepted_ids=ids_array(self._accepted),
        )
