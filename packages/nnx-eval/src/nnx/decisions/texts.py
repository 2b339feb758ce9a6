"""Inputs that are texts."""

from __future__ import annotations

from typing import Any

from nnx.utils.validation import show

from .errors import InvalidDecisionRequest


def texts_of(inputs: Any) -> list[str]:
    """One text, or a sequence of texts, as a list that is not empty."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, (list, tuple)) or not texts:
        raise InvalidDecisionRequest(f"inputs are a text or a list of texts, not {show(inputs)}")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InvalidDecisionRequest(f"inputs[{i}] is no text but {show(text)}")
    return list(texts)
