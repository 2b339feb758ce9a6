"""Agreement between the processes of a fit.

Every exchange begins with one small question, "is anybody in trouble?", that
all processes answer. A process that failed answers yes instead of whatever it
would have exchanged next, so the others learn of it at their next exchange and
none waits for a message that never comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nnx.distributed.failure import DistributedFailure
from nnx.distributed.process import talk_group, timeout

T = TypeVar("T")

# What a process can be about to do that takes all of them; otherwise nothing special.
FORWARD, BACKWARD = "run the network", "back-propagate"
_ABOUT = ("", FORWARD, BACKWARD)


class Group:
    """The processes of one fit. Objects travel over gloo, gradients over the default backend."""

    def __init__(self, writer_rank: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.writer_rank = writer_rank
        talk_group()
        self._lost = False
        self.agreed = False  # whether all processes know of the failure that ends the fit

    @property
    def is_writer(self) -> bool:
        return self.rank == self.writer_rank

    @property
    def is_whole(self) -> bool:
        """Whether all processes still answer, as far as this one knows."""
        return not self._lost

    @property
    def talk(self) -> Any:
        """The torch group over which objects travel."""
        return talk_group()

    # -- trouble ---------------------------------------------------------------

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a fit's body; an error in any process ends it in all.

        It is raised as it is where it happened, and as ``DistributedFailure`` elsewhere.
        """
        try:
            yield
            self.agree()
        except (DistributedFailure, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self.agreed:
                raise
            self._report(error)

    def agree(self, about: str = "") -> None:
        """Meet the other processes; raises ``DistributedFailure`` when one has failed.

        Also when another process is ``about`` to do something else: of what takes all
        processes together, all must do the same.
        """
        failed, highest, lowest = self._in_trouble(False, _ABOUT.index(about))
        if failed:
            self._explain()
        if highest != -lowest:
            self._raise_for(
                [f"it is about to {a or 'meet the others elsewhere'}" for a in self._gather(about)],
                "the processes do not do the same; a forward of a sharded network, for one, takes "
                "all of them",
            )
        self.agreed = False

    def _in_trouble(self, mine: bool, about: int = 0) -> list[int]:
        status = torch.tensor([int(mine), about, -about])
        with self.answering():
            dist.all_reduce(status, dist.ReduceOp.MAX, group=talk_group())
        return status.tolist()

    def _report(self, error: BaseException) -> NoReturn:
        """Tell the others what happened here, and raise it."""
        if not self._lost:
            self._in_trouble(True)
            self._gather(_line(error))
            self.agreed = True
        raise error

    def _explain(self) -> NoReturn:
        told = self._gather(None)
        failed = sum(text is not None for text in told)
        self._raise_for(told, f"{failed} of {self.world_size} processes failed, so all stopped")

    def _raise_for(self, told: Sequence[str | None], what: str) -> NoReturn:
        self.agreed = True
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        raise DistributedFailure("\n  ".join([f"{what}:", *lines]))

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn a backend's error, a lost peer or a time-out, into the common one."""
        try:
            yield
        except RuntimeError as error:
            self._lost = True
            raise DistributedFailure(
                f"rank {self.rank} lost contact with another process (it died, or did not answer "
                f"within {timeout().total_seconds():g} s): {_line(error)}"
            ) from error

    # -- exchange --------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank, in every process. Values are pickled."""
        self.agree()
        return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        with self.answering():
            dist.all_gather_object(found, value, group=talk_group())
        return found

    def from_writer(self, make: Callable[[], T]) -> T:
        """What ``make()`` returns in the writer; only the writer calls it.

        An error there is an error everywhere.
        """
        value, error = None, None
        if self.is_writer:
            try:
                value = make()
            except Exception as caught:
                error = caught
        if error is not None:
            self._report(error)
        self.agree()
        box = [value]
        with self.answering():
            dist.broadcast_object_list(box, src=self.writer_rank, group=talk_group())
        return box[0]  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Whether some process says yes."""
        return any(self.gather(flag))

    def add(self, numbers: Sequence[float], *, about: str = "") -> list[float]:
        """Sums over the processes, position by position."""
        self.agree(about)
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.answering():
            dist.all_reduce(sums, group=talk_group())
        return sums.tolist()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite ``tensors`` with the writer's, in place."""
        self.agree()
        with torch.no_grad(), self.answering():
            for tensor in tensors:
                dist.broadcast(tensor, src=self.writer_rank)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every process's tensor, by rank; all are of one shape."""
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with torch.no_grad(), self.answering():
            dist.all_gather(found, tensor.contiguous())
        return found

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add up ``tensors`` over the processes, in place, in few large messages."""
        with torch.no_grad(), self.answering():
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket])):
                    tensor.copy_(piece.view_as(tensor))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_BUCKET = 1 << 23  # elements of one message: 32 MiB of float32


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors that share dtype and device, up to a size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not alike or size + tensor.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
