"""True and predicted classes, as indices on one list of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def aligned(
    true: Any, predicted: Any, class_names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Class indices of both sides and the classes' names."""
    import numpy as np

    left, right = as_array(true), as_array(predicted)
    for name, values in (("Y_true", left), ("Y_pred", right)):
        if values.ndim != 1:
            raise ValueError(
                f"{name} must be 1-D class labels, not of shape {values.shape}; decode it first"
            )
    left, right = _classes("Y_true", left), _classes("Y_pred", right)
    if len(left) != len(right):
        raise ValueError(f"Y_true has {len(left)} labels and Y_pred {len(right)}")
    if not len(left):
        raise ValueError("there are no labels to draw")
    present = np.unique(np.concatenate([left, right]))
    if class_names is None:
        return (np.searchsorted(present, left), np.searchsorted(present, right),
                [str(c) for c in present])  # fmt: skip
    names = [str(c) for c in class_names]
    if present.dtype.kind in "OUS":
        index = {n: i for i, n in enumerate(names)}
        missing = [c for c in present if str(c) not in index]
        if missing:
            raise ValueError(f"class_names does not name {missing[0]!r}")
        return (np.array([index[str(c)] for c in left]),
                np.array([index[str(c)] for c in right]), names)  # fmt: skip
    if present[0] < 0 or present[-1] >= len(names):
        raise ValueError(
            f"class_names names {len(names)} classes, but the labels run from "
            f"{present[0]} to {present[-1]}"
        )
    return left.astype(int), right.astype(int), names


def _classes(name: str, values: np.ndarray) -> np.ndarray:
    """Labels as they are, whole floats as integers; refuses what is no class."""
    import numpy as np

    if values.dtype.kind == "b":
        return values.astype(np.int64)
    if values.dtype.kind not in "fc":
        return values
    whole = np.isfinite(values) & (values == np.round(values.real))
    if not whole.all():
        wrong = values[~whole][0]
        raise ValueError(
            f"{name} holds {wrong:g}, which is no class: these look like scores or probabilities. "
            "Take the class first, for example (p > 0.5) or p.argmax(1)"
        )
    return values.real.astype(np.int64)


def as_array(values: Any) -> np.ndarray:
    import numpy as np

    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
