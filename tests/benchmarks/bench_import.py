"""What importing NNx and asking the command cost, beside the interpreter and torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measure import Row, children_seconds, interleaved


def _process(*arguments: str, cwd: str | None = None) -> None:
    subprocess.run(
        [sys.executable, *arguments], check=True, cwd=cwd, stdout=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip


_bare = partial(_process, "-c", "pass")
# Processor time: what a process takes on a machine that does nothing else.
_timed = partial(interleaved, clock=children_seconds)


def bench_import() -> Iterator[Row]:
    ours, bare, spread = _timed(partial(_process, "-c", "import nnx"), _bare, repeats=11)
    yield Row(
        "import nnx", ours * 1e3, bare * 1e3, against="python -c pass",
        target="<= 250 ms more", met=ours - bare <= 0.25, spread=spread,
    )  # fmt: skip
    ours, torch, spread = _timed(
        partial(_process, "-c", "import nnx"), partial(_process, "-c", "import torch"), repeats=5
    )
    yield Row("import nnx", ours * 1e3, torch * 1e3, against="import torch", spread=spread)


def bench_commands() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        table = "".join(f"{n},{n % 2}\n" for n in range(20))
        (Path(folder) / "data.csv").write_text("x,y\n" + table)
        _process("-m", "nnx", "train", "data.csv", "--target", "y", "--epochs", "3", cwd=folder)
        for command in (["--version"], ["plugins"], ["runs"], ["show", "best"]):
            ours, bare, spread = _timed(partial(_process, "-m", "nnx", *command, cwd=folder), _bare)
            yield Row(
                f"nnx {' '.join(command)}", ours * 1e3, bare * 1e3, against="python -c pass",
                target="<= 600 ms", met=ours <= 0.6, spread=spread,
            )  # fmt: skip
