"""Exact figures of link predictions, from all of the candidates at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nnx.link_tasks.split import LinkTaskError
from nnx.utils import validation as check

TIES = ("pessimistic", "average", "optimistic")


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A figure, or why there is none."""

    value: float | None
    reason: str | None = None

    @property
    def available(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


def link_metrics(
    probabilities: Any, targets: Any, *, from_logits: bool = False
) -> dict[str, MetricValue]:
    """AUROC, AP and BCE of binary candidates ``(K,)``, accuracy and NLL of categories ``(K, C)``.

    ``targets`` are 0 or 1, or category indices. Everything is computed in float64 over
    all candidates; equal scores count as one threshold. ``from_logits=True`` scores raw
    outputs: a probability that rounds to 1 would tie candidates that logits tell apart.

    AUROC and AP of a set of one class are unavailable, and say why. Raises
    :class:`LinkTaskError` for shapes that do not fit, values that are not finite or no
    probabilities, and targets that are no classes.
    """
    scores = _array(probabilities, "logits" if from_logits else "probabilities")
    wanted = np.asarray(_array(targets, "targets"))
    if scores.ndim not in (1, 2) or wanted.shape != scores.shape[:1]:
        raise LinkTaskError(
            f"scores of shape {scores.shape} and targets of shape {wanted.shape} do not fit; "
            "give (K,) or (K, categories) scores and (K,) targets"
        )
    if not len(scores):
        reason = "there is no candidate"
        names = ("auroc", "ap", "bce") if scores.ndim == 1 else ("accuracy", "nll")
        return {name: MetricValue(None, reason) for name in names}
    if not from_logits and (scores.min() < 0 or scores.max() > 1):
        raise LinkTaskError("probabilities must lie in [0, 1]; pass from_logits=True for logits")
    if scores.ndim == 2:
        return _categorical(scores, wanted, from_logits)
    positive = _binary(wanted)
    auroc, ap = ranked(scores, positive)
    return {
        "auroc": auroc,
        "ap": ap,
        "bce": MetricValue(float(_bce(scores, positive, from_logits).mean())),
    }


def link_ranking(
    scores: Any, targets: Any, *, k: Sequence[int] = (10, 50, 100), ties: str = "pessimistic"
) -> dict[str, MetricValue]:
    """``hits@k`` and ``mrr`` of binary candidates, each positive ranked among all negatives.

    The rank of a positive is one more than the negatives that score higher, plus those of
    the same score by the policy ``ties``: all of them (``"pessimistic"``, the default: a
    constant scorer earns nothing), half of them (``"average"``) or none (``"optimistic"``).
    ``hits@k`` is the share of positives of rank at most ``k``, ``mrr`` the mean of 1 / rank.
    ``scores`` may be logits or probabilities: only their order counts.
    """
    check.choice("link_ranking", "ties", ties, TIES)
    values, positive = _array(scores, "scores"), _binary(_array(targets, "targets"))
    if values.ndim != 1 or values.shape != positive.shape:
        raise LinkTaskError(f"scores {values.shape} and targets {positive.shape} must be (K,)")
    cuts = [check.count("link_ranking", f"k[{i}]", n) for i, n in enumerate(k)]
    names = [*(f"hits@{n}" for n in cuts), "mrr"]
    reason = _one_class(positive)
    if reason is not None:
        return {name: MetricValue(None, reason) for name in names}
    negative = np.sort(values[~positive])
    above = len(negative) - np.searchsorted(negative, values[positive], side="right")
    tied = len(negative) - np.searchsorted(negative, values[positive], side="left") - above
    rank = 1 + above + tied * {"pessimistic": 1.0, "average": 0.5, "optimistic": 0.0}[ties]
    figures = {f"hits@{n}": float((rank <= n).mean()) for n in cuts}
    figures["mrr"] = float((1 / rank).mean())
    return {name: MetricValue(value) for name, value in figures.items()}


def ranked(scores: np.ndarray, positive: np.ndarray) -> tuple[MetricValue, MetricValue]:
    """AUROC and average precision (the step-wise sum over distinct thresholds)."""
    reason = _one_class(positive)
    if reason is not None:
        return MetricValue(None, reason), MetricValue(None, reason)
    order = np.argsort(scores)[::-1]
    descending = scores[order]
    hits = np.cumsum(positive[order])
    last = np.append(np.flatnonzero(descending[1:] != descending[:-1]), len(scores) - 1)
    true, seen = hits[last].astype(np.float64), last + 1.0
    total, false = float(true[-1]), seen - true
    steps = np.diff(true, prepend=0.0)
    # A positive beats the negatives below its threshold, and half of those at it.
    below = false[-1] - false + np.diff(false, prepend=0.0) / 2
    auroc = float(steps @ below) / (total * float(false[-1]))
    ap = float(steps @ (true / seen)) / total
    return MetricValue(auroc), MetricValue(ap)


def _categorical(
    scores: np.ndarray, targets: np.ndarray, from_logits: bool
) -> dict[str, MetricValue]:
    classes = targets.astype(np.int64)
    if (classes != targets).any() or classes.min() < 0 or classes.max() >= scores.shape[1]:
        raise LinkTaskError(f"targets must be category indices below {scores.shape[1]}")
    rows = np.arange(len(scores))
    with np.errstate(divide="ignore"):
        if from_logits:
            logs = torch.log_softmax(torch.from_numpy(scores), 1).numpy()
        else:
            logs = np.log(scores)
    return {
        "accuracy": MetricValue(float((scores.argmax(1) == classes).mean())),
        "nll": MetricValue(float(-logs[rows, classes].mean())),
    }


def _bce(scores: np.ndarray, positive: np.ndarray, from_logits: bool) -> np.ndarray:
    if from_logits:
        return np.logaddexp(0, np.where(positive, -scores, scores))
    with np.errstate(divide="ignore"):
        return -np.log(np.where(positive, scores, 1 - scores))


def _binary(targets: np.ndarray) -> np.ndarray:
    if ((targets != 0) & (targets != 1)).any():
        raise LinkTaskError("targets of binary candidates must be 0 or 1")
    return targets.astype(bool)


def _one_class(positive: np.ndarray) -> str | None:
    count = int(positive.sum())
    if 0 < count < len(positive):
        return None
    what = "no candidate" if not len(positive) else "no positive" if not count else "no negative"
    return f"there is {what} among the candidates"


def _array(values: Any, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise LinkTaskError(f"{name} must be numbers") from None
    if not np.isfinite(array).all():
        raise LinkTaskError(f"{name} must be finite")
    return array
