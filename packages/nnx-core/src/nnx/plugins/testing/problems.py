"""What a call left changed in the process, apart from what it returned."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

Problems = list[str]


@contextlib.contextmanager
def side_effects(what: str, *, draws: bool = False) -> Iterator[Problems]:
    """Collect what the block changed globally, as sentences about ``what``.

    Watched are the random streams of Python, NumPy and torch (unless ``draws``
    are allowed), torch's global switches, the environment, the working
    directory, ``sys.path``, signal handlers, the root logger and threads.
    """
    found: Problems = []
    _warm_up()
    before = _global_state()
    yield found
    after = _global_state()
    for name, value in before.items():
        if value != after[name] and not (draws and name.endswith("random stream")):
            found.append(f"{what} changed {name}")


@functools.cache
def _warm_up() -> None:
    """Let torch import what it imports at its first step, which sets variables of its own."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.square().backward()
    torch.optim.SGD([parameter], lr=0.1).step()


def _global_state() -> dict[str, Any]:
    import numpy as np
    import torch

    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "Python's random stream": random.getstate(),
        "NumPy's random stream": repr(
            (numpy_state["state"]["pos"], numpy_state["state"]["key"].tobytes())
        ),
        "torch's random stream": torch.get_rng_state().numpy().tobytes(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's matmul precision": torch.get_float32_matmul_precision(),
        "cudnn's benchmark mode": torch.backends.cudnn.benchmark,
        "the environment variables": dict(os.environ),
        "the working directory": os.getcwd(),
        "sys.path": tuple(sys.path),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "the root logger": (logging.root.level, tuple(map(id, logging.root.handlers))),
        "the number of threads": threading.active_count(),
    }
