"""The guide for plugin authors, followed to the letter by somebody who has nothing yet."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from nnx.plugins import hookspecs

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
FILE = re.compile(r'^```(?:python|toml) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.slow  # a whole project is installed and tested, in real processes
def test_the_project_of_the_guide_installs_passes_its_tests_and_works(tmp_path: Path) -> None:
    project = tmp_path / "acme-zoo"
    for path, text in FILE.findall(GUIDE.read_text(encoding="utf-8")):
        file = project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path and os.path.isdir(path)]
    (site / "zz_seen.pth").write_text("\n".join(seen), encoding="utf-8")
    python = str(tmp_path / "env" / "bin" / "python")

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=project, text=True, capture_output=True, timeout=280,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", "--no-build-isolation", "-e", ".")  # fmt: skip
    assert "2 passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    used = run(python, "use.py").splitlines()
    assert used[-2] == "shapes.txt SignSGD"
    id = re.match(r"<b>(\w{8})</b>: 6 records", used[-1]).group(1)
    assert (project / "shapes.txt").read_text().splitlines()[0] == "0.weight (8, 6)"
    assert run(python, "-m", "nnx", "zoo", id, "--loud") == "2 EPOCHS\n"
    shown = run(python, "-m", "nnx", "plugins", "--json")
    assert '"acme.halve@v1"' in shown


def test_the_guide_shows_every_hook_whole() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    hooks = [name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)
             if name.startswith("nnx_")]  # fmt: skip
    assert len(hooks) == 12
    for hook in hooks:
        implemented = f"def {hook}():\n    return {{" in text
        assert implemented or (hook == "nnx_nets" and "`nnx_nets`" in text), hook
    assert f"nnx_hookspec_version = {hookspecs.HOOKSPEC_VERSION} " in text


def test_every_module_that_the_plugin_of_the_guide_names_is_on_the_page() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    files = {path for path, _ in FILE.findall(text)}
    named = set(re.findall(r'"acme_zoo\.(\w+):\w+"', text))
    assert named
    assert {f"src/acme_zoo/{module}.py" for module in named} <= files
