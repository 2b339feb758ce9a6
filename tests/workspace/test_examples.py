"""Every example runs alone in an empty directory, and what it says it shows is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
Numbers = list[float]

# What the printed numbers must say, read apart from the script's own assertions.
CLAIMS: dict[str, tuple[str, Callable[[Numbers], bool]]] = {
    "autoencoder": (r"through 3: ([\d.]+)% of the variance is lost", lambda n: n[0] < 10),
    "classification": (r"unseen points: ([\d.]+); of BEST: ([\d.]+)", lambda n: min(n) > 0.9),
    "contrastive": (
        r"untrained: linear probe ([\d.]+).*\ntrained: linear probe ([\d.]+), neighbours ([\d.]+)",
        lambda n: n[1] > n[0] + 0.1 and n[2] > 0.8,
    ),
    "custom_metric": (
        r"(\d+) of 60 epochs; BEST is epoch (\d+), balanced accuracy ([\d.]+)",
        lambda n: n[0] == n[1] + 5 < 60 and n[2] > 0.5,
    ),
    "ddp": (r"2 processes: the largest difference is ([\d.e+-]+)", lambda n: n[0] < 1e-5),
    "diffusion_mixture": (
        r"near the four centres: (\d+)% (\d+)% (\d+)% (\d+)%",
        lambda n: min(n) > 17 and sum(n) > 90,
    ),
    "distillation": (
        r"alone ([\d.]+), taught ([\d.]+)",
        lambda n: n[1] > n[0] + 0.01,
    ),
    "embedding_search": (r"(\d) of 6 questions find their answer", lambda n: n[0] == 6),
    "experts": (
        r"changed by ([\d.e+-]+) when(?s:.*)shares: ([\d.]+) .*\naccuracy ([\d.]+)",
        lambda n: n[0] < 1e-5 and n[1] < 2.5 and n[2] > 0.8,
    ),
    "finetuning": (
        r"(\d+) tensors frozen and unchanged, (\d+) trained\naccuracy on the new task: ([\d.]+)",
        lambda n: n[:2] == [4, 2] and n[2] > 0.75,
    ),
    "gan": (r"(\d+)% lie near -2 and (\d+)% near 2", lambda n: min(n) > 20),
    "graph_classification": (
        r"labelled graphs of 40: accuracy ([\d.]+)\nfound in both splits: \[.*\(3, 7\)",
        lambda n: n[0] > 0.9,
    ),
    "graph_csv": (r"without a team, (\d+)% found right", lambda n: n[0] > 80),
    "graph_nodes": (
        r"(\d+) members known, accuracy on the other (\d+): ([\d.]+)",
        lambda n: n[:2] == [4, 30] and n[2] > 0.7,
    ),
    "journal_history": (
        r"(\d+) records on disk, at most (\d+) in memory, (\d+) rows exported",
        lambda n: n[0] == n[2] == 400 and n[1] <= 60,
    ),
    "instruction_tuning": (r"(\d) of 3 questions are answered", lambda n: n[0] == 3),
    "keyword_inputs": (r"accuracy ([\d.]+); the first rows", lambda n: n[0] > 0.9),
    "language_model": (r"perplexity ([\d.]+)\n", lambda n: n[0] < 2),
    "link_prediction": (
        r"model auroc ([\d.]+).*\ncommon_neighbours auroc ([\d.]+).*(?s:.*) held out, (\d+) of them",
        lambda n: n[0] > n[1] + 0.1 and n[2] == 0,
    ),
    "lora": (
        r"([\d.]+) before, ([\d.]+) after\n(\d+) of (\d+) weights trained, (\d+) bytes",
        lambda n: n[1] > n[0] and n[2] < n[3] / 4 and n[4] < 4 * n[3],
    ),
    "plugin": (r"trained with acme\.plain@v1, conforms, and is shown without", lambda n: True),
    "preference_tuning": (
        r"loss ([\d.]+) at the first step, ([\d.]+) on unseen pairs at the end\n(\d+)%",
        lambda n: abs(n[0] - 0.6931) < 1e-4 and n[1] < 0.5 and n[2] == 100,
    ),
    "provenance": (r"differences: \[\] with the same rows, \['data\.train", lambda n: True),
    "regression": (
        r"(\d+) of (\d+) targets count; mean absolute error ([\d.]+)",
        lambda n: n[:2] == [500, 600] and n[2] < 0.3,
    ),
    "resume_after_kill": (
        r"killed after (\d+) committed epochs of 6(?s:.*)equal bit for bit",
        lambda n: n == [3],
    ),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=[s.stem for s in SCRIPTS])
def test_an_example_shows_what_it_says(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1", "NNX_RUNS": ""}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pattern, holds = CLAIMS[script.stem]
    said = re.search(pattern, done.stdout)
    assert said is not None, done.stdout
    assert holds([float(group) for group in said.groups()]), said.group()


def test_every_example_states_what_it_shows_and_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        first = script.read_text(encoding="utf-8").split("\n", 1)[0]
        assert re.fullmatch(r'"""Shows: .+\."""', first), script.name
        claim = first.strip('"').removeprefix("Shows: ")
        assert f"| [{script.name}]({script.name}) | {claim} |" in listed
    assert {script.stem for script in SCRIPTS} == set(CLAIMS)
