"""What a message of NNx tells its reader to do can be done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nnx
import pytest
from nnx.plugins import manager, siblings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}

# -- distributions: what a sibling is said to provide is there ---------------------------

# What an extension is going to hold, as long as it has only a part of it.
NOT_YET: dict[str, set[str]] = {"nnx-lm": {"interop"}}


def test_the_reserved_distributions_are_those_that_contribute_nothing() -> None:
    plugins = {plugin.distribution: plugin for plugin in manager.default().plugins}
    empty = {name for name in siblings.MODULES if not plugins[name].contributes}
    assert empty == siblings.RESERVED


@pytest.mark.parametrize("distribution", sorted(set(siblings.MODULES) - siblings.RESERVED))
def test_a_distribution_provides_what_the_messages_say_of_it(distribution: str) -> None:
    missing = set()
    for name in (*siblings.PUBLIC_NAMES[distribution], *siblings.MODULES[distribution]):
        try:
            getattr(nnx, name)
        except (ImportError, AttributeError):
            missing.add(name)
    registered = {id for kind in manager.default().registries.values() for id, _ in kind}
    for prefix in siblings.IDS[distribution]:
        found = [i for i in registered if i == prefix or i.startswith(prefix.rstrip(".") + ".")]
        missing |= set() if found else {prefix}
    assert missing == NOT_YET.get(distribution, set())


def test_pip_finds_every_distribution_where_its_line_says() -> None:
    lines = [siblings.install_line(name) for name in PROJECTS]
    assert all(line.startswith("pip install ") for line in lines)
    wanted = [word for line in lines for word in re.findall(r'(?:-e )?"[^"]+"', line)]
    assert len(wanted) == len(PROJECTS), lines
    arguments = [part.strip('"') for word in wanted for part in word.split(" ", 1)]
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index",
        "--no-build-isolation", "--force-reinstall", "--disable-pip-version-check", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.rsplit("Would install", 1)[1].split()
    assert {re.sub(r"-[0-9.]+$", "", name) for name in found} == set(PROJECTS)
