"""Weights as a NumPy archive, for programs without torch."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np


def to_npz(model: Any, path: str, *, compressed: bool = False) -> str:
    """Write every tensor of ``model.net.state_dict()`` under its name; the path.

    The file is whole or not there: it is written beside its place and moved.
    """
    arrays = {name: tensor.cpu().numpy() for name, tensor in model.net.state_dict().items()}
    write = np.savez_compressed if compressed else np.savez
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream, **arrays)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
