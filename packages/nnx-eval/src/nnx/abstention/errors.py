"""The refusals of an abstention."""

from __future__ import annotations

from nnx.errors import NNxError


class AbstentionError(ValueError, NNxError):
    """Malformed probabilities, or a policy or document that cannot be."""


class AbstentionSchemaError(AbstentionError):
    """Other labels, or another model, field or calibrator, than the policy reads."""
