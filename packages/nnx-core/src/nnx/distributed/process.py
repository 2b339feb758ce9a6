"""The process group: its start, its time-out, its end."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

# Its default arguments hold the group that exists when it is imported, for good (torch.optim
# imports it in time); imported before the first group it holds none. See shutdown().
import torch.distributed.nn.functional

from nnx.utils import validation as check

_timeout = datetime.timedelta(seconds=120)
_talk: Any = None  # the gloo group beside a default group of another backend
# The mesh of each device type, and the default process group that it was made under.
_meshes: dict[str, tuple[Any, Any]] = {}


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
    atexit.register(_leave_at_exit)
    return dist.get_rank(), dist.get_world_size()


def shutdown(*, timeout_seconds: float = 60.0) -> None:
    """Leave the process group; does nothing without one.

    Waits at most ``timeout_seconds`` for the backend to let go: a peer that was
    lost cannot keep this process from ending. Every process should call it last.

    The backend's threads drop the tensors of past collectives, for which they need the
    interpreter. They end here, with the last reference to the group, because one that
    still does so while the interpreter ends would abort the process.
    """
    seconds = check.real("shutdown", "timeout_seconds", timeout_seconds, above=0)
    if not dist.is_initialized():
        return
    atexit.unregister(_leave_at_exit)
    leaving = threading.Thread(target=_leave, daemon=True)
    leaving.start()
    leaving.join(seconds)


def _leave() -> None:
    global _talk
    _talk = None
    for _, mesh in _meshes.values():
        # torch's caches keep the mesh itself, which would keep the group.
        getattr(mesh, "_pg_registry", {}).clear()
    _meshes.clear()
    gc.collect()  # cycles of a finished fit may hold the group
    dist.destroy_process_group()


def _leave_at_exit() -> None:
    """For a script that never called :func:`shutdown`; gloo alone always lets go."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        _leave()


def talk_group() -> Any:
    """The group over which objects travel: gloo, on whatever device the models are.

    All processes ask for it together. Nobody keeps it: see :func:`shutdown`.
    """
    global _talk
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    if _talk is None:
        _talk = dist.new_group(backend="gloo", timeout=_timeout)
    return _talk


def mesh_of(device: str) -> Any:
    """All processes as a mesh of a device type, in a group where nothing else is sent.

    It is made once for a process group, because torch keeps plans for the tensors of a mesh
    by its value. All processes ask for it together. See :func:`shutdown`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    made_for, mesh = _meshes.get(device, (lambda: None, None))
    if made_for() is not dist.group.WORLD:
        mesh = DeviceMesh.from_group(dist.new_group(timeout=_timeout), device)
        _meshes[device] = (weakref.ref(dist.group.WORLD), mesh)
    return mesh


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes; ``(0, 1)`` without a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def timeout() -> datetime.timedelta:
    """How long a collective waits."""
    return _timeout
