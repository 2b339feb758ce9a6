"""Logits and targets whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np

LABELS = ["ant", "bee", "cat"]
BOUND: dict[str, Any] = {"model_id": "m:1", "labels": LABELS}
SPLITS: dict[str, Any] = {
    "split_id": "calibration", "train_split_id": "train", "test_split_id": "test",
}  # fmt: skip


def overconfident(
    rows: int = 600, classes: int = 3, *, seed: int = 0, factor: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are ``factor`` times what the targets were drawn from."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(size=(rows, classes)) * 1.5
    shares = np.exp(honest) / np.exp(honest).sum(1, keepdims=True)
    targets = (shares.cumsum(1) > rng.random((rows, 1))).argmax(1)
    return honest * factor, targets
