"""What prediction returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nnx.prediction.spec import PredictionValidationError, ProbabilitySpec
from nnx.tasks.counts import tensor_of
from nnx.tasks.semantics import CATEGORICAL, Semantics

if TYPE_CHECKING:
    from nnx.tasks import TaskAdapter


class PredictResult(NamedTuple):
    """``(logits, classes)``: the raw outputs and the decisions made from them."""

    logits: np.ndarray
    classes: np.ndarray


class _NoClassIndicesError(PredictionValidationError, AttributeError):
    """``hasattr(result, "class_indices")`` is False for a result without them."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictionResult:
    """Raw outputs, probabilities and decisions of N samples, with their ids.

    ``logits`` and ``probabilities`` share a shape. ``decoded`` holds class
    indices (categorical, without the class axis), 0/1 indicators (bernoulli) or
    the values themselves (regression, whose ``probabilities`` and ``spec`` are
    ``None``). ``sample_ids`` is ``(N,)``.
    """

    logits: np.ndarray
    probabilities: np.ndarray | None
    decoded: np.ndarray
    sample_ids: np.ndarray
    spec: ProbabilitySpec | None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.logits)

    @property
    def kind(self) -> str:
        """ "categorical", "bernoulli" or "regression"."""
        return "regression" if self.spec is None else self.spec.kind

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The ordered names of the class axis."""
        return None if self.spec is None else self.spec.labels

    @property
    def class_axis(self) -> int | None:
        """The class axis of ``logits``, from the front; ``None`` without one."""
        if self.spec is None or self.logits.ndim < 2:
            return None
        return self.spec.resolve_class_axis(self.logits.ndim)

    @property
    def class_indices(self) -> np.ndarray:
        """The decided class of each sample. Only a categorical result has it."""
        if self.kind != "categorical":
            raise _NoClassIndicesError(
                f"a {self.kind} result has no class indices; its decisions are in .decoded"
            )
        return self.decoded

    def decoded_labels(self) -> np.ndarray:
        """The decisions by name.

        Categorical: an array of names, shaped like ``decoded``. Bernoulli: an
        ``(N, ...)`` object array holding the tuple of names that are on.
        """
        if self.spec is None or self.spec.labels is None:
            raise PredictionValidationError(
                f"this {self.kind} result has no labels; declare them in the ProbabilitySpec "
                "or the TaskSpec"
            )
        names = np.asarray(self.spec.labels, dtype=object)
        if self.kind == "categorical":
            return names[self.decoded]
        rows = np.moveaxis(self.decoded, self.class_axis or 0, -1)
        out = np.empty(rows.shape[:-1], dtype=object)
        for index in np.ndindex(out.shape):
            out[index] = tuple(names[rows[index] != 0])
        return out


def prediction_from_logits(
    logits: Any, spec: ProbabilitySpec, *, sample_ids: Any = None
) -> PredictionResult:
    """Probabilities and decisions of raw outputs obtained anywhere.

    ``logits`` is an array or tensor ``(N, ...)``; ``sample_ids`` defaults to
    the row numbers. Ties and rounding never change a categorical decision: it
    is the argmax of the logits. Raises ``PredictionValidationError`` when the
    logits do not fit ``spec`` or are not finite, and for ids that are not one
    integer or text for each row.
    """
    if not isinstance(spec, ProbabilitySpec):
        raise PredictionValidationError(
            f"spec must be a ProbabilitySpec, not {type(spec).__name__}; for example "
            'ProbabilitySpec("categorical")'
        )
    values = _array(logits)
    return _result(values, Semantics.of_spec(spec), spec, sample_ids)


def task_prediction(
    adapter: TaskAdapter, logits: np.ndarray, sample_ids: np.ndarray
) -> PredictionResult:
    """The same for a declared task, which also decodes (a threshold, raw values)."""
    adapter.check_logits(logits)
    spec, decoded = adapter.spec.probability_spec(), adapter.decode_array(logits)
    return _result(logits, adapter.semantics, spec, sample_ids, decoded)


def _result(
    logits: np.ndarray,
    semantics: Semantics,
    spec: ProbabilitySpec | None,
    sample_ids: Any,
    decoded: np.ndarray | None = None,
) -> PredictionResult:
    """Probabilities where ``spec`` promises them, and what ``semantics`` decides."""
    ids, tensor = _sample_ids(sample_ids, len(logits)), tensor_of(logits)
    probabilities, axis = None, 1
    if spec is not None:
        axis = check_logits(logits, spec)
        exact = semantics.probabilities(tensor, axis)
        probabilities = exact.numpy().astype(logits.dtype, copy=False)
    if decoded is None:
        decoded = semantics.decide(tensor, axis).numpy()
    return PredictionResult(
        logits=logits, probabilities=probabilities, decoded=decoded, sample_ids=ids, spec=spec
    )


def _array(logits: Any) -> np.ndarray:
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu()
        if str(logits.dtype) == "torch.bfloat16":
            logits = logits.float()
        logits = logits.numpy()
    values = np.asarray(logits)
    if values.dtype.kind not in "fiu" or values.ndim == 0:
        raise PredictionValidationError(
            f"logits must be real numbers of shape (N, ...), not {values.dtype} of {values.shape}"
        )
    known = values.dtype.kind == "f" and values.dtype.itemsize <= 8
    return values if known else values.astype(np.float64)


def _sample_ids(sample_ids: Any, rows: int) -> np.ndarray:
    if sample_ids is None:
        return np.arange(rows)
    ids = sample_ids.detach().cpu().numpy() if hasattr(sample_ids, "detach") else sample_ids
    ids = np.asarray(ids)
    if ids.shape != (rows,):
        raise PredictionValidationError(
            f"sample_ids must have one id for each of the {rows} rows, not shape {ids.shape}"
        )
    if ids.dtype.kind not in "iuUSO":
        raise PredictionValidationError(f"sample_ids must be integers or text, not {ids.dtype}")
    return ids


def check_logits(values: np.ndarray, spec: ProbabilitySpec) -> int:
    """Refuse logits that ``spec`` does not fit; their class axis, from the front."""
    single = spec.kind != CATEGORICAL and values.ndim == 1
    axis = 0 if single else spec.resolve_class_axis(values.ndim)
    width = 1 if single else values.shape[axis]
    if width == 0:
        raise PredictionValidationError("the class axis of the logits is empty")
    if spec.labels is not None and len(spec.labels) != width:
        raise PredictionValidationError(
            f"the spec names {len(spec.labels)} labels but the class axis of logits "
            f"{values.shape} has {width}"
        )
    if width == 1 and spec.kind == CATEGORICAL:
        raise PredictionValidationError(
            f"categorical logits of shape {values.shape} have one class on axis {axis}, which is "
            'no choice; one yes/no output is ProbabilitySpec("bernoulli")'
        )
    finite = np.isfinite(values)
    if not finite.all():
        first = tuple(np.argwhere(~finite)[0].tolist())
        raise PredictionValidationError(
            f"logits must be finite to become probabilities; logits{list(first)} is {values[first]}"
        )
    return axis
