"""Observations out of real runs: status, committed epoch, identities, lineage."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from made_plans import net, plan, training
from nnx import Callback, MonitorSpec, NNRun
from nnx.comparison import ComparisonError, Metric, compare, observations_from_runs, summarize
from nnx.provenance import ExperimentManifest

NLL = Metric("nll", "min")
MANIFEST = ExperimentManifest(data={"table": "v1"}, splits={"main": "split-1"})


def recorded(**changes):
    return plan(provenance=MANIFEST, **changes)


def one(run_id, **options):
    return observations_from_runs([run_id], metric=NLL, **options)[0]


def test_seeds_pool_and_configurations_do_not() -> None:
    a = [recorded(seed=s).fit().run.id for s in (1, 2)]
    wide = recorded(net=net(hidden_dims=[16]))
    b = [wide.with_seed(s).fit().run.id for s in (1, 2, 3)]
    rows = observations_from_runs([*a, *b], metric=NLL)
    assert [row.replicate for row in rows] == ["seed=1", "seed=2", "seed=1", "seed=2", "seed=3"]
    assert {row.status for row in rows} == {"completed"}
    assert (rows[0].data, rows[0].split_id, rows[0].split) == ("v1", "split-1", "validation")
    assert [group.n for group in summarize(rows).groups] in ([2, 3], [3, 2])
    found = compare(rows[:2], rows[2:], pairing="equal seeds, equal order of the data")
    wanted = [
        NNRun.load(right).idps[-1].val_edp.metrics["nll"]
        - NNRun.load(left).idps[-1].val_edp.metrics["nll"]
        for left, right in zip(a, b)
    ]
    assert found.deltas == pytest.approx(wanted)
    assert found.unmatched_b[0][0] == "seed=3"


def test_last_and_best_are_the_committed_and_the_elected_epoch() -> None:
    run = recorded(train=training(n_epochs=4, monitor=MonitorSpec("nll", min_delta=10.0))).fit().run
    last, best = one(run.id), one(run.id, selection="best")
    ends = [idp for idp in run.idps if idp.val_edp is not None]
    assert last.value == ends[-1].val_edp.metrics["nll"]
    assert best.value == ends[0].val_edp.metrics["nll"]  # nothing later beats it by 10
    assert best.selection == "best(val.nll, min, min_delta=10)"
    summary = one(run.id, split="train")
    assert summary.value == ends[-1].train_summary.metrics["nll"]
    assert one(run.id, replicate=None).replicate is None
    assert one(run.id, config={run.id: "mine"}).config == "mine"
    absent = observations_from_runs([run.id], metric=Metric("auroc", "max"))[0]
    assert (absent.value, absent.status) == (None, "completed")
    plain = recorded(train=training(monitor=None)).fit().run
    assert one(plain.id, selection="best").value is None


def test_a_run_without_provenance_has_no_known_status() -> None:
    run = plan().fit().run
    row = one(run.id)
    assert (row.status, row.value, row.attempt_id) == ("unknown", None, None)
    os.remove(f"runs/{run.id}/.history-committed-by-last")  # as an early release left it
    row = one(run.id)
    assert (row.status, row.value) == ("unknown", run.idps[-1].val_edp.metrics["nll"])
    assert summarize([row]).pooled().n == 0


def test_a_failed_attempt_keeps_its_committed_value_and_is_not_counted() -> None:
    class Fail(Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch == 2:
                raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        recorded(callback_factories=(Fail,)).fit(attempt="x")
    run_id = recorded().run_id("x")
    row = one(run_id)
    ends = [idp for idp in NNRun.load(run_id).idps if idp.val_edp is not None]
    assert (row.status, row.value) == ("failed", ends[1].val_edp.metrics["nll"])
    table = Path(f"runs/{run_id}/idps.csv")
    header, *rows = table.read_text().splitlines()
    place = header.split(",").index("epoch_idx")
    cells = rows[-1].split(",")
    cells[place] = "2"  # an epoch that was never committed
    table.write_text("\n".join([header, *rows, ",".join(cells)]) + "\n")
    assert one(run_id).value == row.value


def test_no_checkpoint_is_opened_and_nothing_is_written(monkeypatch) -> None:
    run = recorded().fit().run
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a checkpoint was opened"))
    assert one(run.id).value is not None
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before


def continued(parent_id, **resumed):
    return recorded().resuming(parent_id, **resumed).fit().run.id


def test_continuations_pool_with_those_of_the_same_procedure_alone() -> None:
    first, second = recorded(seed=1).fit().run.id, recorded(seed=2).fit().run.id
    children = [continued(first, mode="stateful"), continued(second, mode="stateful")]
    warm = continued(first, mode="weights_only")
    early = continued(first, checkpoint="first", mode="weights_only")
    wide = recorded(net=net(hidden_dims=[16]))
    other = wide.resuming(wide.fit().run.id, mode="stateful").fit().run.id
    identity = {id: one(id).config for id in [first, second, *children, warm, early, other]}
    assert identity[first] == identity[second]
    assert identity[children[0]] == identity[children[1]]
    assert len(set(identity.values())) == 5
    listed = observations_from_runs([*children, first][::-1], metric=NLL)
    assert listed[-1].config == identity[children[0]]  # the order of listing does not matter


def test_a_lineage_that_nobody_recorded_pools_with_nothing() -> None:
    parent = plan(seed=1).fit().run.id  # no provenance
    bare = [plan(seed=s, train=training(parent_run_id=parent)).fit().run.id for s in (5, 6)]
    identities = [one(id).config for id in bare]
    assert identities[0] != identities[1]
    # A recorded child of a parent without provenance is followed by its epoch.
    linked = [recorded(seed=s).resuming(parent, mode="weights_only").fit().run.id for s in (5, 6)]
    assert len({one(id).config for id in linked}) == 1


def test_siblings_of_a_retrained_or_deleted_parent_pool_by_its_checkpoint() -> None:
    import shutil

    parent = recorded(seed=1).fit().run.id
    children = [recorded(seed=s).resuming(parent, mode="weights_only").fit().run.id for s in (5, 6)]
    followed = {one(id).config for id in children}
    shutil.rmtree(f"runs/{parent}")
    named = {one(id).config for id in children}
    assert len(followed) == len(named) == 1
    assert followed != named


def test_a_cycle_and_unreadable_files_are_refused() -> None:
    run = recorded().fit().run
    path = Path(f"runs/{run.id}/run.yaml")
    text = path.read_text()
    path.write_text(text.replace("train:\n", f"train:\n  parent_run_id: {run.id}\n"))
    with pytest.raises(ComparisonError, match=f"returns to {run.id}"):
        one(run.id)
    path.write_text("- nothing")
    with pytest.raises(ComparisonError, match="cannot be read"):
        one(run.id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split must be"), ({"selection": "first"}, "selection must be"),
        ({"replicate": "fold"}, "replicate must be"), ({"config": {}}, "no label for"),
        ({"metric": "nll"}, "must be a Metric"),
    ],
)  # fmt: skip
def test_wrong_questions_are_refused(options, message) -> None:
    with pytest.raises(ComparisonError, match=message):
        observations_from_runs(["abc"], **{"metric": NLL, **options})
    with pytest.raises(ComparisonError, match="no run 'abc'"):
        observations_from_runs(["abc"], metric=NLL)
    with pytest.raises(ComparisonError, match="another run tomorrow"):
        observations_from_runs(["best"], metric=NLL)


def test_a_modelspecs_own_seed_is_a_part_of_the_key() -> None:
    run = recorded().fit().run
    state = json.loads(json.dumps(dataclasses.asdict(one(run.id))))
    assert state["replicate"] == "seed=7"
