"""The commands about runs: list, show, verify, compare, best, remove, clean up."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnx.cli.options import RunId, RunsFolder, existing_runs, use_runs

if TYPE_CHECKING:
    from nnx.store.paths import RunPaths

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_RICH_ROWS = 200  # beyond that a plain table is quicker to print and to search


def runs(
    runs: RunsFolder = None,
    sort: Annotated[str, typer.Option(help="Order by: time, best, id.")] = "time",
    where: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help='Only runs such as "accuracy > 0.9 and lr == 0.01".'),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs: how far each got and its best epoch."""
    root = use_runs(runs)
    from nnx.store.listing import list_runs
    from nnx.store.queries import SORTS, select, sorting

    if sort not in SORTS:
        raise ValueError(f"--sort must be one of {', '.join(SORTS)}, not {sort!r}")
    if where is None:
        rows = sorted(list_runs(root), key=sorting(sort, root))
    else:
        rows = [row for row, _ in select(where, sort=sort, root=root)]
    if as_json:
        print(json.dumps([_as_dict(row) for row in rows], indent=1))
        return
    if not rows and where is not None:
        print(f"no run in {root} is such that {where}")
        return
    if not rows:
        print(f"no runs in {root}" + ("" if os.path.lexists(root) else ": there is no such folder"))
        return
    length = _distinct([row.id for row in rows])
    header = ["run", "written", "status", "epochs", "loss", "error", "best", "at", "model"]
    told = {  # a narrow terminal has no room for columns that say nothing
        "salt": [row.salt or "" for row in rows],
        "name": [row.name or "" for row in rows],
        "tags": [" ".join(row.tags) for row in rows],
    }
    told = {name: column for name, column in told.items() if any(column)}
    cells = [
        [
            ("* " if row.is_best else "  ") + row.id[:length],
            _moment(row.written),
            row.status,
            _progress(row.epochs, row.planned),
            _number(row.loss),
            _number(row.error),
            _number(row.best),
            "-" if row.best_epoch is None else str(row.best_epoch),
            row.model,
            *(column[number] for column in told.values()),
        ]
        for number, row in enumerate(rows)
    ]
    right = ["epochs", "loss", "error", "best", "at"]
    _print_table([*header, *told], cells, right=right, fold=["model", *told])
    for row in rows:
        if row.problem:
            print(f"{row.id}: {row.problem}")


def show(run: RunId, runs: RunsFolder = None, as_json: AsJson = False) -> None:
    """Show one run: its configuration, its last epoch and its checkpoints."""
    root = use_runs(runs)
    from nnx.store import NNRun
    from nnx.store.display import summary
    from nnx.store.paths import RunPaths
    from nnx.store.pointer import resolve_run_id
    from nnx.store.points import read_manifest, written_tags
    from nnx.utils.locks import is_held

    id = resolve_run_id(run, root)
    found = NNRun.load(id, root)
    paths = RunPaths.of(id, root)
    tags = {tag: read_manifest(id, tag, root) for tag in _in_order(written_tags(paths))}
    if as_json:
        document = {"run": summary(found), "checkpoints": tags, "path": paths.dir}
        print(json.dumps(document, indent=1, default=str))
        return
    print(found)
    print(f"in {paths.dir}")
    for tag, manifest in tags.items():
        if manifest is None:
            print(f"  {tag:8} without a manifest")
            continue
        size = sum(entry["size"] for entry in manifest["files"].values())
        state = "with training state" if manifest["training_state_id"] else "weights only"
        epoch = manifest["position"]["completed_epoch"]
        origin = manifest.get("origin")
        state += f", taken over from run {origin['run_id']}" if origin else ""
        print(f"  {tag:8} epoch {epoch}, {_bytes(size)}, {state}")
    if found.provenance is not None:
        attempt = found.provenance.attempt
        status = "" if attempt is None else f", attempt {attempt.attempt_id} {attempt.status}"
        if attempt is not None and attempt.status == "running" and not is_held(paths.lease):
            status += " when its process ended"
        print(f"provenance {found.provenance.fingerprint[:16]}{status}")


def verify(run: RunId, runs: RunsFolder = None) -> None:
    """Check every checkpoint of a run against its manifest, and its history; exits 1 on damage."""
    root = use_runs(runs)
    from nnx.cli.app import explain
    from nnx.store.paths import RunPaths
    from nnx.store.pointer import resolve_run_id
    from nnx.store.points import verify_point, written_tags

    id = resolve_run_id(run, root)
    bad = False
    paths = RunPaths.of(id, root)
    for tag in _in_order(written_tags(paths)):
        try:
            manifest = verify_point(id, tag, root)
        except (ValueError, OSError) as error:
            bad = True
            print(f"{tag:10} {explain(error)}")
            continue
        print(f"{tag:10} " + ("ok" if manifest else "has no manifest: nothing to check against"))
    for what, check in (("history", _history), ("run.yaml", _configuration)):
        try:
            print(f"{what:10} {check(paths)}")
        except (ValueError, OSError) as error:
            bad = True
            print(f"{what:10} {explain(error)}")
    if bad:
        raise typer.Exit(1)


def _history(paths: RunPaths) -> str:
    """What a whole history says; ``HistoryCorruptionError`` when a part of it is lost."""
    from nnx.history import iter_history
    from nnx.store.committed import NOTHING, committed_epoch
    from nnx.store.errors import HistoryCorruptionError

    count, last = 0, None
    for record in iter_history(paths.id, paths.root):
        count, last = count + 1, record.epoch_idx
    committed = committed_epoch(paths)
    if committed == NOTHING:
        return "nothing is committed: there is no LAST checkpoint"
    if committed is not None and last != committed:
        ends = "is empty" if last is None else f"ends at epoch {last}"
        raise HistoryCorruptionError(f"it {ends}, but LAST committed epoch {committed}")
    return f"ok, {count} committed records"


def _configuration(paths: RunPaths) -> str:
    from nnx.store.run import from_file

    if from_file(paths).id != paths.id:
        return "ok, though the folder does not have the name of its configuration"
    return "ok"


def _in_order(tags: list[str]) -> list[str]:
    """The phases as they come, BEST, then a callback's own tags."""
    known = ["first", "q1", "q2", "q3", "last", "best"]
    return sorted(tags, key=lambda tag: (known.index(tag) if tag in known else len(known), tag))


def compare(
    left: RunId,
    right: RunId,
    metric: Annotated[
        str | None,
        typer.Option(help="Compare the seeds of both configurations by this metric (nnx-eval)."),
    ] = None,
    runs: RunsFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: where their configurations differ, and their provenance.

    With --metric, every seed of A's configuration is paired with that of B's.
    Example: nnx compare 3f2a 9b1c --metric nll
    """
    root = use_runs(runs)
    if metric is not None:
        from nnx.plugins.registry import load_reference
        from nnx.store.pointer import resolve_run_id as resolve

        seeds = load_reference("nnx.comparison.commands:compare_seeds")
        seeds(resolve(left, root), resolve(right, root), metric=metric, root=root, as_json=as_json)
        return
    from nnx.provenance import compare as compare_provenance
    from nnx.store import NNRun
    from nnx.store.pointer import resolve_run_id
    from nnx.utils.tables import flatten_dict

    ids = resolve_run_id(left, root), resolve_run_id(right, root)
    ours, theirs = (flatten_dict(NNRun.load(id, root).state()) for id in ids)
    paths = [path for path in dict.fromkeys([*ours, *theirs]) if path != "id"]
    different = [
        (path, ours.get(path), theirs.get(path))
        for path in paths
        if ours.get(path) != theirs.get(path)
    ]
    provenance = compare_provenance(*ids, root=root)
    if as_json:
        fields = [_as_dict(field) for field in provenance.fields]
        document = {"left": ids[0], "right": ids[1], "config": different, "provenance": fields}
        print(json.dumps(document, indent=1, default=str))
        return
    if different:
        rows = [[path, _text(one), _text(other)] for path, one, other in different]
        _print_table(["configuration", ids[0][:12], ids[1][:12]], rows)
    else:
        print("the configurations are equal")
    absent = all(field.status == "absent" for field in provenance.fields)
    if absent:
        print("provenance: not recorded for both")
        return
    rows = [[f.path, f.status, _text(f.left), _text(f.right)] for f in provenance.fields]
    _print_table(["provenance", "status", ids[0][:12], ids[1][:12]], rows)
    print("verified equal" if provenance.verified_equal else "not verified equal")


def best(runs: RunsFolder = None) -> None:
    """Print the run that runs/best points to; exits 1 when there is none.

    Runs are compared where task, data and metric are the same. Which were, and the best
    of those that cannot be compared with them, is told on the error stream.
    """
    root = existing_runs(runs)
    from nnx.store.election import standings
    from nnx.store.pointer import best_run_id

    found = best_run_id(root)
    if found is None:
        raise LookupError(f"no run in {root} has a comparable committed BEST checkpoint")
    print(found)
    groups: dict[Any, list[tuple[float, str, Any]]] = {}
    for id, one in sorted(standings(root).items()):
        groups.setdefault(one.measure, []).append((one.value, id, one))
    mine = next((g for g in groups.values() if any(id == found for _, id, _ in g)), [])
    for group in sorted(groups.values(), key=lambda g: (g is not mine, g[0][2].rank, -len(g))):
        _, best_id, one = min(group, key=lambda entry: entry[:2])
        runs_of = f"{len(group)} run{'s' * (len(group) > 1)} by {one}"
        told = (
            f"compared {runs_of}" if group is mine else f"not compared: {runs_of}, best {best_id}"
        )
        print(told, file=sys.stderr)


def rm(
    ids: Annotated[list[str], typer.Argument(help="Run ids or their beginnings.")],
    runs: RunsFolder = None,
    yes: Yes = False,
) -> None:
    """Delete runs; asks first, and refuses one that is being trained."""
    root = use_runs(runs)
    from nnx.store.lease import remove
    from nnx.store.paths import BEST_POINTER, RunPaths
    from nnx.store.pointer import resolve_run_id

    if BEST_POINTER in ids:
        raise ValueError("delete a run by its own id; 'best' is a pointer (`nnx best` prints it)")
    chosen = [
        RunPaths.of(id, root) for id in dict.fromkeys(resolve_run_id(run, root) for run in ids)
    ]
    if not yes:
        for paths in chosen:
            print(f"{paths.dir}  {_bytes(_disk_size(paths.dir))}")
        typer.confirm(f"Delete {len(chosen)} run(s)?", abort=True)
    for paths in chosen:
        remove(paths)
        print(f"deleted {paths.dir}")


def gc(
    runs: RunsFolder = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only list.")] = False,
) -> None:
    """Remove what killed processes left behind; committed epochs stay."""
    root = existing_runs(runs)
    from nnx.store.cleanup import collect

    found = collect(root, dry_run=dry_run)
    for leftover in found:
        verb = f"would {leftover.verb}" if dry_run else f"{leftover.verb}d"
        print(f"{verb} {leftover.path}: {leftover.reason}")
    if not found:
        print(f"nothing to remove in {root}")


def _print_table(header: list[str], rows: list[list[str]], right: Any = (), fold: Any = ()) -> None:
    if len(rows) <= _RICH_ROWS:
        from nnx.cli.screen import table

        table(header, rows, right=right, fold=fold)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, *rows):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths)
        )
        print("  ".join(cells).rstrip())


def _as_dict(row: Any) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.__slots__}
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }


def _distinct(ids: list[str]) -> int:
    """How many characters tell the ids apart, eight at least."""
    length = 8
    while len({id[:length] for id in ids}) < len(set(ids)):
        length += 4
    return length


def _moment(seconds: float) -> str:
    """A time of day this year, a day of another."""
    then = time.localtime(seconds)
    same_year = then.tm_year == time.localtime().tm_year
    return time.strftime("%m-%d %H:%M" if same_year else "%Y-%m-%d", then)


def _progress(epochs: int | None, planned: int | None) -> str:
    if epochs is None:
        return "?"
    return str(epochs) if planned is None or planned < epochs else f"{epochs}/{planned}"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isinf(value) else f"{value:.4g}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _disk_size(folder: str) -> int:
    """The bytes a run takes; files that tags share count once."""
    seen: dict[tuple[int, int], int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            info = os.lstat(os.path.join(where, name))
            seen[info.st_dev, info.st_ino] = info.st_size
    return sum(seen.values())
