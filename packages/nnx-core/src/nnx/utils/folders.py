"""Folders, made and removed through :data:`nnx.utils.files.disk`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from nnx.utils import files as fs
from nnx.utils.disk import StrPath


def make_folder(path: StrPath) -> None:
    """Make a folder and those above it, durably; one that is there already is fine."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    if above != os.path.abspath(path):
        make_folder(above)
    try:
        fs.disk.mkdir(path)
    except FileExistsError:  # another process was quicker
        if not os.path.isdir(path):
            raise
    with contextlib.suppress(OSError):  # of folders above that are not ours
        fs.disk.flush_directory(above)


@contextlib.contextmanager
def new_folders(path: StrPath) -> Iterator[None]:
    """:func:`make_folder`; when the block fails, what was made and is empty goes again."""
    made: list[str] = []
    at = os.path.abspath(path)
    while not os.path.isdir(at) and at != os.path.dirname(at):
        made.append(at)
        at = os.path.dirname(at)
    try:
        make_folder(path)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                fs.disk.rmdir(folder)
        raise


def flush_file(path: StrPath) -> None:
    """Flush a file that another library wrote, before it gets its name."""
    with fs.closing(fs.disk.reopen(path)) as descriptor:
        fs.disk.flush(descriptor)


def remove_tree(path: StrPath) -> None:
    """Remove a folder and what it holds; a link in it is removed, never followed.

    What another process removes meanwhile is no error.
    """
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                fs.disk.unlink(entry.path)
    fs.disk.rmdir(path)


def remove_tree_quietly(path: StrPath) -> None:
    """Remove what can be removed of a folder, while another error is on its way."""
    with contextlib.suppress(OSError):
        remove_tree(path)
