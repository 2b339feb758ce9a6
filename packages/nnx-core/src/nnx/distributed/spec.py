"""What ``NNModel.train(distributed=...)`` takes."""

from __future__ import annotations

from dataclasses import dataclass

from nnx.utils import validation as check


@dataclass(frozen=True, slots=True)
class DDP:
    """Data-parallel training: a replica of the model in every process.

    ``writer_rank`` is the process that holds the run's lease and writes its files.
    ``find_unused_parameters`` accepts updates in which some parameters get a
    gradient in no process; without it such a parameter is an error, because it
    usually means that the processes run different models.
    """

    writer_rank: int = 0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        rank = check.count("DDP", "writer_rank", self.writer_rank, at_least=0)
        object.__setattr__(self, "writer_rank", rank)
        check.flag("DDP", "find_unused_parameters", self.find_unused_parameters)


@dataclass(frozen=True, slots=True)
class FSDP:
    """Data-parallel training with parameters, gradients and optimizer state sharded (FSDP2).

    Each process keeps a part of every parameter and gathers the whole of a *block*
    only while it runs. ``blocks`` are patterns (as of :mod:`fnmatch`) for the dotted
    names of the submodules that are gathered as one, for example
    ``("encoder.layers.*",)``. ``None`` takes the members of the outermost
    ``ModuleList`` and ``Sequential`` containers; what is in no block is gathered with
    the whole network, as everything is with ``()``.

    ``writer_rank`` and ``find_unused_parameters`` are those of :class:`DDP`.
    """

    writer_rank: int = 0
    blocks: tuple[str, ...] | None = None
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        rank = check.count("FSDP", "writer_rank", self.writer_rank, at_least=0)
        object.__setattr__(self, "writer_rank", rank)
        check.flag("FSDP", "find_unused_parameters", self.find_unused_parameters)
        if self.blocks is None:
            return
        given: object = self.blocks
        if isinstance(given, str) or not all(isinstance(p, str) and p for p in self.blocks):
            raise ValueError(
                f"FSDP.blocks must be names or patterns of submodules, such as "
                f"('layers.*',), not {self.blocks!r}"
            )
        object.__setattr__(self, "blocks", tuple(self.blocks))
