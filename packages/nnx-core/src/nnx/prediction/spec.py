"""The declaration of probabilities; it lives with the other parameters."""

from __future__ import annotations

from nnx.params.probability import PredictionValidationError as PredictionValidationError
from nnx.params.probability import ProbabilitySpec as ProbabilitySpec
