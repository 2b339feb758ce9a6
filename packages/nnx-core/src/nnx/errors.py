"""The one root of the errors that NNx defines."""

from __future__ import annotations


class NNxError(Exception):
    """What every error class of NNx derives from, in every distribution.

    Beside it each keeps its built-in bases: a refusal of a value is a ``ValueError``
    too. Built-in errors that NNx raises as they are (a ``FileNotFoundError`` of a path)
    are not among these, and warnings are warnings.
    """
