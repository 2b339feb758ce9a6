"""The refusals of a conformal prediction."""

from __future__ import annotations

from nnx.errors import NNxError


class ConformalError(ValueError, NNxError):
    """Scores, levels or a document that cannot be used."""


class ConformalMismatchError(ConformalError):
    """Another model, label order or calibrator than was calibrated."""
