"""``nnx doctor``: what this environment can do, and how to get what it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import typer

Section = list[tuple[str, str]]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices and what is missing.

    Missing optional parts are named with the line that installs them.
    """
    report = {
        "versions": versions(),
        "devices": devices(),
        "precision": precision(),
        "optional parts": optional_parts(),
        "plugins": plugins(),
    }
    if as_json:
        import json

        print(json.dumps({title: dict(rows) for title, rows in report.items()}, indent=2))
        return
    from nnx.cli.screen import sections

    sections(report)


def versions() -> Section:
    import platform

    import numpy
    import torch

    from nnx._version import __version__

    return [
        ("nnx", __version__),
        ("python", f"{platform.python_version()} ({platform.platform()})"),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
    ]


def devices() -> Section:
    import os

    import torch

    found = [("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")]
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found.append((f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB"))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU"))
    return found


def precision() -> Section:
    from nnx.precision import precision_support

    return [
        (f"{mode} on {kind}", state)
        for kind, modes in precision_support().items()
        for mode, state in modes.items()
    ]


def optional_parts() -> Section:
    """Each sibling and each extra of an installed distribution: present, or its install line."""
    from importlib_metadata import PackageNotFoundError, requires, version

    from nnx.plugins import siblings

    rows = []
    for name in ("nnx-core", *siblings.MODULES):
        try:
            found = version(name)
        except PackageNotFoundError:
            rows.append((name, f"missing: {siblings.install_line(name)}"))
            continue
        if name != "nnx-core":
            rows.append((name, found))
        for extra, needed in _extras(requires(name) or []):
            missing = [library for library in needed if not _installed(library)]
            if missing:
                line = siblings.install_line(name, extra)
                state = f"missing {', '.join(missing)}: {line}"
            else:
                state = ", ".join(f"{library} {version(library)}" for library in needed)
            rows.append((f"{name}[{extra}]", state))
    return rows


def plugins() -> Section:
    from nnx.plugins import manager

    return [
        (plugin.name, plugin.status if plugin.error is None else f"failed: {plugin.error}")
        for plugin in manager.default().plugins
    ]


def _extras(requirements: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The extras with their third-party libraries, from ``Requires-Dist`` lines."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", requirement)
        library = re.match(r"[A-Za-z0-9._-]+", requirement)
        if extra and library and not library.group().startswith("nnx-"):
            extras.setdefault(extra.group(1), []).append(library.group())
    yield from extras.items()


def _installed(library: str) -> bool:
    from importlib_metadata import PackageNotFoundError, version

    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True
