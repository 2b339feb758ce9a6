"""The refusals of a calibration."""

from __future__ import annotations

from nnx.errors import NNxError


class CalibrationError(ValueError, NNxError):
    """Logits, targets or a document that a calibration cannot use."""


class CalibrationFitError(CalibrationError):
    """``CalibrationFit.require()`` of a fit that found no calibrator."""


class CalibrationMismatchError(CalibrationError):
    """Other labels, or another model, than the calibrator was fitted on."""
