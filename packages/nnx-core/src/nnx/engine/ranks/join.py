"""Who trains: this process alone, or all of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnx.distributed.group import Group
from nnx.distributed.process import rank_and_world
from nnx.distributed.spec import DDP, FSDP
from nnx.engine.ranks.base import Ranks

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest


def join(request: FitRequest) -> Ranks:
    """The processes of ``request``: this one, or all of its process group."""
    spec = request.distributed
    _, world = rank_and_world()
    if spec is None:
        return Ranks()
    if not isinstance(spec, (DDP, FSDP)):
        raise TypeError(f"distributed must be DDP(), FSDP() or None, not {type(spec).__name__}")
    name = type(spec).__name__
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            f"distributed={name}() needs a process group: call nnx.distributed.init_process_group() "
            "in a script started by torchrun"
        )
    if spec.writer_rank >= world:
        raise ValueError(
            f"{name}.writer_rank is {spec.writer_rank}, and the ranks end at {world - 1}"
        )
    if isinstance(spec, FSDP):
        from nnx.engine.ranks.sharded import Sharded

        return Sharded(Group(spec.writer_rank), spec)
    from nnx.engine.ranks.data_parallel import DataParallel

    return DataParallel(Group(spec.writer_rank), spec)
