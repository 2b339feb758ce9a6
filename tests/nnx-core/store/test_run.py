from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from nnx.enums import Checkpoints
from nnx.history import (
    HistoryCorruptionError,
    HistoryJournal,
    export_history_csv,
    iter_history,
)
from nnx.records import ResumeStatus
from nnx.store import NNCheckpoint, NNRun, ResumePointError, RunBusyError, idps_csv, read_point
from nnx.store.listing import list_runs
from nnx.store.run import from_state
from nnx.utils.yamlio import read_yaml

ORIGINAL = Path(__file__).parents[2] / "data" / "original-runs"
RUNS = sorted(path.parent for path in ORIGINAL.glob("*/*/run.yaml"))


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.parent.name)
def test_a_run_of_the_original_system_keeps_its_id_and_its_history(folder, tmp_path):
    run = NNRun.load(folder.name, str(folder.parent))
    assert run.id == folder.name
    if run.history is not None:
        return  # its journal is read in tests/nnx-core/history
    rows = list(csv.DictReader((folder / "idps.csv").open(newline="")))
    assert len(run.idps) == len(rows) > 0
    for row, record in zip(rows, run.idps, strict=True):
        flat = idps_csv.flatten(record)
        for column, cell in row.items():
            if column and cell:
                assert str(flat[column]) == cell or float(flat[column]) == float(cell)
    copy = tmp_path / "idps.csv"
    idps_csv.write(str(copy), run.idps)
    assert copy.read_bytes() == (folder / "idps.csv").read_bytes()


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.parent.name)
def test_saving_a_run_of_the_original_system_writes_the_same_configuration(folder, root):
    run = NNRun.load(folder.name, str(folder.parent)).with_history(None)
    run.save(update_best=False)
    assert Path(f"runs/{run.id}/run.yaml").read_bytes() == (folder / "run.yaml").read_bytes()
    assert read_yaml(f"runs/{run.id}/metadata.yaml")["resume"]["mode"] == "fresh"
    assert NNRun.load(run.id).idps == run.idps


def test_an_original_run_with_its_pickled_checkpoint_still_loads_whole(root, tmp_path):
    import zipfile

    folder = RUNS[0]
    target = tmp_path / "runs" / folder.name
    shutil.copytree(folder, target)
    (target / ".history-committed-by-last").touch()
    (target / "checkpoints").mkdir()
    with zipfile.ZipFile(target / "checkpoints" / "last.pt", "w") as archive:
        payload = b"cnnx.nn.params.nn_checkpoint\nNNCheckpoint\n."
        archive.writestr("last/data.pkl", payload)
        archive.writestr("last/version", b"3\n")
        archive.writestr("last/byteorder", b"little")
    with pytest.warns(RuntimeWarning, match="whole history is shown"):
        run = NNRun.load(folder.name)
    assert len(run.idps) == len(NNRun.load(folder.name, str(folder.parent)).idps)


def test_a_run_equals_what_was_saved(parts, root):
    status = ResumeStatus(mode="stateful", source_run_id="b" * 32, source_epoch=3)
    run = parts.run(salt="replicate-2").with_idps([parts.record(0, 0), parts.record(0, 1)])
    run.with_resume_status(status).save()
    loaded = NNRun.load(run.id)
    assert loaded.state() == run.state()
    assert loaded.salt == "replicate-2"
    assert loaded.idps == run.idps
    assert loaded.resume_status == status
    assert from_state(run.state()).id == run.id


def test_a_salt_makes_another_run_and_must_be_a_non_empty_string(parts):
    assert parts.run().id != parts.run(salt="a").id != parts.run(salt="b").id
    assert parts.run().id == parts.run(salt=None).id
    for salt in ("", 3):
        with pytest.raises(ValueError, match=r"NNRun\.salt must be a non-empty string"):
            parts.run(salt=salt)


@pytest.mark.parametrize("journal", [False, True])
def test_the_marker_without_last_means_that_nothing_is_committed(train, root, journal):
    history = HistoryJournal(retention=9) if journal else None
    first = train(epochs=1, history=history)
    shutil.rmtree(f"runs/{first.id}/checkpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NNRun.load(first.id).idps == []  # as when the first commit was interrupted
    run = train(epochs=2, history=history)
    shutil.rmtree(f"runs/{run.id}/checkpoints")
    with pytest.warns(RuntimeWarning, match=r"no checkpoints/last\.pt.*more than one epoch"):
        assert NNRun.load(run.id).idps == []
    os.unlink(f"runs/{run.id}/.history-committed-by-last")
    assert len(NNRun.load(run.id).idps) == 4  # a run from before the protocol


def test_history_past_last_is_left_out(train, parts, root):
    run = train(epochs=2)
    idps_csv.write(f"runs/{run.id}/idps.csv", [*run.idps, parts.record(2, 0)])
    assert NNRun.load(run.id).idps == run.idps


@pytest.mark.parametrize("content", [b"", b"short", None], ids=["empty", "cut", "missing"])
def test_a_damaged_last_is_refused_instead_of_shortening_the_history(train, root, content):
    run = train(epochs=2)
    last = Path(f"runs/{run.id}/checkpoints/last.pt")
    last.unlink()
    if content is not None:
        last.write_bytes(content)
    with pytest.raises(ResumePointError, match=r"last\.pt"):
        NNRun.load(run.id)
    with pytest.warns(RuntimeWarning, match=f"{run.id} is left out"):
        assert NNRun.all() == []


@pytest.mark.parametrize("older", [True, False], ids=["at rest", "touched"])
def test_a_flipped_bit_of_last_costs_no_history_and_refuses_the_resume(train, root, older):
    """Loading a run reads no checkpoint; what is wrong with one stops the resume."""
    run = train(epochs=2)
    last = Path(f"runs/{run.id}/checkpoints/last.pt")
    weights = NNCheckpoint.load(run.id, Checkpoints.LAST).net_state["weight"].numpy().tobytes()
    data = bytearray(last.read_bytes())
    data[data.index(weights) + 3] ^= 1
    last.unlink()  # BEST is the same file
    last.write_bytes(data)
    if older:
        os.utime(last, (0, 0))
    assert NNRun.load(run.id).idps == run.idps
    with pytest.raises(ResumePointError, match=r"corrupted: the SHA-256 of .*last\.pt does not"):
        read_point(run.id, "last")
    assert read_point(run.id, "best").completed_epoch == 1


def test_all_lists_runs_and_skips_what_is_none(train, parts, root):
    assert NNRun.all() == []
    first, second = train(parts.run(2, salt="a"), 1), train(parts.run(2, salt="b"), 1)
    Path("runs/.DS_Store").touch()
    Path("runs/stray.txt").touch()
    Path("runs/reserved").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = NNRun.all()
    assert [run.id for run in found] == sorted([first.id, second.id])


def test_checkpoints_are_the_phases_in_their_order(train, root):
    run = train(epochs=2)
    found = run.checkpoints()
    assert [c and c.idp.epoch_idx for c in found] == [0, None, None, None, 1]


def test_an_unknown_run_is_said_with_what_is_near(train, root):
    run = train(epochs=1)
    with pytest.raises(FileNotFoundError, match=f"did you mean {run.id}"):
        NNRun.load(run.id[:-1] + "x")
    with pytest.raises(FileNotFoundError, match="no best run in elsewhere"):
        NNRun.load("best", "elsewhere")
    assert not os.path.exists("elsewhere")


@pytest.mark.parametrize(
    "id", ["../x", "a/b", "", ".", "..", ".hidden", "a\x00b", "a\\b", "x" * 300, "c:", 3, "a\n"]
)
def test_an_id_that_is_no_plain_name_is_refused(id, root):
    with pytest.raises(ValueError, match="run id"):
        NNRun.load(id)
    assert os.listdir() == []


def test_a_run_that_another_process_trains_is_not_saved_over(train, parts, root):
    run = train(epochs=1)
    code = (
        "import sys, time; from nnx.store.lease import lease; from nnx.store.paths import RunPaths\n"
        f"with lease(RunPaths.of({run.id!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunBusyError, match="in use by another process"):
            run.save()
        other.communicate("")
    run.save()


def test_a_folder_that_cannot_be_written_is_refused_before_anything(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="no run can be kept in file/runs"):
        parts.run().ensure_writable("file/runs")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(PermissionError, match="not writable"):
        parts.run().ensure_writable("runs")
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_in_place_of_the_run_is_not_written_through(parts, root, tmp_path):
    run = parts.run()
    (tmp_path / "elsewhere").mkdir()
    os.mkdir("runs")
    os.symlink(tmp_path / "elsewhere", f"runs/{run.id}")
    with pytest.raises(FileExistsError, match="in the way"):
        run.ensure_writable(overwrite=True)


def test_a_text_view_and_a_notebook_view_escape_what_users_wrote(parts, monkeypatch):
    from nnx.plugins import Registry, manager

    monkeypatch.setattr(manager, "registry", Registry)  # no renderer is installed
    run = parts.run(salt="<script>alert(1)</script>").with_idps([parts.record(0, 1)])
    text = str(run)
    assert run.id in text
    assert "last.val.error" in text
    html = run._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert run.display_path("/somewhere/private/runs") == f"runs/{run.id}"
    assert "idps" not in repr(run)


def test_the_notebook_view_adds_the_chart_of_an_installed_renderer(parts, monkeypatch):
    from nnx.plugins import Registry, manager

    registry = Registry("renderer")
    monkeypatch.setattr(manager, "registry", lambda kind: registry)
    registry.register("run.html", 1, lambda run: f"<b>{run.id}</b>", owner="test")
    html = parts.run()._repr_html_()
    assert html.startswith("<table>")  # the configuration stays in view
    assert html.endswith(f"</table><b>{parts.run().id}</b>")


def test_listing_and_showing_load_no_torch(train, root):
    train(epochs=1)
    code = (
        "import sys; from nnx import NNRun; runs = NNRun.all(); str(runs[0]); "
        "runs[0]._repr_html_; print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_reading_many_runs_opens_no_checkpoint(train, parts, root, monkeypatch):
    for salt in "abc":
        train(parts.run(2, salt=salt), 1)
    from nnx.store import NNCheckpoint
    from nnx.store.listing import list_runs

    def fail(*args, **kwargs):
        raise AssertionError("a checkpoint was opened")

    monkeypatch.setattr(NNCheckpoint, "from_file", fail)
    assert len(NNRun.all()) == len(list(list_runs())) == 3


def test_a_run_is_found_from_its_runs_folder_from_the_folder_above_and_from_its_own(
    train, parts, root, tmp_path, monkeypatch
):
    run = train(parts.run(3, salt="one"))
    monkeypatch.chdir("/")
    runs = tmp_path / "runs"
    for place in (runs, tmp_path, runs / run.id):
        assert NNRun.load(run.id, root=str(place)).idps == run.idps
        assert NNCheckpoint.load(run.id, Checkpoints.BEST, root=str(place)).idp.epoch_idx == 2
        assert read_point(run.id, "last", str(place)).completed_epoch == 2
    for place in (runs, tmp_path):
        assert NNRun.load("best", root=str(place)).id == run.id
        assert [found.id for found in NNRun.all(str(place))] == [run.id]
        assert [row.id for row in list_runs(str(place))] == [run.id]
    with pytest.raises(FileNotFoundError, match=f"there is no run 'absent' in {tmp_path}"):
        NNRun.load("absent", root=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["runs"]


def test_a_history_without_its_end_is_refused_by_name(train, parts, root):
    run = train(parts.run(3))
    path = Path(f"runs/{run.id}/idps.csv")
    lines = path.read_bytes().splitlines(keepends=True)
    cuts = {
        b"": "empty: it has not even the names",
        lines[0]: "cut off: it has no record, but LAST committed epoch 2 up to batch 1",
        b"".join(
            lines[:3]
        ): "cut off: it ends at epoch 0, but LAST committed epoch 2 up to batch 1",
        b"".join(
            lines[:-1]
        ): "cut off: it ends at epoch 2, batch 0, but LAST committed epoch 2 up to",
    }
    for data, reason in cuts.items():
        path.write_bytes(data)
        for read in (lambda: NNRun.load(run.id), lambda: list(iter_history(run.id))):
            with pytest.raises(HistoryCorruptionError, match=f"idps.csv is {reason}"):
                read()
        with pytest.warns(RuntimeWarning, match="is left out: .*idps.csv"):
            assert NNRun.all() == []
        with pytest.raises(HistoryCorruptionError):
            export_history_csv(run.id, "out.csv")
        assert not os.path.exists("out.csv")
    path.write_bytes(b"".join(lines))
    assert NNRun.load(run.id).idps == run.idps


def test_an_empty_history_of_a_foreign_run_is_refused_by_name(parts, root):
    run = parts.run(3).with_idps([parts.record(0)]).save()
    os.truncate(f"runs/{run.id}/idps.csv", 0)
    with pytest.raises(HistoryCorruptionError, match=r"idps\.csv is empty: "):
        NNRun.load(run.id)


def test_whoever_holds_the_lease_saves_the_history(parts, root):
    run = parts.run(3).with_idps([parts.record(0, 0), parts.record(0, 1)])
    with run.writable_lease():
        run.save()
    os.unlink(f"runs/{run.id}/.history-committed-by-last")
    assert NNRun.load(run.id).idps == run.idps
