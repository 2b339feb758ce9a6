"""The one door to torchao, an optional library imported at the call."""

from __future__ import annotations

from typing import Any

from nnx.plugins.registry import load_reference
from nnx.plugins.siblings import install_line


def require(reference: str, purpose: str) -> Any:
    """``"torchao.module:name"``, or an ``ImportError`` that names our install line."""
    try:
        return load_reference(reference)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs torchao: {install_line('nnx-peft', 'quantize')}"
        ) from error
