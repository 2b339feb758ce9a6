"""What holds for all tests, on every machine."""

from __future__ import annotations

import signal

# A shell starts background jobs with Ctrl-C ignored; tests send it on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests draw the same examples everywhere and have no clock: machines differ.
try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a core-only environment
    pass
else:
    settings.register_profile(
        "nnx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("nnx")
