"""Opt-in ``torch.compile`` for the forward of the built-in training step.

A :class:`CompileSpec` is the request, a :class:`CompileRecord` what took effect.
The live wrapper is in ``nnx.compilation.forward``; reading a record needs no torch.
"""

from nnx.compilation.record import CompileFailed, CompileRecord
from nnx.params.compilation import COMPILE_FAILURE_POLICIES, COMPILE_MODES, CompileSpec

__all__ = [
    "COMPILE_FAILURE_POLICIES",
    "COMPILE_MODES",
    "CompileFailed",
    "CompileRecord",
    "CompileSpec",
]
