"""What the run store refuses with."""

from __future__ import annotations

from nnx.utils.locks import LockBusyError


class ResumePointError(ValueError):
    """A resume point that is torn, mixed or corrupted, or a file that is not data."""


class RunBusyError(LockBusyError):
    """A run that another process trains or writes now."""


class ForeignFileError(ResumePointError):
    """A file whose content would need code to load: another system wrote it."""


class HistoryCorruptionError(ValueError):
    """A recorded history whose committed part cannot be read as it was written."""
