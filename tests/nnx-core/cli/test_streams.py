"""What a shell hands over as output: a full disk, a closed stream, a terminal without letters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Nnx = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="shells of POSIX")


@pytest.fixture
def trained(tmp_path: Path, nnx: Nnx) -> Path:
    """A folder with a table of accented classes and a run on it."""
    rows = "".join(f"{n},{'né' if n % 2 else 'été'}\n" for n in range(40))
    (tmp_path / "data.csv").write_text("x,âge\n" + rows, encoding="utf-8")
    done = nnx("train", "data.csv", "--target", "âge", "--epochs", "2", "--quiet")
    assert done.returncode == 0, done.stderr
    return tmp_path


def shell(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of shell in which ``nnx`` is this environment's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | environment
    line = command.replace("nnx", f"'{sys.executable}' -m nnx", 1)
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", ["runs", "show best", "plugins"])
def test_a_terminal_without_a_letter_shows_an_escape(trained: Path, command: str) -> None:
    shown = shell(trained, f"nnx {command}", PYTHONIOENCODING="ascii", NNX_PLUGINS="")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.isascii()


def test_data_is_not_written_with_other_letters(trained: Path) -> None:
    refused = shell(trained, "nnx predict best data.csv", PYTHONIOENCODING="ascii")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "nnx: the output is ascii text, which has no '\\xe2'; write a file with --output FILE "
        "(UTF-8), or set PYTHONIOENCODING=utf-8\n"
    )
    written = shell(trained, "nnx predict best data.csv -o out.csv", PYTHONIOENCODING="ascii")
    assert written.returncode == 0, written.stderr
    head = (trained / "out.csv").read_text(encoding="utf-8").splitlines()[0]
    assert head == "predicted âge,probability né,probability été"
    same = shell(trained, "nnx predict best data.csv", PYTHONIOENCODING="utf-8")
    assert same.stdout == (trained / "out.csv").read_text(encoding="utf-8")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", ["best", "runs", "--help"])
def test_a_full_disk_behind_the_output_is_one_message(trained: Path, command: str) -> None:
    full = shell(trained, f"nnx {command} > /dev/full")
    assert full.returncode == 1
    assert full.stderr.endswith("nnx: the standard output: No space left on device\n")


@pytest.mark.parametrize("command", ["runs", "show best --json"])
def test_a_reader_that_has_seen_enough_or_none_at_all_is_no_error(
    trained: Path, command: str
) -> None:
    for end in ("| true", ">&-"):
        done = shell(trained, f"nnx {command} {end}")
        assert done.stderr == ""


def test_a_device_is_written_into_and_not_replaced(trained: Path) -> None:
    done = shell(trained, "nnx predict best data.csv -o /dev/stderr")
    assert done.returncode == 0
    assert done.stderr.startswith("predicted âge,")
    assert len(done.stderr.splitlines()) == 41
