"""Check one extension that is installed with nothing of ours but core beside it.

    python tools/check_isolated.py nnx-peft

Its plugin loads, everything that it contributes and publishes can be imported,
its modules import, and what its siblings would bring is refused with the line
that installs them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

import nnx
from nnx.plugins import manager, siblings


def check(extension: str) -> None:
    ours = {d.name for d in distributions() if d.name in {"nnx-core", *siblings.MODULES}}
    assert ours == {"nnx-core", extension}, f"installed: {sorted(ours)}"
    assert "site-packages" in Path(str(nnx.__file__)).parts, f"not a wheel: {nnx.__file__}"
    loaded = {p.distribution: p for p in manager.default().plugins}
    assert set(loaded) - {"nnx-core"} == {extension}, f"plugins: {sorted(loaded)}"
    assert loaded[extension].status == "loaded", loaded[extension].error
    assert loaded[extension].heavy_modules == (), loaded[extension].heavy_modules

    for name in loaded[extension].contributes.get("name", ()):
        getattr(nnx, name)
    entries = 0
    for kind, registry in manager.default().registries.items():
        for id, version in registry:
            if registry.owner(id, version) == loaded[extension].owner:
                try:
                    registry.resolve(id, version)
                except ImportError as error:
                    # An extra of the extension may be absent, if it says how to get it.
                    assert "pip install" in str(error), f"{kind} {id}: {error}"
                entries += 1
    modules = [
        m for m in siblings.MODULES[extension] if PathFinder.find_spec(f"nnx.{m}", nnx.__path__)
    ]
    for module in modules:
        importlib.import_module(f"nnx.{module}")

    for sibling, names in siblings.MODULES.items():
        for name in (*names, *siblings.PUBLIC_NAMES[sibling]) if sibling != extension else ():
            try:
                getattr(nnx, name)
            except AttributeError as error:
                assert siblings.install_line(sibling) in str(error), error
            else:
                raise AssertionError(f"nnx.{name} of {sibling} is there without it")
    print(f"{extension}: {len(modules)} modules, {entries} registered, alone beside core")


if __name__ == "__main__":
    check(sys.argv[1])
