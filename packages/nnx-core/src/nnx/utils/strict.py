"""Files and JSON of strangers: bounded, regular, without second meanings.

Everything here refuses with ``ValueError`` (or a subclass given as ``error``) and
reads no more than the stated number of bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from typing import IO, Any, NoReturn

from nnx.utils.disk import StrPath

MAX_JSON_BYTES = 64 << 20
MAX_JSON_ITEMS = 4_000_000  # what a hundred thousand tensors need, and 1 GiB at most
MAX_JSON_DEPTH = 200
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for a writer
    | getattr(os, "O_BINARY", 0)
)


@contextlib.contextmanager
def open_regular(
    path: StrPath, *, size: int | None = None, error: type[ValueError] = ValueError
) -> Iterator[IO[bytes]]:
    """Open a regular file without following a link at its name.

    A link, FIFO, device or folder is refused unopened or unread, and so is a file
    that is not of ``size`` bytes where that is given.
    """
    shown = os.fspath(path)
    try:
        before = os.lstat(path)
        if not stat.S_ISREG(before.st_mode):
            raise error(f"{shown} is {_kind(before.st_mode)}, not a regular file")
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise error(f"{shown} is missing") from None
    except OSError as failure:
        raise error(f"{shown} cannot be opened: {failure.strerror}") from None
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        now = os.fstat(descriptor)
        if not os.path.samestat(before, now) or not stat.S_ISREG(now.st_mode):
            raise error(f"{shown} changed while it was opened")
        if size is not None and now.st_size != size:
            raise error(f"{shown} has {now.st_size} bytes, not the {size} that are stated")
        yield stream


def read_regular(path: StrPath, *, limit: int, error: type[ValueError] = ValueError) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; see :func:`open_regular`."""
    with open_regular(path, error=error) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise error(f"{os.fspath(path)} has {size} bytes; at most {limit} are read")
        data = read_exactly(stream, size, path, error=error)
        if stream.read(1):
            raise error(f"{os.fspath(path)} grew while it was read")
        return data


def read_exactly(
    stream: IO[bytes], size: int, path: StrPath, *, error: type[ValueError] = ValueError
) -> bytes:
    """``size`` bytes of an unbuffered stream; a shorter file is refused."""
    parts: list[bytes] = []
    while size:
        part = stream.read(size)
        if not part:
            raise error(f"{os.fspath(path)} became shorter while it was read")
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")


def parse_json(data: bytes | bytearray, where: str, *, error: type[ValueError] = ValueError) -> Any:
    """Strict JSON: UTF-8, no repeated key, no ``NaN``, bounded in items and in depth."""
    if len(data) > MAX_JSON_BYTES:
        raise error(f"{where} has {len(data)} bytes of JSON; at most {MAX_JSON_BYTES} are read")
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > MAX_JSON_ITEMS:
        raise error(f"{where} is JSON of {items} items; at most {MAX_JSON_ITEMS} are read")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        _check_depth(value)
    except RecursionError:
        raise error(f"{where} is nested too deeply") from None
    except ValueError as failure:
        raise error(f"{where} is not strict JSON: {failure}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
