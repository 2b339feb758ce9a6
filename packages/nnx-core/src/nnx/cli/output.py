"""Where a command writes what it made: a file that harms no other, or the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def check_output(output: str, *, inputs: Iterable[str] = ()) -> None:
    """Refuse, before any work, a file that cannot be written or that is an input."""
    path = Path(output)
    if path.is_dir():
        raise IsADirectoryError(f"{output} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}, where {output} would lie")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the folder {path.parent} may not be written, so {output} cannot be")
    for source in inputs:
        if path.is_file() and os.path.exists(source) and path.samefile(source):
            raise FileExistsError(
                f"--output {output} is the input {source}, which it would replace; "
                "choose another file"
            )


def write_output(output: str | None, text: str) -> None:
    """Write text to a file, whole or not at all; to a device or pipe; or to the terminal."""
    from nnx.utils.files import atomic_write

    if output is None:
        write_to_terminal(text)
    elif os.path.exists(output) and not os.path.isfile(output):
        with open(output, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
    else:
        with atomic_write(output) as stream:
            stream.write(text)


def write_to_terminal(text: str) -> None:
    """Write data to stdout as it is, or refuse: a replaced letter would be other data."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the output is {encoding} text, which has no {error.object[error.start]!r}; write a "
            "file with --output FILE (UTF-8), or set PYTHONIOENCODING=utf-8"
        ) from None
    sys.stdout.write(text)
