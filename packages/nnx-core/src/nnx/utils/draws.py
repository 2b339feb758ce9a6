"""Random numbers that are a function of what they are drawn for.

A draw is the hash of a seed and of integers that name its purpose (an epoch, a
row, a position), as in a counter-based generator: it depends on nothing that was
drawn before, so batches do not depend on how the work is divided or resumed.
The hash is SplitMix64's finalizer (Steele, Lea & Flood, 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(seed: int, *keys: int) -> int:
    """One 64-bit number from a seed and further integers, in their order."""
    value = seed & _MASK
    for key in (0, *keys):
        value = (value + (key & _MASK) * _STEP + _STEP) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= value >> 31
    return value


def hashed(seed: int, *keys: Any) -> np.ndarray:
    """64-bit numbers, one for each broadcast combination of ``keys``, in their order.

    ``keys`` are integers or integer arrays that broadcast together.
    """
    value: Any = np.uint64(mixed(seed))
    step = np.uint64(_STEP)
    with np.errstate(over="ignore"):  # wraps, as it must
        for key in keys:
            value = value + np.asarray(key).astype(np.uint64) * step + step
            value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
            value = value ^ (value >> np.uint64(31))
    return np.asarray(value)


def uniforms(seed: int, *keys: Any) -> np.ndarray:
    """Float64 numbers in [0, 1), one for each broadcast combination of ``keys``."""
    return (hashed(seed, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
