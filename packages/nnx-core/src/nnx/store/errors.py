"""What the run store refuses with."""

from __future__ import annotations

from nnx.errors import NNxError
from nnx.utils.locks import LockBusyError


class ResumePointError(ValueError, NNxError):
    """A resume point that is torn, mixed or corrupted, or a file that is not data."""


class RunBusyError(LockBusyError):
    """A run that another process trains or writes now."""


class RunExistsError(FileExistsError, NNxError):
    """A run of the same identity is there, and was not to be replaced."""

    def __init__(self, run_id: str, root: str, *, why: str = "") -> None:
        super().__init__(
            f"run {run_id} already exists in {root}{why and f', and {why}'}. Give the new one a "
            "salt= or a data_id, replace the old one with overwrite_existing=True, or say "
            "on_existing='resume' or 'load' to go on with it."
        )
        self.run_id = run_id

    __reduce__ = NNxError.__reduce__  # that of OSError would call the constructor


class RunReplacedError(RuntimeError, NNxError):
    """A run that was replaced while its records were read."""


class ForeignFileError(ResumePointError):
    """A file whose content would need code to load: another system wrote it."""


class HistoryCorruptionError(ValueError, NNxError):
    """A recorded history whose committed part cannot be read as it was written."""
