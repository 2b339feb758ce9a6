"""A run as data that can travel: one checkpoint, its training state, its calibrators.

A bundle is a folder of JSON and safetensors. :func:`export_bundle` writes one from a
run, :func:`inspect_bundle` says what is in it, :func:`validate_bundle` checks every
byte, :func:`reconstruct_bundle` rebuilds the model, which then serves or resumes.
Reading one runs no code of its writer.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
