"""The model card: recorded facts, and how to load what is published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nnx.params.loss import spell_loss
from nnx.plugins import manager

CHART = "training.svg"
_RENDERER = "run.svg"
_SCORES = ("loss", "error", "accuracy", "f1", "precision", "recall")

LOAD_MODEL = """from nnx import NNModel

model = NNModel.from_pretrained("{where}")"""
LOAD_RUN = """from nnx.bundles import reconstruct_bundle
from nnx.hub import pull_run

pull_run("{where}", "here")
rebuilt = reconstruct_bundle("here")  # rebuilt.model predicts, rebuilt.resume(...) trains on"""


def chart_of(run: Any) -> bytes | None:
    """The training as a picture, when a plugin draws one."""
    renderers = manager.registry("renderer")
    if run is None or (_RENDERER, 1) not in renderers:
        return None
    try:
        drawn = renderers.resolve(_RENDERER)(run)
    except ImportError:  # the renderer's own optional library is not there
        return None
    return str(drawn).encode("utf-8") if drawn else None


def model_card(
    config: Mapping[str, Any],
    parameters: int,
    *,
    load: str = LOAD_MODEL,
    where: str = "path/to/this/folder",
    run: Any = None,
    calibrators: Iterable[Any] = (),
    chart: bool = False,
    license: str | None = None,
    **facts: Any,
) -> str:
    """A README of what is recorded: net, task, recipe and, for a run, its data and scores.

    ``config`` has the states of a ``config.json``, ``calibrators`` are those fitted on the
    model, or their records. Further keywords become rows of the table as they are given.
    """
    rows = {"net": _net(config), "parameters": f"{parameters:,}"}
    params = config["params"]
    if params.get("task") is not None:
        rows["task"] = _pairs(params["task"], without=("version",))
    rows["loss"] = spell_loss(params.get("loss"))
    if params.get("precision"):
        rows["precision"] = str(params["precision"].get("mode"))
    if config["transforms"]:
        rows["recipe"] = ", ".join(
            f"{t['name']} {t.get('options', {})}" for t in config["transforms"]
        )
    if run is not None:
        rows.update(_run_rows(run))
    for index, one in enumerate(calibrators):
        record = one if isinstance(one, Mapping) else one.state()
        rows[f"calibrator {index}"] = _calibrator(record)
    rows.update({name: str(value) for name, value in facts.items()})
    head = ["---", "library_name: nnx", "tags:", "- nnx", "- pytorch"]
    head += [f"license: {license}"] if license else []
    table = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    picture = [f"![The losses of the training]({CHART})", ""] if chart else []
    return "\n".join(
        [
            *head, "---", "", "# Model card", "", "| | |", "|---|---|", *table, "", *picture,
            "Load it with NNx:", "", "```python", load.format(where=where), "```", "",
        ]
    )  # fmt: skip


def _net(config: Mapping[str, Any]) -> str:
    net = config["params"].get("net")
    if isinstance(net, Mapping):
        return f"{net.get('id')}@v{net.get('version')}"
    dims = config.get("net_params") or {}
    return f"{net} ({_pairs(dict(sorted(dims.items())))})"


def _run_rows(run: Any) -> dict[str, str]:
    """Of a run: its id, its data and splits, and its last scores with split and samples."""
    rows = {"run": str(run.id)}
    data_id = run.state()["train"].get("data_id")
    if data_id:
        rows["data"] = str(data_id)
    if run.provenance is not None:
        manifest = run.provenance.manifest
        for what, identities in (("data", manifest.data), ("split", manifest.splits)):
            for name, identity in identities.items():
                value = identity.kind if identity.value is None else identity.value
                rows[f"{what} {name}"] = f"{value} ({identity.kind})" if identity.value else value
    if run.idps:
        rows.update(_scores(run.idps[-1]))
    return rows


def _scores(last: Any) -> Iterator[tuple[str, str]]:
    for split, scores in (("training", last.train_summary), ("validation", last.val_edp)):
        if scores is None:
            continue
        named = {name: getattr(scores, name) for name in _SCORES}
        named.update(scores.metrics)
        shown = [f"{name} {value:.6g}" for name, value in named.items() if value is not None]
        count = "n not recorded" if scores.count is None else f"n {scores.count}"
        yield f"{split}, epoch {last.epoch_idx}", f"{', '.join(shown)} ({count})"


def _calibrator(record: Mapping[str, Any]) -> str:
    if isinstance(record.get("calibrator"), Mapping):  # a chain, which begins with one
        links = [name for name in ("conformal", "abstention", "costs") if record.get(name)]
        return ", ".join([_calibrator(record["calibrator"]), *links])
    shown = [str(record.get("kind"))]
    if "temperature" in record:
        shown.append(f"temperature {record['temperature']:.6g}")
    if isinstance(record.get("split"), Mapping):
        shown.append(f"fitted on {_pairs(record['split'])}")
    return ", ".join([*shown, f"for {record.get('model_id')}"])


def _pairs(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    return ", ".join(
        f"{name} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in values.items()
        if name not in without
    )


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")[:400]
