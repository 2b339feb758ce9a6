"""Typed questions, and validated, labelled probabilities as their answers.

A provider answers; one validator checks every answer. Importing this starts no
backend and needs no hosted service.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
