"""Lay the sources of all distributions as one package, the way wheels merge.

Editable installs keep each distribution's part of ``nnx`` in its own folder.
Static tools (mypy, import-linter, griffe) want one tree, so this links every
file into ``build/merged/nnx`` and prints ``build/merged``. It fails when two
distributions ship the same file.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def merge(target: Path = ROOT / "build" / "merged") -> Path:
    """Rebuild ``target`` as links to the sources and return it."""
    shutil.rmtree(target, ignore_errors=True)
    owners: dict[Path, str] = {}
    for source in sorted(ROOT.glob("packages/*/src")):
        for file in sorted(source.rglob("*")):
            if not file.is_file() or "__pycache__" in file.parts:
                continue
            relative = file.relative_to(source)
            owner = source.parent.name
            if relative in owners:
                sys.exit(f"{relative} is shipped by both {owners[relative]} and {owner}")
            owners[relative] = owner
            link = target / relative
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file, link)
    return target


if __name__ == "__main__":
    print(merge())
