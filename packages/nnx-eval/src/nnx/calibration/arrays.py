"""What arrives as arrays, tensors or predictions, checked once for the whole distribution.

NumPy alone: a tensor is recognized by what it can do, and so is a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from nnx.utils.validation import show

BLOCK_VALUES = 1 << 17  # numbers of one block: 1 MiB of float64, which stays in a CPU's cache
SUM_TOLERANCE = 1e-6


def as_numpy(value: Any, name: str, error: type[ValueError]) -> np.ndarray:
    """An array of a tensor, array or nested sequence; nothing is changed or shared with a GPU."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        raise error(f"{name} must be an array, not {show(value)}") from None


def is_prediction(value: Any) -> bool:
    """Whether ``value`` is a ``PredictionResult``: logits that say what they mean."""
    return all(hasattr(value, name) for name in ("logits", "decoded", "sample_ids", "spec"))


def text_labels(labels: Any, error: type[ValueError]) -> tuple[str, ...]:
    """Ordered, distinct, non-empty names, at least two."""
    if isinstance(labels, (str, bytes)) or not isinstance(labels, (Sequence, np.ndarray)):
        raise error(
            f"labels must be a sequence of names in the order of the classes, not {show(labels)}"
        )
    names = tuple(str(name) if isinstance(name, np.str_) else name for name in labels)
    if not all(isinstance(name, str) and name for name in names):
        raise error(f"labels must be non-empty strings, not {show(names)}")
    if len(set(names)) != len(names):
        raise error(f"labels must be distinct, not {show(names)}")
    if len(names) < 2:
        raise error(f"labels must name at least two classes, not {show(names)}")
    return names


def identity(name: str, value: Any, error: type[ValueError]) -> str:
    """A model or split id: a string that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise error(f"{name} must be a non-empty string, not {show(value)}")
    return value


def real_matrix(value: Any, name: str, error: type[ValueError]) -> np.ndarray:
    """``(N, C)`` finite real numbers, N >= 1 and C >= 2, in their own precision."""
    values = as_numpy(value, name, error)
    if values.dtype.kind not in "fiu":
        raise error(f"{name} must be real numbers, not {values.dtype}")
    if values.ndim != 2 or values.shape[1] < 2:
        raise error(f"{name} must be (N, C) with C >= 2 classes, not of shape {values.shape}")
    if not len(values):
        raise error(f"{name} has no rows")
    for start, stop in blocks(*values.shape):
        finite = np.isfinite(values[start:stop])
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            raise error(
                f"{name} must be finite; {name}[{start + row}, {column}] is "
                f"{values[start + row, column]}"
            )
    return values


def probability_matrix(
    value: Any, error: type[ValueError], name: str = "probabilities", *, empty: bool = False
) -> np.ndarray:
    """``(N, C)`` float64 probabilities: finite, in [0, 1], each row summing to 1."""
    values = as_numpy(value, name, error)
    if values.dtype.kind != "f":
        raise error(f"{name} must be floats, not {values.dtype}")
    if values.ndim != 2 or values.shape[1] < 2:
        raise error(f"{name} must be (N, C) with C >= 2 classes, not of shape {values.shape}")
    if not len(values) and not empty:
        raise error(f"{name} has no rows")
    tolerance = max(SUM_TOLERANCE, 4 * values.shape[1] * float(np.finfo(values.dtype).eps))
    values = values.astype(np.float64, copy=False)
    for start, stop in blocks(*values.shape):
        _check_distributions(values[start:stop], start, tolerance, name, error)
    return values


def _check_distributions(
    block: np.ndarray, start: int, tolerance: float, name: str, error: type[ValueError]
) -> None:
    good = (block >= 0) & (block <= 1)  # a NaN is neither
    if not good.all():
        row, column = (int(i) for i in np.argwhere(~good)[0])
        raise error(
            f"{name}[{start + row}, {column}] is {block[row, column]}, no probability in [0, 1]"
        )
    sums = block.sum(1)
    wrong = np.abs(sums - 1) > tolerance
    if wrong.any():
        row = int(np.argmax(wrong))
        raise error(
            f"{name}[{start + row}] sums to {sums[row]:.9g}, not 1; it is not renormalized here"
        )


def class_targets(targets: Any, rows: int, classes: int, error: type[ValueError]) -> np.ndarray:
    """``(N,)`` class indices as int64."""
    values = as_numpy(targets, "targets", error)
    if values.dtype.kind not in "iu":
        raise error(f"targets must be integer class indices, not {values.dtype}")
    if values.shape != (rows,):
        raise error(f"targets must be one class index for each of {rows} rows, not {values.shape}")
    values = values.astype(np.int64, copy=False)
    wrong = (values < 0) | (values >= classes)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise error(f"targets[{row}] is {values[row]}, but there are classes 0 to {classes - 1}")
    return values


def row_ids(sample_ids: Any, rows: int, error: type[ValueError]) -> np.ndarray:
    """One integer or text id for each row; ``None`` is 0 to N-1. Ids may repeat."""
    if sample_ids is None:
        return np.arange(rows)
    ids = as_numpy(sample_ids, "sample_ids", error)
    if ids.shape != (rows,):
        raise error(f"sample_ids must have one id for each of the {rows} rows, not {ids.shape}")
    if ids.dtype.kind not in "iuUSO":
        raise error(f"sample_ids must be integers or text, not {ids.dtype}")
    return ids


def prediction_logits(prediction: Any, error: type[ValueError]) -> np.ndarray:
    """The ``(N, C)`` logits of a categorical prediction."""
    if prediction.spec is None or prediction.spec.kind != "categorical":
        kind = "regression" if prediction.spec is None else prediction.spec.kind
        raise error(
            f"a {kind} prediction has no categorical probabilities; predict with "
            'ProbabilitySpec("categorical") or a categorical task'
        )
    logits = np.asarray(prediction.logits)
    if logits.ndim != 2 or prediction.spec.resolve_class_axis(2) != 1:
        raise error(
            f"predictions must have (N, C) logits with the classes last, not {logits.shape}"
        )
    return logits


def declared_labels(
    source: Any, labels: Any, error: type[ValueError], *, what: str = "logits"
) -> tuple[str, ...]:
    """The labels of ``source``: those of a prediction, or those that were passed."""
    given = None if labels is None else text_labels(labels, error)
    own = getattr(getattr(source, "spec", None), "labels", None) if is_prediction(source) else None
    if own is not None and given is not None and tuple(own) != given:
        raise error(f"labels={given} are not those of the prediction, {tuple(own)}")
    found = given or own
    if found is None:
        where = (
            "this prediction's spec names none"
            if is_prediction(source)
            else f"{what} have no names"
        )
        raise error(f"say which classes the columns are with labels=[...]; {where}")
    return tuple(found)


def blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Row ranges of at most :data:`BLOCK_VALUES` numbers."""
    step = max(1, BLOCK_VALUES // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def softmax(logits: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Row-wise ``softmax(scale * logits)`` in float64, in memory of one block beside the result."""
    out = np.empty(logits.shape, dtype=np.float64)
    for start, stop in blocks(*logits.shape):
        softmax_block(logits[start:stop], scale, out[start:stop])
    return out


def softmax_block(block: np.ndarray, scale: float, out: np.ndarray) -> np.ndarray:
    """One block of :func:`softmax`, written to ``out``."""
    np.subtract(block, block.max(1, keepdims=True), out=out, dtype=np.float64)
    if scale != 1.0:
        out *= scale
    np.exp(out, out=out)
    out /= out.sum(1, keepdims=True)
    return out


def refuse_unknown_state(error: type[ValueError], what: str, cause: Exception) -> NoReturn:
    """A document whose fields have the wrong shape."""
    raise error(f"{what} is not as it was stored: {cause}") from None
