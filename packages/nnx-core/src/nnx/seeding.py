"""Random streams and the environment: pin them, borrow them, describe it.

Importing this module loads neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any


def set_seed(seed: int, strict: bool = False) -> None:
    """Seed every global random stream: Python, NumPy and torch on all devices.

    cuDNN is made deterministic and its autotuner is switched off.
    ``PYTHONHASHSEED`` is exported for the processes started from now on (this
    interpreter fixed its own hash seed when it started).

    ``strict`` also makes torch refuse operations that have no deterministic
    implementation, and exports ``CUBLAS_WORKSPACE_CONFIG`` for them. Slower.
    """
    seed = _checked_seed(seed)
    import torch

    os.environ["PYTHONHASHSEED"] = str(seed)
    _seed_streams(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def dataloader_worker_init_fn(worker_id: int) -> None:
    """``DataLoader(worker_init_fn=...)``: seed a worker's NumPy and Python streams.

    torch has already seeded the worker's own stream with the loader's base seed
    plus the worker's number; the other two streams follow it.
    """
    import numpy
    import torch

    seed = torch.initial_seed() % 2**32
    numpy.random.seed(seed)
    random.seed(seed)


@contextlib.contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Run a block whose draws do not move the caller's random streams.

    With ``seed``, the block starts with every stream seeded from it. The
    caller's Python, NumPy, torch, CUDA and MPS states are back afterwards, on
    errors too. CUDA is never initialized here.
    """
    held = rng_state()
    try:
        if seed is not None:
            _seed_streams(_checked_seed(seed))
        yield
    finally:
        set_rng_state(held)


def rng_state() -> dict[str, Any]:
    """The state of every global random stream, as tensors, numbers and strings.

    Keys: ``python``, ``numpy``, ``torch``, and ``cuda`` (a list, one per device)
    or ``mps`` where that device is in use. The value is safe for
    ``torch.save`` and ``torch.load(weights_only=True)``.
    """
    import numpy
    import torch

    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.from_numpy(numpy.array(words, dtype=numpy.int64)), gauss_next),
        "numpy": (
            str(name),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` returned."""
    import numpy
    import torch

    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        if "cuda" in state:
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
        else:
            # CUDA had not started: its streams would have begun at torch's own seed.
            torch.cuda.manual_seed_all(torch.initial_seed())
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())


def _seed_streams(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all devices


def _checked_seed(seed: int) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ValueError(f"seed must be an integer, not {seed!r}")
    value = int(seed.__index__())
    if not 0 <= value < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), not {value}")
    return value


class EnvironmentSnapshot(dict):
    """A dict whose costly values are computed when they are first read.

    Reading any way (indexing, ``items``, ``dict(snapshot)``, JSON) gives plain
    values; a failure gives ``None``.
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Deferred):
            value = value.read(key)
            self[key] = value
        return value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:  # overridden so that dict(self) reads through us
        return super().__iter__()

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]  # computes it
        return super().pop(key, *default)

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | other

    def __ror__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return self.copy() == (other.copy() if isinstance(other, EnvironmentSnapshot) else other)

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class _Deferred:
    """One computation shared by the fields it answers, and by every copy."""

    def __init__(self, compute: Callable[[], dict[str, Any]]) -> None:
        self._compute = compute
        self._result: dict[str, Any] | None = None

    def read(self, key: str) -> Any:
        if self._result is None:
            try:
                self._result = self._compute()
            except Exception:
                self._result = {}
        return self._result.get(key)


_snapshot: dict[str, Any] | None = None


def env_snapshot(force_refresh: bool = False) -> dict[str, Any]:
    """Where this process runs: versions, platform, GPUs, determinism and the git commit.

    JSON-serializable. A field that cannot be found is ``None``; nothing raises.
    It is computed once per process (``force_refresh`` computes it again), and
    git is asked only when ``git_commit`` or ``git_dirty`` is read.
    ``git_dirty`` says whether a tracked file differs from the commit.
    """
    global _snapshot
    if _snapshot is None or force_refresh:
        _snapshot = _describe_environment()
    result = EnvironmentSnapshot()
    for key in _snapshot:
        dict.__setitem__(result, key, _snapshot[key])
    names = _gpu_names()
    if names:
        result["cuda_device_names"] = names
    deterministic = _deterministic_algorithms()
    if deterministic:
        result["deterministic_algorithms"] = deterministic
    return result


def _deterministic_algorithms() -> str | None:
    """``"on"``, ``"warn"`` or ``"off"``: what torch does where no deterministic way exists."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return "warn"
    return "on" if torch.are_deterministic_algorithms_enabled() else "off"


def _describe_environment() -> dict[str, Any]:
    git = _Deferred(_ask_git)
    return {
        "nnx": _version("nnx-core"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cuda_available": _attempt(lambda: bool(_torch().cuda.is_available())),
        "cuda_device_count": _attempt(lambda: int(_torch().cuda.device_count())),
        "git_commit": git,
        "git_dirty": git,
    }


def _torch() -> Any:
    import torch

    return torch


def _gpu_names() -> list[str] | None:
    """The GPUs in use. Asking an idle CUDA would start it, so that is not done."""
    torch = sys.modules.get("torch")
    if torch is None or not _attempt(torch.cuda.is_initialized):
        return None
    count = torch.cuda.device_count()
    return _attempt(lambda: [torch.cuda.get_device_name(i) for i in range(count)])


def _ask_git() -> dict[str, Any]:
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # looking must not touch the index
    lines = subprocess.run(
        command, capture_output=True, text=True, timeout=10, check=True, env=environment
    ).stdout.splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if oid is None or oid.startswith("("):  # a repository with no commit yet
        return {}
    return {"git_commit": oid, "git_dirty": any(not line.startswith("#") for line in lines)}


def _version(distribution: str) -> str | None:
    return _attempt(lambda: metadata.version(distribution))


def _attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return None
