"""From a model's outputs to a decision as one record, each link bound to the one below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.abstention import AbstentionPolicy, AbstentionResult
from nnx.calibration import (
    BoundCalibrator,
    CalibratedPrediction,
    RowSet,
    calibrator_from_state,
)
from nnx.calibration.arrays import identity
from nnx.conformal import ConformalSets, SetPrediction
from nnx.utils.artifacts import JsonArtifact
from nnx.utils.validation import show

from .costs import CostPolicy
from .errors import InvalidDecisionRequest

LINKS = ("calibrator", "conformal", "abstention", "costs")
_KEYS = ("model_id", *LINKS, "rows")


@dataclass(frozen=True, slots=True, eq=False)
class ChainDecision:
    """What a chain made of N rows. What the chain has no link for is ``None``.

    ``actions`` are (N,) names: the cheapest action, else the predicted label.
    """

    prediction: CalibratedPrediction
    sets: SetPrediction | None
    abstention: AbstentionResult | None
    actions: np.ndarray

    @property
    def accepted(self) -> np.ndarray:
        """(N,) whether the abstention policy lets a row's action stand; all without one."""
        if self.abstention is None:
            return np.ones(len(self.actions), dtype=bool)
        return self.abstention.accepted


@dataclass(frozen=True, slots=True)
class TrustChain(JsonArtifact):
    """Model, calibrator, conformal sets, abstention and costs as one document.

    Every link must have been fitted on the one below: the same model, labels and
    calibrator. ``rows`` maps "train", "calibrator", "conformal", "abstention" and
    "test" to the rows each was fitted or will be tested on, as far as they are
    known: rows that two of them share are refused, and :attr:`disjointness` says
    what was verified.
    """

    model_id: str
    calibrator: BoundCalibrator
    conformal: ConformalSets | None = None
    abstention: AbstentionPolicy | None = None
    costs: CostPolicy | None = None
    rows: Mapping[str, RowSet] | None = None

    FORMAT: ClassVar[str] = "nnx.trust-chain/1"
    _error: ClassVar[type[ValueError]] = InvalidDecisionRequest

    def __post_init__(self) -> None:
        identity("model_id", self.model_id, InvalidDecisionRequest)
        if not isinstance(self.calibrator, BoundCalibrator):
            raise InvalidDecisionRequest(f"calibrator is none: {show(self.calibrator)}")
        _same("calibrator", "model_id", self.calibrator.model_id, self.model_id)
        for name in LINKS[1:]:
            link = getattr(self, name)
            if link is None:
                continue
            _same(name, "model_id", link.model_id, self.model_id)
            _same(name, "labels", tuple(link.labels), self.calibrator.labels)
            _same(name, "calibrator_id", link.calibrator_id, self.calibrator.id)
        known = dict(self.rows or {})
        if self.conformal is not None and self.conformal.rows is not None:
            known.setdefault("conformal", self.conformal.rows)
        object.__setattr__(self, "rows", known)
        self._check_rows(known)

    @staticmethod
    def _check_rows(known: Mapping[str, RowSet]) -> None:
        names = list(known)
        allowed = {"train", "calibrator", "conformal", "abstention", "test"}
        if set(names) - allowed:
            raise InvalidDecisionRequest(f"rows are of {', '.join(sorted(allowed))}, not {names}")
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                shared = known[first].common(known[second])
                if shared:
                    raise InvalidDecisionRequest(
                        f"{shared} rows are both in {first} and in {second}; each link needs rows "
                        "that nothing before it was fitted on"
                    )

    @property
    def id(self) -> str:
        """The digest of the whole chain."""
        return self.digest()

    @property
    def disjointness(self) -> dict[str, str]:
        """Of each link "verified" (its rows are known and shared with none) or "unverified"."""
        present = ["train", *(name for name in LINKS[:3] if getattr(self, name) is not None)]
        known = self.rows or {}
        return {name: "verified" if name in known else "unverified" for name in present}

    def decide(self, logits: Any, *, model_id: str, sample_ids: Any = None) -> ChainDecision:
        """Decide about rows: (N, C) logits in the labels' order, or a prediction.

        ``model_id`` must be that of the chain (``model_fingerprint`` of the model
        at hand proves it).
        """
        labels = None if hasattr(logits, "spec") else self.calibrator.labels
        prediction = self.calibrator.transform(
            logits, model_id=model_id, labels=labels, sample_ids=sample_ids
        )
        probabilities = prediction.calibrated_probabilities
        actions = np.asarray(prediction.labels, dtype=object)[probabilities.argmax(1)]
        if self.costs is not None:
            actions = np.asarray(self.costs.actions, dtype=object)[self.costs.decide(probabilities)]
        return ChainDecision(
            prediction=prediction,
            sets=None if self.conformal is None else self.conformal.predict(prediction),
            abstention=None if self.abstention is None else self.abstention.apply(prediction),
            actions=actions,
        )

    def state(self) -> dict[str, Any]:
        links = {name: getattr(self, name) for name in LINKS}
        return {
            "format": self.FORMAT,
            "model_id": self.model_id,
            **{name: None if link is None else link.state() for name, link in links.items()},
            "rows": {name: rows.state() for name, rows in (self.rows or {}).items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrustChain:
        fields = cls._open(state, dict.fromkeys(_KEYS, True))
        readers: dict[str, Any] = {
            "calibrator": calibrator_from_state,
            "conformal": ConformalSets.from_state,
            "abstention": AbstentionPolicy.from_state,
            "costs": CostPolicy.from_state,
        }
        try:
            for name, read in readers.items():
                fields[name] = None if fields[name] is None else read(fields[name])
            fields["rows"] = {k: RowSet.from_state(v) for k, v in dict(fields["rows"]).items()}
        except (ValueError, TypeError) as error:
            raise InvalidDecisionRequest(f"a link of the chain is unreadable: {error}") from None
        return cls(**fields)


def _same(link: str, what: str, has: Any, wanted: Any) -> None:
    if has != wanted:
        raise InvalidDecisionRequest(
            f"{link} was fitted on {what} {show(has)}, but the chain has {show(wanted)}; fit it "
            "on this chain's probabilities"
        )
