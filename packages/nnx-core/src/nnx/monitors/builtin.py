"""The metrics of core: sums and counts, kept on the device of the batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from nnx.monitors.registry import MetricDefinition
from nnx.tasks.counts import ClassCounts, wide
from nnx.tasks.scores import check_average, check_binary

if TYPE_CHECKING:
    from typing_extensions import Self


class BuiltinAccumulator:
    """Base of core's accumulators: ``update`` takes arrays or tensors, masked or not.

    A masked entry (``valid`` False) is replaced, not selected out, so that no
    batch waits for the device.
    """

    def update(self, target: Any, prediction: Any, valid: Any = None) -> None:
        raise NotImplementedError

    def result(self) -> float | None:
        raise NotImplementedError

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def copy(self) -> Self:
        """Another accumulator with the same sums."""
        return copy.deepcopy(self)

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class MeanAccumulator(BuiltinAccumulator):
    """The mean over samples of ``values(target, prediction)``, each ``(n,)``."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # (2,): sum of the values, number of samples

    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def update(self, target: Any, prediction: Any, valid: Any = None) -> None:
        target, prediction = torch.as_tensor(target), torch.as_tensor(prediction)
        mask = None if valid is None else torch.as_tensor(valid)
        self._add(wide(self.values(target, prediction)), mask)

    def _add(self, values: torch.Tensor, valid: torch.Tensor | None) -> None:
        if valid is None:
            sums = torch.stack([values.sum(), torch.full_like(values[:1].sum(), len(values))])
        else:
            sums = torch.stack([torch.where(valid, values, 0).sum(), valid.sum().to(values)])
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def result(self) -> float | None:
        if self._sums is None:
            return None
        total, count = self._sums.tolist()
        return total / count if count else None

    def copy(self) -> Self:
        return copy.copy(self)  # sums are replaced, never changed

    def merge(self, other: Any) -> None:
        if other._sums is not None:
            theirs = other._sums.clone()
            self._sums = theirs if self._sums is None else self._sums + theirs.to(self._sums.device)

    def state(self) -> dict[str, Any]:
        return {"sums": None if self._sums is None else self._sums.cpu().clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = None if state["sums"] is None else state["sums"].clone()


class Accuracy(MeanAccumulator):
    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        return target == prediction


class NegativeLogLikelihood(MeanAccumulator):
    """Of class indices, class probabilities ``(n, C)`` as targets, or 0/1 outputs."""

    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        prediction = wide(prediction)
        if prediction.ndim == 1:
            target = wide(target)
            off = torch.special.xlogy(1 - target, 1 - prediction)
            return -(torch.special.xlogy(target, prediction) + off)
        if target.ndim == 2:
            return -torch.special.xlogy(wide(target), prediction).sum(1)
        return -_picked(prediction, target).log()

    def update_logits(self, target: torch.Tensor, logits: torch.Tensor, valid: Any = None) -> None:
        """The same from raw outputs, exact where a probability would round to 0 or 1."""
        logits = wide(logits)
        if logits.ndim == 1:
            target = wide(target)
            values = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        elif target.ndim == 2:  # a share of 0 takes nothing of a class that is impossible
            shares, logs = wide(target), functional.log_softmax(logits, 1)
            values = -torch.where(shares == 0, 0, shares * logs).sum(1)
        else:
            values = -_picked(functional.log_softmax(logits, 1), target)
        self._add(values, valid)


class Brier(MeanAccumulator):
    """Squared error of probabilities, summed over classes when categorical (Brier, 1950)."""

    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        prediction = wide(prediction)
        if prediction.ndim == 1 or target.ndim == 2:
            squared = (prediction - wide(target)) ** 2
            return squared if squared.ndim == 1 else squared.sum(1)
        # sum over classes of (p - [class is the target])^2, without the one-hot table
        return (prediction * prediction).sum(1) + 1 - 2 * _picked(prediction, target)


class AbsoluteError(MeanAccumulator):
    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        return (wide(prediction) - wide(target)).abs()


class SquaredError(MeanAccumulator):
    def values(self, target: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        return (wide(prediction) - wide(target)) ** 2


class F1(BuiltinAccumulator):
    """F1 over all labels at the end, from counts per class."""

    def __init__(self, average: str = "macro") -> None:
        self._average = average
        self._counts = ClassCounts()

    def expect(self, width: int, *, trusted: bool) -> None:
        """How many classes there are; see :meth:`ClassCounts.expect`."""
        if self._average == "binary":
            check_binary(width)
        self._counts.expect(width, trusted=trusted)

    def update(self, target: Any, prediction: Any, valid: Any = None) -> None:
        mask = None if valid is None else torch.as_tensor(valid)
        predicted = torch.as_tensor(prediction).long()
        self._counts.update(predicted, torch.as_tensor(target), mask)

    def result(self) -> float | None:
        return self._counts.scores(self._average).f1

    def merge(self, other: Any) -> None:
        self._counts.merge(other._counts)

    def state(self) -> dict[str, Any]:
        return self._counts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._counts.load_state(state)


def _picked(table: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``table[i, target[i]]``."""
    return table.gather(1, target.long().unsqueeze(1)).squeeze(1)


def check_empty(config: Mapping[str, Any]) -> None:
    if config:
        raise ValueError(f"this metric takes no config, not {dict(config)!r}")


def _check_f1(config: Mapping[str, Any]) -> None:
    unknown = set(config) - {"average"}
    if unknown:
        raise ValueError(f"f1 takes only 'average', not {', '.join(map(repr, sorted(unknown)))}")
    check_average(config.get("average", "macro"))


def _define(id: str, input: str, mode: str, kind: type[MeanAccumulator]) -> MetricDefinition:
    return MetricDefinition(
        id=id,
        version=1,
        input=input,
        mode=mode,
        factory=lambda config: kind(),
        check_config=check_empty,
    )


ACCURACY = _define("accuracy", "labels", "max", Accuracy)
NLL = _define("nll", "probabilities", "min", NegativeLogLikelihood)
BRIER = _define("brier", "probabilities", "min", Brier)
MAE = _define("mae", "continuous", "min", AbsoluteError)
MSE = _define("mse", "continuous", "min", SquaredError)
F1_SCORE = MetricDefinition(
    id="f1",
    version=1,
    input="labels",
    mode="max",
    factory=lambda config: F1(config.get("average", "macro")),
    check_config=_check_f1,
)


def as_numpy(tensor: Any) -> np.ndarray:
    """What a registered metric of another author receives."""
    return tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
