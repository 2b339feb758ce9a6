"""The process group: its start, its time-out, its end."""

from __future__ import annotations

import datetime
import os
import threading

import torch
import torch.distributed as dist

from nnx.utils import validation as check

_timeout = datetime.timedelta(seconds=120)


def init_process_group(
    backend: str | None = None, *, timeout_seconds: float = 120.0
) -> tuple[int, int]:
    """Join the processes that torchrun started; returns ``(rank, world_size)``.

    ``backend`` is NCCL where every process has a CUDA device and gloo elsewhere.
    A collective that a process does not answer within ``timeout_seconds`` ends the
    job. On CUDA the process's device becomes ``cuda:LOCAL_RANK``.

    Raises ``RuntimeError`` outside torchrun (its environment variables are
    missing) or when a group exists already.
    """
    global _timeout
    seconds = check.real("init_process_group", "timeout_seconds", timeout_seconds, above=0)
    missing = [
        n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ
    ]
    if missing:
        raise RuntimeError(
            f"init_process_group needs {', '.join(missing)} in the environment. Start the script "
            "with torchrun, for example: torchrun --nproc-per-node 2 train.py"
        )
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; call shutdown() before another one")
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, timeout=_timeout)
    return dist.get_rank(), dist.get_world_size()


def shutdown(*, timeout_seconds: float = 60.0) -> None:
    """Leave the process group; does nothing without one.

    Waits at most ``timeout_seconds`` for the backend to let go: a peer that was
    lost cannot keep this process from ending.
    """
    seconds = check.real("shutdown", "timeout_seconds", timeout_seconds, above=0)
    if not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(seconds)


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes; ``(0, 1)`` without a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def timeout() -> datetime.timedelta:
    """How long a collective waits."""
    return _timeout
