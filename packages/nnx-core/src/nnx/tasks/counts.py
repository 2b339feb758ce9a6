"""Integer counts of decoded predictions, accumulated where the batches are.

Nothing here synchronizes the device per batch: a masked entry is counted into
a spare cell instead of being selected out, and counts are read at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nnx.tasks.scores import NOTHING, Scores, averaged, class_scores


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as float64, or float32 on a device that has no float64."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor, which shares its memory where it can be written to."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def argmax(output: torch.Tensor, axis: int = 1) -> torch.Tensor:
    """``output.argmax(axis)``: the first of the largest entries, a NaN before any number.

    NumPy's is vectorised where torch's CPU kernel is not (8x at 1000 classes).
    """
    vectorised = output.is_cpu and output.ndim == 2 and output.dtype in _NUMPY_DTYPES
    if vectorised and output.numel() >= 1024:
        return torch.from_numpy(output.detach().numpy().argmax(axis))
    return output.argmax(axis)


_NUMPY_DTYPES = (torch.float32, torch.float64)


class ClassCounts:
    """True positives, predicted and actual counts per class: memory is O(classes).

    Class indices in ``[0, num_classes)`` are counted on the device. With
    ``num_classes=None`` the table grows to the largest index seen. ``trusted``
    says that no target lies outside, so that it is not looked for; otherwise
    such targets are counted as classes of their own, which are never predicted.
    """

    def __init__(self, num_classes: int | None = None, *, trusted: bool = False) -> None:
        self._fixed = num_classes
        self._trusted = trusted and num_classes is not None
        self._table: torch.Tensor | None = None  # (3, C + 1): tp, predicted, actual; last: masked
        self._outside: dict[int, list[int]] = {}  # label -> [tp, predicted, actual]

    def update(
        self, predicted: torch.Tensor, actual: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add decoded classes and target classes of one shape, integers."""
        predicted, actual = predicted.reshape(-1), actual.reshape(-1).long()
        if valid is not None:
            valid = valid.reshape(-1)
        if not self._trusted:
            predicted, actual, valid = self._set_outside_apart(predicted, actual, valid)
        if not predicted.numel():
            return
        spare = self._size(predicted.device)
        if valid is not None:
            predicted = torch.where(valid, predicted, spare)
            actual = torch.where(valid, actual, spare)
        hits = torch.where(predicted == actual, actual, spare)
        table = self._table
        assert table is not None
        if table.is_cpu and actual.numel() > spare:  # for few rows NumPy is quicker
            for row, labels in zip(table.numpy(), (hits, predicted, actual)):
                row += np.bincount(labels.numpy(), minlength=spare + 1)
            return
        for row, labels in zip(table, (hits, predicted, actual)):
            row.index_add_(0, labels, torch.ones_like(labels))

    def expect(self, width: int, *, trusted: bool) -> None:
        """Make room for classes ``0 .. width - 1``; ``trusted``: no target exceeds them."""
        self._fixed = max(width, self._fixed or 0)
        self._trusted = trusted

    def merge(self, other: ClassCounts) -> None:
        """Add another's counts in place; ``other`` is not kept."""
        if other._table is not None:
            width = other._table.shape[1] - 1
            spare = self._size(other._table.device, width)
            assert self._table is not None
            theirs = other._table.to(self._table.device)
            self._table[:, :width] += theirs[:, :width]
            self._table[:, spare] += theirs[:, width]
        for label, counts in other._outside.items():
            mine = self._outside.setdefault(label, [0, 0, 0])
            self._outside[label] = [a + b for a, b in zip(mine, counts)]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Host copies of (true positives, predicted, actual), one entry per class."""
        inside = np.zeros((3, 0), np.int64)
        if self._table is not None:
            inside = self._table[:, :-1].cpu().numpy()
        if not self._outside:
            return inside[0], inside[1], inside[2]
        outside = np.asarray(list(self._outside.values()), np.int64).reshape(-1, 3).T
        true_positive, predicted, actual = np.concatenate([inside, outside], axis=1)
        return true_positive, predicted, actual

    def scores(self, average: str = "macro") -> Scores:
        """The scores of everything counted so far; all ``None`` when that is nothing."""
        return class_scores(*self.arrays(), average)

    @property
    def count(self) -> int:
        """How many valid samples were counted."""
        return int(self.arrays()[2].sum())

    def state(self) -> dict[str, Any]:
        """Tensors and numbers to continue from."""
        table = None if self._table is None else self._table.cpu().clone()
        return {"table": table, "outside": {k: list(v) for k, v in self._outside.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        table = state["table"]
        self._table = None if table is None else table.clone()
        self._outside = {int(k): list(v) for k, v in state["outside"].items()}

    def _size(self, device: torch.device, width: int = 0) -> int:
        """Make the table at least ``width`` classes wide; its spare cell's index."""
        width = max(width, self._fixed or 0)
        if self._table is None:
            self._table = torch.zeros(3, width + 1, dtype=torch.int64, device=device)
        elif self._table.device != device:
            self._table = self._table.to(device)
        have = self._table.shape[1] - 1
        if width > have:
            grown = torch.zeros(3, width + 1, dtype=torch.int64, device=device)
            grown[:, :have] = self._table[:, :have]
            grown[:, width] = self._table[:, have]
            self._table = grown
        return max(width, have)

    def _set_outside_apart(
        self, predicted: torch.Tensor, actual: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if valid is not None:
            predicted, actual, valid = predicted[valid], actual[valid], None
        if not actual.numel():
            return predicted, actual, valid
        low = int(min(actual.min(), predicted.min()))
        high = int(max(actual.max(), predicted.max()))
        limit = self._fixed
        if limit is None:
            limit = high + 1 if high < _GROWTH_LIMIT else _GROWTH_LIMIT
            self._size(actual.device, max(limit, 0))
        if low >= 0 and high < limit:
            return predicted, actual, valid
        outside = (actual < 0) | (actual >= limit) | (predicted < 0) | (predicted >= limit)
        for guess, label in zip(predicted[outside].tolist(), actual[outside].tolist()):
            for position, key in ((1, guess), (2, label)):
                self._add_one(key, limit, position)
            if guess == label:
                self._add_one(label, limit, 0)
        return predicted[~outside], actual[~outside], valid

    def _add_one(self, label: int, limit: int, position: int) -> None:
        if 0 <= label < limit:
            assert self._table is not None or self._fixed is not None
            self._size(self._table.device if self._table is not None else torch.device("cpu"))
            assert self._table is not None
            self._table[position, label] += 1
        else:
            self._outside.setdefault(label, [0, 0, 0])[position] += 1


_GROWTH_LIMIT = 1 << 20  # wider label ranges are kept apart, so one stray label allocates nothing


class IndicatorCounts:
    """Counts of 0/1 indicators per label, and of rows and elements decoded right.

    A row is right when each of its valid entries is; a row without a valid
    entry is not counted.
    """

    def __init__(self) -> None:
        self._labels: torch.Tensor | None = None  # (3, L): tp, predicted, actual
        self._totals: torch.Tensor | None = None  # rows right, rows, elements right, elements

    def update(
        self, predicted: torch.Tensor, actual: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add ``(N, L)`` boolean indicators."""
        labels, totals = indicator_counts(predicted, actual, valid)
        if self._labels is None or self._totals is None:
            self._labels, self._totals = labels, totals
        else:
            self._labels += labels.to(self._labels.device)
            self._totals += totals.to(self._totals.device)

    def totals(self) -> tuple[int, int, int, int]:
        """(rows right, rows, elements right, elements)."""
        if self._totals is None:
            return 0, 0, 0, 0
        rows_right, rows, right, elements = self._totals.tolist()
        return rows_right, rows, right, elements

    def scores(self, average: str = "macro") -> Scores:
        rows_right, rows, _, _ = self.totals()
        if not rows or self._labels is None:
            return NOTHING
        true_positive, predicted, actual = self._labels.cpu().numpy()
        return Scores(rows_right / rows, *averaged(true_positive, predicted, actual, average))

    def merge(self, other: IndicatorCounts) -> None:
        """Add another's counts in place; ``other`` is not kept."""
        if other._labels is None or other._totals is None:
            return
        if self._labels is None or self._totals is None:
            self._labels, self._totals = other._labels.clone(), other._totals.clone()
        else:
            self._labels += other._labels.to(self._labels.device)
            self._totals += other._totals.to(self._totals.device)

    def state(self) -> dict[str, Any]:
        """Tensors to continue from."""
        pairs = (("labels", self._labels), ("totals", self._totals))
        return {name: None if t is None else t.cpu().clone() for name, t in pairs}

    def load_state(self, state: dict[str, Any]) -> None:
        self._labels = None if state["labels"] is None else state["labels"].clone()
        self._totals = None if state["totals"] is None else state["totals"].clone()


def indicator_counts(
    predicted: torch.Tensor, actual: torch.Tensor, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``(N, L)`` booleans: ``(3, L)`` tp, predicted, actual; and the four totals."""
    right = predicted == actual
    if valid is None:
        elements = torch.ones_like(right)
        row_counts = elements.any(1)
    else:
        predicted, actual, elements = predicted & valid, actual & valid, valid
        row_counts = valid.any(1)
    labels = torch.stack([(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)])
    rows_right = (right | ~elements).all(1) & row_counts
    totals = torch.stack(
        [rows_right.sum(), row_counts.sum(), (right & elements).sum(), elements.sum()]
    )
    return labels, totals


class ErrorSums:
    """Sums of squared and absolute errors over valid elements, and their number."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def update(
        self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        sums = error_sums(output, target, valid)
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def merge(self, other: ErrorSums) -> None:
        """Add another's sums in place."""
        if other._sums is not None:
            mine, theirs = self._sums, other._sums
            self._sums = theirs.clone() if mine is None else mine + theirs.to(mine.device)

    def totals(self) -> tuple[float, float, int]:
        """(squared error, absolute error, elements)."""
        if self._sums is None:
            return 0.0, 0.0, 0
        squared, absolute, elements = self._sums.tolist()
        return squared, absolute, int(elements)

    def state(self) -> dict[str, Any]:
        """Tensors to continue from."""
        return {"sums": None if self._sums is None else self._sums.cpu().clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = None if state["sums"] is None else state["sums"].clone()


def error_sums(
    output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None
) -> torch.Tensor:
    """``(3,)``: summed squared error, summed absolute error, number of elements."""
    difference = wide(output.detach()) - wide(target)
    if valid is None:
        elements = torch.full((), difference.numel(), device=output.device).to(difference)
    else:
        difference = torch.where(valid, difference, 0)
        elements = valid.sum().to(difference)
    return torch.stack([(difference * difference).sum(), difference.abs().sum(), elements])
