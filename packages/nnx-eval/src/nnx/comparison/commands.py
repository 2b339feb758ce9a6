"""``nnx compare A B --metric NAME``: the seeds of two configurations, paired."""

from __future__ import annotations

import json
from typing import Any

from nnx.comparison.lineage import Lineages
from nnx.comparison.observations import ComparisonError, Metric
from nnx.comparison.paired import PairedComparison, compare
from nnx.comparison.runs import observations_from_runs
from nnx.comparison.significance import (
    TestResult,
    paired_t,
    permutation,
    t_interval,
    wilcoxon,
)
from nnx.store.paths import RunPaths, run_names

PAIRING = "equal seeds of stored runs"
_LOWER_IS_BETTER = ("loss", "error")


def compare_seeds(left: str, right: str, *, metric: str, root: str, as_json: bool = False) -> None:
    """Print the differences B - A over every seed of A's and of B's configuration.

    The runs of a configuration are those of the folder with the same identity; their last
    committed epochs are compared on the validation data.
    """
    lineages = Lineages(root)
    wanted = {id: lineages.config_identity(lineages.run(id)) for id in (left, right)}
    if wanted[left] == wanted[right]:
        raise ComparisonError(
            f"{left[:12]} and {right[:12]} are of one configuration, so there is nothing to compare"
        )
    sides: dict[str, list[str]] = {left: [], right: []}
    identities: dict[str, str] = {}
    for name in run_names(root):
        try:
            if RunPaths.seen(root, name).exists():
                identities[name] = lineages.config_identity(lineages.run(name))
        except ComparisonError:
            continue  # a run that cannot be read is of neither
    for id, names in sides.items():
        names += [name for name, identity in identities.items() if identity == wanted[id]]
    what = Metric(metric, _direction(lineages, left, metric))
    a, b = (observations_from_runs(names, metric=what, root=root) for names in sides.values())
    found = compare(a, b, pairing=PAIRING)
    tests = [test(found.deltas) for test in (paired_t, wilcoxon, permutation)]
    tried = len(set(identities.values()))
    if as_json:
        print(json.dumps(_document(found, tests, tried), indent=1))
        return
    _show(found, tests, tried)


def _direction(lineages: Lineages, run_id: str, name: str) -> str:
    run = lineages.run(run_id).run
    training = run.trainer or run.train
    for spec in training.metrics:
        if spec.label == name:
            return str(spec.mode)
    return "min" if name in _LOWER_IS_BETTER else "max"


def _document(found: PairedComparison, tests: list[TestResult], tried: int) -> dict[str, Any]:
    return {
        **found.state(),
        "t_interval": t_interval(found.deltas),
        "tests": {t.method: {"p_value": t.p_value, "n": t.n, "note": t.note} for t in tests},
        "configurations": tried,
    }


def _show(found: PairedComparison, tests: list[TestResult], tried: int) -> None:
    print(f"{found.metric}, B - A, {found.n} pairs ({found.pairing})")
    for pair in found.pairs:
        delta = "unavailable" if pair.delta is None else f"{pair.delta:+.6g}"
        print(f"  {pair.replicate}: {delta}")
    for side, items in (("A", found.unmatched_a), ("B", found.unmatched_b)):
        for key, id in items:
            print(f"  {key}: on side {side} alone ({id[:12]})")
    interval = t_interval(found.deltas)
    if found.mean is None or interval is None:
        print("too few pairs for an interval; train more seeds: plan.replicates(...)")
    else:
        print(
            f"mean {found.mean:+.6g}, 95 % interval by t [{interval[0]:+.6g}, {interval[1]:+.6g}]"
        )
    for test in tests:
        shown = test.note if test.p_value is None else f"p = {test.p_value:.4g}"
        print(f"  {test.method}: {shown}")
    print(
        f"{tried} configurations are in the folder: correct the p-values over all that were compared "
        "(nnx.comparison.correct)"
    )
