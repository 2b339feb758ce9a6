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
