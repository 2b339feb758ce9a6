"""The model card: recorded facts, and how to load the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(
    model: Any,
    config: Mapping[str, Any],
    *,
    run: Any = None,
    repo_id: str | None = None,
    license: str | None = None,
    **facts: Any,
) -> str:
    """A README of what is recorded: the net, the task, the recipe and, for a run, its scores.

    Further keywords become rows of the table as they are given.
    """
    rows = {
        "net": _net(config),
        "parameters": f"{sum(p.numel() for p in model.net.parameters()):,}",
    }
    task = config["params"].get("task")
    if task is not None:
        rows["task"] = ", ".join(f"{k} {v}" for k, v in task.items() if k != "version")
    rows["loss"] = str(config["params"].get("loss"))
    if config["params"].get("precision"):
        rows["precision"] = str(config["params"]["precision"].get("mode"))
    if config["transforms"]:
        rows["recipe"] = ", ".join(
            f"{t['name']} {t.get('options', {})}" for t in config["transforms"]
        )
    if run is not None:
        rows.update(_run_rows(run))
    rows.update({name: str(value) for name, value in facts.items()})
    head = ["---", "library_name: nnx", "tags:", "- nnx", "- pytorch"]
    head += [f"license: {license}"] if license else []
    table = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    where = repo_id or "path/to/this/folder"
    return "\n".join(
        [
            *head, "---", "", "# Model card", "", "| | |", "|---|---|", *table, "",
            "Load it with NNx:", "", "```python", "from nnx import NNModel", "",
            f'model = NNModel.from_pretrained("{where}")', "```", "",
        ]
    )  # fmt: skip


def _net(config: Mapping[str, Any]) -> str:
    net = config["params"].get("net")
    if isinstance(net, Mapping):
        return f"{net.get('id')}@v{net.get('version')}"
    dims = config.get("net_params") or {}
    return f"{net} ({', '.join(f'{k} {v}' for k, v in sorted(dims.items()))})"


def _run_rows(run: Any) -> dict[str, str]:
    """Of a run: its id, its data, and its last scores with the split and the samples counted."""
    state = run.state()
    rows = {"run": run.id}
    if state["train"].get("data_id"):
        rows["data"] = str(state["train"]["data_id"])
    if not run.idps:
        return rows
    last = run.idps[-1]
    for split in ("train_summary", "val_edp"):
        scores = getattr(last, split, None)
        if scores is None:
            continue
        shown = ", ".join(
            f"{name} {value:.6g}"
            for name in ("loss", "error", "accuracy", "f1")
            if (value := getattr(scores, name, None)) is not None
        )
        count = getattr(scores, "count", None)
        name = "validation" if split == "val_edp" else "training"
        rows[f"{name}, epoch {last.epoch_idx}"] = f"{shown}" + (f" (n {count})" if count else "")
    return rows


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")[:400]
