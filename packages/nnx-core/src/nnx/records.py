"""What a run remembers of its training: evaluation and iteration records.

The records are plain, frozen values. ``state()`` gives nested dictionaries of
numbers, strings and ``None``; ``from_state`` takes them back. Importing this
module loads neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nnx.utils import flat_rows
from nnx.utils.jsonlike import FrozenDict

if TYPE_CHECKING:
    import numpy as np

    from nnx.params import MonitorRecord

_NOTHING: FrozenDict[str, float] = FrozenDict()


def _nothing() -> FrozenDict[str, float]:
    return _NOTHING  # one for all: a record is made for every batch


_SCORES = ("f1", "recall", "accuracy", "precision", "loss", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class NNEvaluationDataPoint:
    """Scores of one batch, one loader or one epoch; unknown ones are ``None``.

    ``extra`` holds the user's own metric functions, ``metrics`` the declared
    and task metrics; both are read-only copies. ``kind``, ``count`` (valid targets) and ``status`` ("ok"
    or "empty") are set by a declared task.
    """

    f1: float | None = None
    recall: float | None = None
    accuracy: float | None = None
    precision: float | None = None
    loss: float | None = None
    error: float | None = None
    extra: Mapping[str, float] = field(default_factory=_nothing)
    kind: str | None = None
    count: int | None = None
    status: str | None = None
    metrics: Mapping[str, float] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        if type(self.extra) is not FrozenDict:
            object.__setattr__(self, "extra", FrozenDict(self.extra))
        if type(self.metrics) is not FrozenDict:
            object.__setattr__(self, "metrics", FrozenDict(self.metrics))

    def state(self) -> dict[str, Any]:
        """The six scores always; everything else only when set.

        Numbers of NumPy and torch are given as plain floats.
        """
        state: dict[str, Any] = {
            "f1": _plain(self.f1),
            "recall": _plain(self.recall),
            "accuracy": _plain(self.accuracy),
            "precision": _plain(self.precision),
            "loss": _plain(self.loss),
            "error": _plain(self.error),
        }
        if self.extra:
            state["extra"] = {name: _plain(value) for name, value in self.extra.items()}
        if self.kind is not None:
            state["kind"] = self.kind
        if self.count is not None:
            state["count"] = self.count
        if self.status is not None:
            state["status"] = self.status
        if self.metrics:
            state["metrics"] = {name: _plain(value) for name, value in self.metrics.items()}
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NNEvaluationDataPoint:
        """Rebuild from :meth:`state`; scores that are absent are ``None``."""
        count = state.get("count")
        return NNEvaluationDataPoint(
            f1=state.get("f1"),
            recall=state.get("recall"),
            accuracy=state.get("accuracy"),
            precision=state.get("precision"),
            loss=state.get("loss"),
            error=state.get("error"),
            extra=FrozenDict(state.get("extra") or ()),
            kind=state.get("kind"),
            count=None if count is None else int(count),
            status=state.get("status"),
            metrics=FrozenDict(state.get("metrics") or ()),
        )

    @staticmethod
    def of(
        Y: np.ndarray,
        Y_hat: np.ndarray,
        average: str = "macro",
        extra_metrics: Mapping[str, Callable[..., float]] | None = None,
    ) -> NNEvaluationDataPoint:
        """Accuracy, F1, precision and recall of decoded predictions.

        ``Y`` and ``Y_hat`` are ``(N,)`` class labels, or ``(N, L)`` 0/1
        indicators, whose accuracy counts rows with every label right.
        ``average`` reduces over classes ("macro", "micro", "weighted", or
        "binary" for the class 1); a class without a defined ratio counts 0.
        Each of ``extra_metrics`` is called once as ``fn(Y, Y_hat)``.
        """
        from nnx.tasks.scores import classification_scores

        scores = classification_scores(Y, Y_hat, average)
        if scores.accuracy is None:
            raise ValueError("Y is empty: there is nothing to score")
        extra = {name: float(fn(Y, Y_hat)) for name, fn in (extra_metrics or {}).items()}
        return NNEvaluationDataPoint(**scores._asdict(), extra=extra)

    @staticmethod
    def mean_of(edps: list[NNEvaluationDataPoint]) -> NNEvaluationDataPoint:
        """The unweighted mean of several records, metric by metric.

        Each record counts once, whatever its number of samples: right for
        averaging runs, wrong for averaging batches. A metric that only some
        records hold is averaged over those.
        """
        if not edps:
            raise ValueError("mean_of needs at least one record; got an empty list")
        scores: dict[str, Any] = {
            name: _mean([getattr(edp, name) for edp in edps]) for name in _SCORES
        }
        return NNEvaluationDataPoint(
            **scores,
            extra=_mean_of_maps([edp.extra for edp in edps]),
            metrics=_mean_of_maps([edp.metrics for edp in edps]),
        )

    def with_loss(self, value: float) -> NNEvaluationDataPoint:
        return replace(self, loss=value)

    def with_error(self, value: float) -> NNEvaluationDataPoint:
        return replace(self, error=value)

    def with_extra(self, name: str, value: float) -> NNEvaluationDataPoint:
        """A copy that also holds ``extra[name] = value``."""
        return replace(self, extra={**self.extra, name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class NNIterationDataPoint:
    """One training batch: a row of a run's history.

    ``train_edp`` scores this batch alone. An epoch's last row also carries the
    validation scores and, in runs that declare metrics or a monitor, the
    whole-epoch ``train_summary`` and the monitor's decision ``selection``.
    ``update_count`` is the number of committed optimizer updates so far, where
    they are counted.
    """

    lr: float
    iter_idx: int
    epoch_idx: int
    batch_idx: int
    train_edp: NNEvaluationDataPoint
    val_edp: NNEvaluationDataPoint | None = None
    train_summary: NNEvaluationDataPoint | None = None
    selection: MonitorRecord | None = None
    update_count: int | None = None

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "lr": _plain(self.lr),
            "iter_idx": self.iter_idx,
            "epoch_idx": self.epoch_idx,
            "batch_idx": self.batch_idx,
            "train_edp": self.train_edp.state(),
            "val_edp": None if self.val_edp is None else self.val_edp.state(),
        }
        if self.train_summary is not None:
            state["train_summary"] = self.train_summary.state()
        if self.selection is not None:
            state["selection"] = self.selection.state()
        if self.update_count is not None:
            state["update_count"] = self.update_count
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NNIterationDataPoint:
        """Rebuild from :meth:`state`, or from a flat row of ``idps.csv`` as a mapping."""
        if "train_edp" not in state and any("." in key for key in state):
            state = flat_rows.nested(state)
        edp = NNEvaluationDataPoint.from_state
        val, summary = state.get("val_edp"), state.get("train_summary")
        count = state.get("update_count")
        return NNIterationDataPoint(
            lr=float(state["lr"]),
            iter_idx=int(state["iter_idx"]),
            epoch_idx=int(state["epoch_idx"]),
            batch_idx=int(state["batch_idx"]),
            train_edp=edp(state["train_edp"]),
            val_edp=None if val is None else edp(val),
            train_summary=None if summary is None else edp(summary),
            selection=_selection(state.get("selection")),
            update_count=None if count is None else int(count),
        )

    def monitored_train_edp(self) -> NNEvaluationDataPoint:
        """The whole-epoch training summary where there is one, else this batch."""
        return self.train_edp if self.train_summary is None else self.train_summary

    def with_val_edp(self, value: NNEvaluationDataPoint | None) -> NNIterationDataPoint:
        return replace(self, val_edp=value)

    def with_epoch_summary(
        self, train_summary: NNEvaluationDataPoint | None, selection: MonitorRecord | None
    ) -> NNIterationDataPoint:
        return replace(self, train_summary=train_summary, selection=selection)


@dataclass(frozen=True, slots=True)
class Signal:
    """The value that an epoch is judged by when no monitor is declared.

    ``source`` names the field it came from, ``rejected`` the non-finite fields that
    were passed over. ``diverged`` says that one of them is a loss: whatever its other
    scores say, such an epoch is never the best.
    """

    value: float | None
    source: str | None
    rejected: tuple[str, ...] = ()
    diverged: bool = False

    @property
    def score(self) -> float:
        """How good the epoch is, lower is better: +inf without a value and for a diverged one."""
        return math.inf if self.value is None or self.diverged else self.value


SIGNAL_FIELDS = ("val_edp.error", "val_edp.loss", "train_edp.error", "train_edp.loss")


def control_signal(idp: NNIterationDataPoint, fields: Sequence[str] = SIGNAL_FIELDS) -> Signal:
    """The first finite value of ``fields``: what BEST, the election and early stopping read.

    A validation record of a task that holds nothing (every target masked) ends the
    walk: the training values never stand in for it.
    """
    rejected: list[str] = []
    diverged = False
    for split, paths in groupby(fields, lambda path: path.partition(".")[0]):
        record = getattr(idp, split)
        if record is None:
            continue
        known = {path: v for path in paths if (v := field_value(idp, path)) is not None}
        finite = {path: value for path, value in known.items() if math.isfinite(value)}
        rejected += [f"{path}={v}" for path, v in known.items() if path not in finite]
        diverged |= any(path.endswith(".loss") for path in known.keys() - finite.keys())
        for path, value in finite.items():
            return Signal(float(value), path, tuple(rejected), diverged)
        if split == "val_edp" and _unavailable(record):
            break
    return Signal(None, None, tuple(rejected), diverged)


def field_value(idp: NNIterationDataPoint, path: str) -> float | None:
    """The number that ``"val_edp.loss"`` and its kind name; ``None`` when there is none."""
    record, _, name = path.partition(".")
    edp = getattr(idp, record)
    return None if edp is None else getattr(edp, name)


def _unavailable(record: NNEvaluationDataPoint) -> bool:
    if record.status == "empty":
        return True
    return record.kind is not None and record.error is None and record.loss is None


_OPTIONAL_STATUS = (
    "source_epoch", "source_generation", "source_checkpoint_id", "best_run_id", "best_epoch",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStatus:
    """What a fit restored at its start, and from which point of which run.

    ``best_run_id`` and ``best_epoch`` name the BEST checkpoint that it took over: the
    run that wrote it, and when.
    """

    mode: str = "fresh"
    source_run_id: str | None = None
    source_checkpoint: str | None = None
    restored_components: tuple[str, ...] = ()
    fresh_components: tuple[str, ...] = ()
    source_epoch: int | None = None
    source_generation: int | None = None
    source_checkpoint_id: str | None = None
    best_run_id: str | None = None
    best_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("fresh", "stateful", "weights_only"):
            raise ValueError(
                f"mode must be 'fresh', 'stateful' or 'weights_only', not {self.mode!r}"
            )
        object.__setattr__(self, "restored_components", tuple(self.restored_components))
        object.__setattr__(self, "fresh_components", tuple(self.fresh_components))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "mode": self.mode,
            "source_run_id": self.source_run_id,
            "source_checkpoint": self.source_checkpoint,
            "restored_components": list(self.restored_components),
            "fresh_components": list(self.fresh_components),
        }
        for name in _OPTIONAL_STATUS:
            value = getattr(self, name)
            if value is not None:
                state[name] = value
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ResumeStatus:
        return ResumeStatus(
            mode=state.get("mode", "fresh"),
            source_run_id=state.get("source_run_id"),
            source_checkpoint=state.get("source_checkpoint"),
            restored_components=tuple(state.get("restored_components") or ()),
            fresh_components=tuple(state.get("fresh_components") or ()),
            **{name: state.get(name) for name in _OPTIONAL_STATUS},
        )


def _plain(value: Any) -> Any:
    return value if type(value) is float or value is None else float(value)


def _selection(state: Mapping[str, Any] | None) -> MonitorRecord | None:
    if state is None:
        return None
    from nnx.params import MonitorRecord

    return MonitorRecord.from_state(state)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_of_maps(maps: list[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in maps for name in values)
    return {n: sum(m[n] for m in maps if n in m) / sum(n in m for m in maps) for n in names}
