"""The refusals of an abstention."""

from __future__ import annotations


class AbstentionError(ValueError):
    """Malformed probabilities, or a policy or document that cannot be."""


class AbstentionSchemaError(AbstentionError):
    """Other labels, or another model, field or calibrator, than the policy reads."""
