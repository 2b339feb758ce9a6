"""Property tests draw the same examples everywhere and have no clock: machines differ."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a core-only environment
    pass
else:
    settings.register_profile(
        "nnx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("nnx")
