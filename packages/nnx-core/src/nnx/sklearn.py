"""A classifier and a regressor for scikit-learn, over :func:`nnx.fit`.

They work in a ``Pipeline``, ``GridSearchCV`` and ``cross_val_score``, clone and pickle; every
``fit`` is a run like any other. Needs scikit-learn (``nnx-core[sklearn]``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nnx.plugins.siblings import install_line

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"nnx.sklearn needs scikit-learn 1.6 or newer ({error}): {install_line('nnx-core', 'sklearn')}"
    ) from None

from nnx.fitting import fit
from nnx.params import NNParams, TaskSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NNClassifier", "NNRegressor"]


class _Estimator(BaseEstimator):  # type: ignore[misc]
    def __init__(
        self,
        hidden_dims: Sequence[int] = (64,),
        *,
        net: Callable[[int, int], nn.Module] | None = None,
        dropout: float = 0.0,
        epochs: int = 20,
        batch_size: int = 32,
        optimizer: Any = "adam",
        lr: float = 0.01,
        weight_decay: float | None = None,
        schedule: Any = "plateau",
        validation_fraction: float | None = None,
        early_stopping: int | None = None,
        precision: Any = None,
        device: Any = "cpu",
        callbacks: Sequence[Any] = (),
        random_state: Any = None,
        on_existing: str = "replace",
        tags: Sequence[str] = (),
    ) -> None:
        self.hidden_dims = hidden_dims
        self.net = net
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.validation_fraction = validation_fraction
        self.early_stopping = early_stopping
        self.precision = precision
        self.device = device
        self.callbacks = callbacks
        self.random_state = random_state
        self.on_existing = on_existing
        self.tags = tags

    def _fit(self, X: Any, y: Any, outputs: int, task: TaskSpec, loss: str, strata: Any) -> None:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, val = (X, y), None
        if self.validation_fraction is not None:
            parts = train_test_split(
                X, y, test_size=self.validation_fraction, random_state=seed, stratify=strata
            )
            train, val = (parts[0], parts[2]), (parts[1], parts[3])
        fitted = fit(
            self._network(X.shape[1], outputs), train, val, epochs=self.epochs, loss=loss,
            optimizer=self.optimizer, lr=self.lr if isinstance(self.optimizer, str) else None,
            weight_decay=self.weight_decay, schedule=self.schedule, task=task,
            early_stopping=self.early_stopping, precision=self.precision, device=self.device,
            seed=seed, callbacks=self.callbacks, batch_size=self.batch_size,
            data_id=_digest(X, y), on_existing=self.on_existing, tags=self.tags,
        )  # fmt: skip
        self.run_ = fitted.run
        self.model_ = (fitted if val is None else fitted.best()).model

    def _network(self, inputs: int, outputs: int) -> Any:
        if self.net is not None:
            make = self.net
            return lambda: make(inputs, outputs)
        return NNParams(
            input_dim=inputs, output_dim=outputs, hidden_dims=list(self.hidden_dims),
            dropout_prob=self.dropout,
        )  # fmt: skip

    def _inputs(self, X: Any) -> Any:
        check_is_fitted(self, "model_")
        return validate_data(self, X, dtype=np.float32, reset=False)


class NNClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A network that tells classes apart, trained by cross entropy.

    ``net(n_features, n_classes)`` makes a network of one's own; without it it is a
    feed-forward one of ``hidden_dims`` and ``dropout``. ``validation_fraction`` of the rows
    is held out, and the epoch that does best on them is kept; ``early_stopping`` counts
    epochs without an improvement. ``random_state`` decides weights, order and hold-out. The
    rest is that of ``nnx.fit``. The same configuration on the same data is the same run,
    which ``on_existing`` ("replace") is about: "resume" goes on where a killed search was and
    takes what is finished from disk.

    After ``fit``: ``classes_``, ``run_`` (the ``NNRun``), ``model_`` (the ``NNModel``).
    """

    def fit(self, X: Any, y: Any) -> NNClassifier:
        """Train on ``X`` (rows, features) and one class for each row."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "NNClassifier needs rows of at least two classes; these are of one class, "
                f"{self.classes_[0]!r}"
            )
        n = len(self.classes_)
        self._fit(X, codes, n, TaskSpec.categorical(n), "cross_entropy", codes)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """``(rows, classes)``, in the order of ``classes_``."""
        X = self._inputs(X)
        result = self.model_.predict_proba(X)
        assert result.probabilities is not None
        probabilities = result.probabilities.astype(np.float64)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        X = self._inputs(X)
        return self.classes_[self.model_.predict(X).classes]


class NNRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A network that predicts a number, trained by the mean squared error.

    Targets far from the unit scale train slowly: put it into scikit-learn's
    ``TransformedTargetRegressor``. The parameters are those of :class:`NNClassifier`, with
    ``net(n_features, 1)``. After ``fit``: ``run_`` and ``model_``.
    """

    def fit(self, X: Any, y: Any) -> NNRegressor:
        """Train on ``X`` (rows, features) and one number for each row."""
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        y = y.astype(np.float32)
        self._fit(X, y, 1, TaskSpec.regression(1), "mean_squared_error", None)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """A number for each row."""
        X = self._inputs(X)
        return self.model_.predict(X).logits[:, 0]


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"sklearn-{digest.hexdigest()[:16]}"
