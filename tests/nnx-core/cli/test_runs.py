"""The commands about runs, on runs that a fit wrote."""

from __future__ import annotations

import cProfile
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nnx.history import HistoryJournal, iter_history
from nnx.provenance import ExperimentManifest
from nnx.store import RunWriter, inherited
from nnx.store.lease import lease
from nnx.store.paths import RunPaths

_spec = importlib.util.spec_from_file_location(
    "store_parts_for_cli", Path(__file__).parents[1] / "store" / "conftest.py"
)
store = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(store)


def write(salt, epochs=2, *, error=0.3, data_id=None, **options):
    run = store.make_run(3, salt=salt, data_id=data_id)
    with RunWriter.open(run, **options) as writer:
        for epoch in range(epochs):
            writer.extend(store.make_record(epoch, b, error=error) for b in range(2))
            checkpoint = store.make_checkpoint(epoch, idp=writer.idps[-1])
            writer.commit_epoch(checkpoint, store.make_state(epoch), best=True)
        return writer.finish()


@pytest.fixture
def two(nnx, tmp_path):
    """A stopped run and a better, finished one."""
    return write("a", 2, error=0.3), write("b", 3, error=0.2)


def test_runs_lists_progress_best_and_the_pointer(nnx, two):
    stopped, finished = two
    out = nnx("runs", "--sort", "best").stdout.splitlines()
    rows = [line.split() for line in out if line.strip()][2:]
    assert rows[0][:2] == ["*", finished.id[:8]]
    assert rows[1][0] == stopped.id[:8]
    assert [r for r in rows[1] if r in ("stopped", "2/3")] == ["stopped", "2/3"]
    assert {"finished", "3/3", "0.2", "feed_fwd"} <= set(rows[0])
    listed = {row["id"]: row for row in json.loads(nnx("runs", "--json").stdout)}
    assert listed[finished.id]["is_best"]
    assert listed[stopped.id]["best"] == 0.3
    assert listed[stopped.id]["best_epoch"] == 1


def test_runs_says_when_there_are_none_and_refuses_an_unknown_order(nnx):
    assert nnx("runs").stdout == "no runs in runs: there is no such folder\n"
    assert os.listdir() == []
    refused = nnx("runs", "--sort", "size")
    assert (refused.returncode, refused.stderr) == (
        1, "nnx: --sort must be one of time, best, id, not 'size'\n"
    )  # fmt: skip


def test_a_run_in_training_and_an_unreadable_one_are_marked(nnx, two):
    stopped, finished = two
    Path(f"runs/{finished.id}/checkpoints/last.pt.manifest.json").write_text("{")
    with lease(RunPaths.of(stopped.id)):
        listed = {row["id"]: row for row in json.loads(nnx("runs", "--json").stdout)}
    assert listed[stopped.id]["status"] == "training"
    assert listed[finished.id]["status"] == "unreadable"
    assert "corrupted" in listed[finished.id]["problem"]


@pytest.mark.parametrize("form", ["csv", "journal", "monitor"])
def test_runs_of_the_original_show_how_far_they_came_and_their_best(nnx, form):
    root = Path(__file__).parents[2] / "data" / "original-runs" / form
    (row,) = json.loads(nnx("runs", "--runs", str(root), "--json").stdout)
    records = list(iter_history(row["id"], root))
    ends = {record.epoch_idx: record for record in records}  # the last record of each epoch
    value = {
        epoch: end.selection.value if form == "monitor" else end.val_edp.error
        for epoch, end in ends.items()
    }
    best = min(value, key=lambda epoch: (value[epoch], epoch))
    assert (row["status"], row["epochs"]) == ("finished", len(ends))
    assert (row["loss"], row["error"]) == (
        records[-1].val_edp.loss, records[-1].val_edp.error
    )  # fmt: skip
    assert (row["best_epoch"], row["best"]) == (best, value[best])


def test_show_takes_a_prefix_and_best(nnx, two):
    _, finished = two
    by_prefix, by_pointer = nnx("show", finished.id[:6]).stdout, nnx("show", "best").stdout
    assert by_prefix == by_pointer
    assert f"Run {finished.id}" in by_prefix
    assert "last     epoch 2" in by_prefix
    assert "with training state" in by_prefix
    document = json.loads(nnx("show", finished.id, "--json").stdout)
    assert document["checkpoints"]["best"]["position"]["completed_epoch"] == 2


def test_an_unknown_and_an_ambiguous_beginning_are_refused(nnx, two):
    assert nnx("show", "zzz").stderr == (
        "nnx: there is no run 'zzz' in runs; `nnx runs` lists the 2 that are there\n"
    )
    os.mkdir("runs/ab1")
    os.mkdir("runs/ab2")
    for name in ("ab1", "ab2"):
        Path(f"runs/{name}/run.yaml").touch()
    refused = nnx("show", "ab")
    assert refused.returncode == 1
    assert refused.stderr == "nnx: 'ab' is the beginning of 2 runs: ab1, ab2\n"
    assert nnx("show", "../x").returncode == 1


def test_verify_says_what_is_sound_and_what_is_not(nnx, two):
    run, _ = two
    good = nnx("verify", run.id)
    assert good.returncode == 0
    assert [line.split()[:2] for line in good.stdout.splitlines()] == [
        ["last", "ok"], ["best", "ok"], ["history", "ok,"], ["run.yaml", "ok"]
    ]  # fmt: skip
    path = Path(f"runs/{run.id}/checkpoints/last.pt")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + b"x")
    bad = nnx("verify", run.id)
    assert bad.returncode == 1
    assert "last       the resume point" in bad.stdout
    assert "best       ok" in bad.stdout


def test_verify_finds_a_damaged_history(nnx):
    run = write("j", 2, history=HistoryJournal(retention=10))
    chunk = Path(f"runs/{run.id}/history/chunk-00000000.jsonl")
    chunk.write_bytes(chunk.read_bytes().replace(b"0.1", b"0.2", 1))
    bad = nnx("verify", run.id)
    assert bad.returncode == 1
    assert "does not match its SHA-256" in bad.stdout


def test_compare_shows_the_differing_configuration_and_provenance(nnx):
    left = write("a", provenance=ExperimentManifest(config={"lr": 1}, splits={"v": "x"}))
    right = write("b", provenance=ExperimentManifest(config={"lr": 2}, splits={"v": "x"}))
    out = nnx("compare", left.id, right.id).stdout
    assert "salt" in out
    assert [line.split()[1] for line in out.splitlines() if "config.lr" in line] == ["different"]
    assert [line.split()[1] for line in out.splitlines() if "splits.v" in line] == ["declared"]
    assert out.strip().endswith("not verified equal")
    document = json.loads(nnx("compare", left.id, right.id, "--json").stdout)
    assert document["config"] == [["salt", "a", "b"]]
    plain = write("c")
    assert "not recorded for both" in nnx("compare", left.id, plain.id).stdout


def test_show_says_of_an_attempt_that_never_ended_that_its_process_did(nnx):
    run = write("killed", provenance=ExperimentManifest(config={"lr": 1}))
    assert "completed" in nnx("show", run.id).stdout
    path = Path(f"runs/{run.id}/attempt.json")
    path.write_text(path.read_text().replace("completed", "running"))
    assert "running when its process ended" in nnx("show", run.id).stdout
    with lease(RunPaths.of(run.id)):
        assert "process ended" not in nnx("show", run.id).stdout


def test_best_prints_the_id_or_exits_with_one(nnx):
    empty = nnx("best")
    assert (empty.returncode, empty.stdout, empty.stderr) == (
        1, "", "nnx: no run in runs has a comparable committed BEST checkpoint\n"
    )  # fmt: skip
    run = write("a")
    assert nnx("best").stdout == f"{run.id}\n"


def test_best_says_what_it_compared_and_what_it_did_not(nnx, two):
    _, finished = two
    other = write("c", error=0.01, data_id="other rows")
    write("d", error=0.02, data_id="other rows")
    told = nnx("best")
    assert told.stdout == f"{finished.id}\n"
    assert told.stderr.splitlines() == [
        "compared 2 runs by val.error of classification/2",
        f"not compared: 2 runs by val.error of classification/2 on other rows, best {other.id}",
    ]
    listed = nnx("runs", "--sort", "best").stdout
    ids = [finished.id[:8], other.id[:8]]  # those that can be compared, side by side
    assert sorted(ids, key=listed.index) == ids


def test_show_says_where_a_best_comes_from(nnx):
    first = write("a", 2, error=0.1)
    child = store.make_run(3, salt="b")
    best = inherited.find(first.id, child.state(), until=1)
    with RunWriter.open(child, best=best) as writer:
        writer.append(store.make_record(2, 1, error=0.5))
        checkpoint = store.make_checkpoint(2, idp=writer.idps[-1])
        writer.commit_epoch(checkpoint, store.make_state(2))
    (line,) = [row for row in nnx("show", child.id).stdout.splitlines() if "  best" in row]
    assert line.endswith(f"with training state, taken over from run {first.id}")
    assert line.startswith("  best     epoch 1, ")


def test_rm_asks_first_and_moves_the_pointer(nnx, two, monkeypatch):
    stopped, finished = two
    declined = nnx("rm", finished.id)  # the input ends without an answer
    assert declined.returncode != 0
    assert os.path.isdir(f"runs/{finished.id}")
    done = nnx("rm", finished.id[:8], "--yes")
    assert (done.returncode, done.stdout) == (0, f"deleted runs/{finished.id}\n")
    assert not os.path.exists(f"runs/{finished.id}")
    assert os.readlink("runs/best") == stopped.id
    assert "by its own id" in nnx("rm", "best", "--yes").stderr


def test_rm_refuses_a_run_that_is_being_trained(nnx, two):
    stopped, _ = two
    ready, done = threading.Event(), threading.Event()

    def hold():
        with lease(RunPaths.of(stopped.id)):
            ready.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    refused = nnx("rm", stopped.id, "--yes")
    done.set()
    thread.join()
    assert refused.returncode == 1
    assert "in use by another process" in refused.stderr
    assert os.path.isdir(f"runs/{stopped.id}")


def test_gc_lists_with_dry_run_and_removes_without(nnx, two):
    stray = Path(f"runs/{two[0].id}/.run.yaml.0123456789ab")
    stray.touch()
    listed = nnx("gc", "--dry-run").stdout
    assert listed == f"would remove {stray}: a file that was never finished\n"
    assert stray.exists()
    assert nnx("gc").stdout == f"removed {stray}: a file that was never finished\n"
    assert not stray.exists()
    assert nnx("gc").stdout == "nothing to remove in runs\n"


def test_verify_finds_a_history_that_lost_a_committed_epoch(nnx, two):
    run, _ = two
    table = Path(f"runs/{run.id}/idps.csv")
    lines = table.read_text().splitlines(keepends=True)
    for lost, said in (
        ("".join(lines[:-2]), "it ends at epoch 0, but LAST committed epoch 1"),
        ("".join(lines)[:-5], "row 5 cannot be read"),
        ("", "idps.csv is empty: it has not even"),
    ):
        table.write_text(lost)
        bad = nnx("verify", run.id)
        assert bad.returncode == 1
        assert said in bad.stdout
    table.unlink()
    table.mkdir()
    assert f"history    {table}: Is a directory" in nnx("verify", run.id).stdout


def test_gc_keeps_a_history_whose_checkpoints_were_deleted(nnx, two):
    import shutil

    run, _ = two
    shutil.rmtree(f"runs/{run.id}/checkpoints")
    table = Path(f"runs/{run.id}/idps.csv").read_bytes()
    nnx("gc")
    assert Path(f"runs/{run.id}/idps.csv").read_bytes() == table
    assert "nothing is committed" in nnx("verify", run.id).stdout


def test_a_broken_configuration_is_named_once_and_the_rest_is_checked(nnx, two):
    path = Path(f"runs/{two[0].id}/run.yaml")
    for text, said in (
        ("a: 1", f"{path} is not a run's configuration: it has no 'model'"),
        (": {", f"{path} is not readable YAML"),
        ("", f"{path} must hold a mapping, not NoneType"),
    ):
        path.write_text(text)
        bad = nnx("verify", two[0].id)
        assert bad.returncode == 1
        assert bad.stdout.count(str(path)) - ('in "' in bad.stdout) == 1
        assert f"run.yaml   {said}" in bad.stdout
        assert "history    ok, 4 committed records" in bad.stdout
        assert nnx("show", two[0].id).stderr.startswith(f"nnx: {said}")
    path.unlink()
    refused = nnx("show", two[0].id[:9])
    assert (refused.returncode, refused.stderr) == (
        1, f"nnx: runs/{two[0].id} is no run that can be read: it has no run.yaml\n"
    )  # fmt: skip


@pytest.mark.parametrize("text", ["a: [", "resume: 3", "precision: {a: 1}\ncompile: 7"])
def test_a_broken_environment_record_is_one_warning_and_no_more(nnx, two, text):
    Path(f"runs/{two[0].id}/metadata.yaml").write_text(text)
    shown = nnx("show", two[0].id)
    assert shown.returncode == 0
    assert f"Run {two[0].id}" in shown.stdout
    assert shown.stderr.startswith(f"nnx: warning: runs/{two[0].id}/metadata.yaml")
    assert ".py" not in shown.stderr


def test_a_last_checkpoint_that_was_cut_is_seen_in_the_list(nnx, two):
    path = Path(f"runs/{two[0].id}/checkpoints/last.pt")
    os.truncate(path, path.stat().st_size - 1)
    listed = {row["id"]: row for row in json.loads(nnx("runs", "--json").stdout)}
    assert listed[two[0].id]["status"] == "unreadable"
    assert f"{path} is corrupted" in listed[two[0].id]["problem"]


def test_a_list_fits_a_narrow_terminal_and_a_closed_pipe_is_no_error(nnx, two, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = nnx("runs").stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "\u2026" not in out  # nothing is cut
    for command in (["runs"], ["show", "best"], ["verify", "best"], ["runs", "--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "nnx", *command], stdout=writing, stderr=subprocess.PIPE
        )
        os.close(writing)
        assert done.stderr == b"", command


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_said_in_one_line(nnx, two):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nnx", "show", "best"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr == b"nnx: the standard output: No space left on device\n"


@pytest.mark.parametrize("command", [("runs",), ("show", "best"), ("best",)])
def test_looking_at_runs_loads_nothing_heavy(two, command):
    code = (
        "import sys; from nnx.cli import main; sys.argv = ['nnx', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "[]"


def test_listing_stays_linear(nnx, two, tmp_path):
    import shutil

    from nnx.store.listing import list_runs

    def calls(count):
        for number in range(len(os.listdir("runs")), count):
            shutil.copytree(f"runs/{two[0].id}", f"runs/copy{number:05}", copy_function=os.link)
        profile = cProfile.Profile()
        rows = profile.runcall(lambda: list(list_runs()))
        assert len(rows) == count - 4  # of the names: .leases, two locks, best
        return sum(entry.callcount for entry in profile.getstats()) / len(rows)

    calls(20)  # what is imported and remembered once
    few, many = calls(100), calls(800)
    assert many <= 1.05 * few  # for each run
