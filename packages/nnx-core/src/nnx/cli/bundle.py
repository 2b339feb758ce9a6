"""``nnx bundle``: a run's checkpoint as a folder of data that travels."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnx.cli.options import RunId, RunsFolder, use_quiet, use_runs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnx.bundles import BundleInfo

bundle = typer.Typer(
    help="Take a checkpoint of a run elsewhere, as data: weights, training state, calibrators.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Bundle = Annotated[str, typer.Argument(metavar="BUNDLE", help="The folder of a bundle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bundle.command()
def export(
    run: RunId,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the bundle goes.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="last, best, first, ..., or a snapshot's name.")
    ] = "last",
    runs: RunsFolder = None,
) -> None:
    """Write a checkpoint of a run as a bundle; one that is there is replaced as a whole."""
    use_runs(runs)
    from nnx.bundles import export_bundle
    from nnx.store.pointer import resolve_run_id

    print(_line(export_bundle(resolve_run_id(run), folder, checkpoint=checkpoint)))


@bundle.command()
def inspect(path: Bundle, as_json: AsJson = False) -> None:
    """Say what a bundle holds, from its records alone."""
    from nnx.bundles import inspect_bundle

    _show(inspect_bundle(path), as_json)


@bundle.command()
def validate(path: Bundle, as_json: AsJson = False) -> None:
    """Check every byte of a bundle."""
    from nnx.bundles import validate_bundle

    _show(validate_bundle(path), as_json)


@bundle.command()
def diff(
    left: Bundle,
    right: Annotated[str, typer.Argument(metavar="OTHER", help="Another bundle.")],
    as_json: AsJson = False,
) -> None:
    """Say in what two bundles differ; ends with 1 when they do."""
    from nnx.bundles import diff_bundles

    found = diff_bundles(left, right)
    if as_json:
        print(json.dumps({k: list(v) for k, v in found.items()}, indent=1, default=_plain))
    else:
        for name, (a, b) in found.items():
            print(f"{name}: {_short(a)} | {_short(b)}")
        if not found:
            print("equal: weights, training state and records")
    if found:
        raise typer.Exit(1)


@bundle.command()
def resume(
    path: Bundle,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="A Python file and a function in it that returns the NNTrainParams to train on.",
        ),
    ],
    runs: RunsFolder = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Train on from a bundle, exactly where its run stopped.

    The loaders do not travel, so a function of yours makes them: it takes the BundleInfo and
    returns NNTrainParams, or a pair of those and a dictionary of further arguments of
    NNModel.train (callbacks, components, salt, ...), among them perhaps the model_class.
    Example: nnx bundle resume my-bundle train.py:params
    """
    use_runs(runs)
    use_quiet(quiet)
    import runpy

    file, separator, name = script.rpartition(":")
    if not separator or not name.isidentifier():
        raise typer.BadParameter(f"{script!r} is not SCRIPT.py:FUNCTION")
    from nnx import NNModel
    from nnx.bundles import inspect_bundle, reconstruct_bundle

    info = inspect_bundle(path)
    found = runpy.run_path(file, run_name="nnx_bundle_resume").get(name)
    if not callable(found):
        raise ValueError(f"{file} has no function {name}")
    asked = found(info)
    params, arguments = asked if isinstance(asked, tuple) else (asked, {})
    arguments = dict(arguments)
    given = [*(arguments.get("callbacks") or ()), *(arguments.get("components") or ())]
    model_class = arguments.pop("model_class", NNModel)
    rebuilt = reconstruct_bundle(path, components=given, model_class=model_class)
    rebuilt.resume(params, **arguments)


def _show(info: BundleInfo, as_json: bool) -> None:
    if as_json:
        json.dump(_state(info), sys.stdout, indent=1, default=_plain)
        print()
        return
    rows = {
        "run": info.source_run_id,
        "checkpoint": f"{info.source_checkpoint} (epoch {info.epoch})",
        "capability": info.capability,
        "model": info.model,
        "net": _short(info.net_params),
        "transforms": ", ".join(str(t.get("name")) for t in info.transforms) or "-",
        "components": ", ".join(info.components) or "-",
        "calibrators": ", ".join(map(_calibrator, info.calibrators)) or "-",
        "generation": info.generation,
        "bytes": f"{info.size:,}",
        "checked": "every byte"
        if info.verified
        else "the records; `nnx bundle validate` checks all",
    }
    for name, value in rows.items():
        print(f"{name:<12}{value}")


def _state(info: BundleInfo) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(info, f.name) for f in dataclasses.fields(info)}


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else str(value)


def _calibrator(told: Mapping[str, Any]) -> str:
    """``temperature``, or ``temperature (chain with conformal, costs)``."""
    if "links" not in told:
        return str(told.get("kind"))
    return f"{told.get('kind')} (chain with {', '.join(told['links']) or 'nothing else'})"


def _short(value: Any) -> str:
    text = json.dumps(value, default=_plain) if value is not None else "-"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _line(info: BundleInfo) -> str:
    return (
        f"{info.path}: a {info.capability} bundle of run {info.source_run_id[:12]}, epoch "
        f"{info.epoch}, {info.size:,} bytes"
    )
