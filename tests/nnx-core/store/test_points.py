"""Resume points: what is on disk, what is refused, and that nothing there runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.callbacks import ModelCheckpoint
from nnx.enums import Checkpoints
from nnx.params import NNCheckpointTransform
from nnx.store import NNCheckpoint, NNRun, ResumePointError, read_point
from nnx.store.cleanup import collect
from nnx.store.data import as_data, check_data, load_data, save_data
from nnx.utils import files
from nnx.utils.flushing import Flushes
from nnx.utils.interrupts import hold_interrupts

LAST, BEST, FIRST = Checkpoints.LAST, Checkpoints.BEST, Checkpoints.FIRST


@pytest.fixture
def run(train):
    return train(epochs=2)


def folder(run) -> Path:
    return Path(f"runs/{run.id}/checkpoints")


def sidecar(run, tag="last") -> Path:
    return next(p for p in folder(run).glob(f"{tag}.pt.opt.*.pt"))


def test_the_manifest_names_the_position_and_every_file(run):
    manifest = NNCheckpoint.resume_point(run.id, LAST)
    assert manifest["position"] == {
        "completed_epoch": 1, "global_step": 4, "committed_updates": 4, "planned_n_epochs": 3
    }  # fmt: skip
    assert set(manifest["files"]) == {"last.pt", sidecar(run).name}
    import hashlib

    for name, entry in manifest["files"].items():
        data = (folder(run) / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    text = (folder(run) / "last.pt.manifest.json").read_text()
    assert json.loads(text)["checkpoint_id"] == manifest["checkpoint_id"]
    assert NNCheckpoint.verify(run.id, LAST) == manifest


def test_a_missing_file_is_torn(run):
    sidecar(run).unlink()
    with pytest.raises(ResumePointError, match=r"is torn: .*last\.pt\.opt.* is missing"):
        NNCheckpoint.verify(run.id, LAST)
    with pytest.raises(ResumePointError, match="torn"):
        NNCheckpoint.load_training_state(run.id, LAST)
    with pytest.raises(ResumePointError, match="torn"):
        read_point(run.id, "last")
    assert NNCheckpoint.load(run.id, LAST).idp.epoch_idx == 1


def test_a_manifest_of_another_checkpoint_is_torn(run):
    shutil.copy(folder(run) / "first.pt", folder(run) / "last.pt")
    with pytest.raises(ResumePointError, match="torn: its manifest names another checkpoint"):
        NNCheckpoint.verify(run.id, LAST)


def test_files_of_two_generations_are_mixed(run):
    shutil.copy(sidecar(run, "first"), sidecar(run))
    with pytest.raises(ResumePointError, match=r"is mixed: .* is of generation"):
        NNCheckpoint.verify(run.id, LAST)
    with pytest.raises(ResumePointError, match="is mixed"):
        NNCheckpoint.load_with_training_state(run.id, LAST)


@pytest.mark.parametrize("which", ["checkpoint", "sidecar", "manifest"])
def test_a_flipped_bit_anywhere_is_corruption(run, which):
    path = {
        "checkpoint": folder(run) / "last.pt",
        "sidecar": sidecar(run),
        "manifest": folder(run) / "last.pt.manifest.json",
    }[which]
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 25)):
        path.unlink()  # a flipped bit of the disk, not of the files that share its content
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ResumePointError, match=r"corrupted|torn|mixed|manifest of version"):
            NNCheckpoint.verify(run.id, LAST)
    path.write_bytes(whole)
    assert NNCheckpoint.verify(run.id, LAST)
    assert NNCheckpoint.verify(run.id, BEST)


def test_verification_writes_nothing_but_the_lock(run):
    def snapshot():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in Path("runs").rglob("*")}

    before = snapshot()
    NNCheckpoint.verify(run.id, LAST)
    read_point(run.id, "last")
    after = {p: v for p, v in snapshot().items() if not p.name.endswith(".lock")}
    assert after == {p: v for p, v in before.items() if not p.name.endswith(".lock")}


def test_a_read_only_run_is_read(run, monkeypatch):
    for lock in folder(run).glob("*.lock"):
        lock.unlink()
    from nnx.utils import locks

    def read_only(path, timeout):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(locks, "_take", read_only)
    assert NNCheckpoint.verify(run.id, LAST)["position"]["completed_epoch"] == 1
    assert NNCheckpoint.load(run.id, BEST).idp.epoch_idx == 1


def test_a_checkpoint_without_a_manifest_loads_as_before(run):
    (folder(run) / "first.pt.manifest.json").unlink()
    assert NNCheckpoint.verify(run.id, FIRST) is None
    assert NNCheckpoint.resume_point(run.id, FIRST) is None
    assert read_point(run.id, FIRST).completed_epoch == 0


def test_the_fixed_sidecar_of_old_checkpoints_is_read(parts, root):
    path = Path("runs/old/checkpoints/last.pt")
    parts.checkpoint(0).to_file(str(path))
    assert NNCheckpoint.load_with_training_state("old", LAST)[1] is None
    moments = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}
    torch.save(moments, f"{path}.opt.pt")
    assert NNCheckpoint.load_optimizer_state("old", LAST)["state"][0]["exp_avg"].tolist() == [1, 1]
    point = read_point("old", "last")
    assert (point.generation, point.checkpoint_id, point.completed_epoch) == (None, None, 0)


def test_what_a_resume_asks_for_in_vain_is_said_with_what_is_there(run):
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint 'q1' \(written: best, first, last\)"
    ):
        read_point(run.id, Checkpoints.Q1)
    with pytest.raises(FileNotFoundError, match="no run 'nothing'"):
        read_point("nothing", "last")
    for tag in ("../last", "a/b", "", ".x", "last.pt", "a\x00", "nul", "Com1", "a:b", "a ", "a."):
        with pytest.raises(ValueError, match="checkpoint tag"):
            read_point(run.id, tag)


def test_the_best_run_is_read_through_the_pointer(run):
    point = read_point("best", "best")
    assert (point.run_id, point.completed_epoch) == (run.id, 1)
    assert NNRun.load("best").id == run.id


@pytest.mark.parametrize(
    "tag", ["a:b", "a*", "a\nb", ".a", " a", "a/b", "con.x", "a.pt", "a" * 178]
)
def test_a_tag_that_some_system_refuses_is_refused_before_anything_trains(tag):
    with pytest.raises(ValueError, match=r"ModelCheckpoint\.tag must be usable in a file name"):
        ModelCheckpoint([7], tag=tag)
    for name in ("nul", "写真", "a b", "nulls"):  # what follows makes a plain name of it
        assert ModelCheckpoint([7], tag=name).tag == name


# Data only


class Hostile:
    """Unpickling it would leave a file behind."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def hostile(tmp_path):
    """Files that run code when unpickled, in every form that torch reads."""
    marker = tmp_path / "executed"
    payload = Hostile(marker)
    made = tmp_path / "hostile"
    made.mkdir()
    torch.save({"format": "nnx.checkpoint", "net_state": payload}, made / "zip")
    torch.save(payload, made / "legacy", _use_new_zipfile_serialization=False)
    (made / "bare2").write_bytes(pickle.dumps(payload, protocol=2))
    (made / "bare4").write_bytes(pickle.dumps(payload, protocol=4))
    (made / "text").write_bytes(pickle.dumps(payload, protocol=0))
    with zipfile.ZipFile(made / "raw", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload, protocol=2))
        archive.writestr("archive/version", b"3\n")
    pickle.loads((made / "bare4").read_bytes()).close()
    assert marker.exists()  # it is hostile indeed
    marker.unlink()
    return marker, sorted(made.iterdir())


def read_everything(run):
    """Every reader of a run directory, each allowed to refuse."""
    from nnx.cli.runs import show, verify
    from nnx.history import export_history_csv, iter_history
    from nnx.provenance import compare, load_provenance
    from nnx.store.election import repair
    from nnx.store.listing import list_runs

    readers = [
        lambda: NNRun.load(run.id), NNRun.all, lambda: list(list_runs()), lambda: repair("runs"),
        lambda: load_provenance(run.id), lambda: compare(run.id, run.id),
        lambda: list(iter_history(run.id)), lambda: list(iter_history(run.id, lineage=True)),
        lambda: export_history_csv(run.id, "out.csv"), lambda: show(run.id),
        lambda: verify(run.id), lambda: collect("runs"), run.checkpoints,
    ]  # fmt: skip
    for tag in (LAST, BEST, FIRST):
        readers += [
            lambda tag=tag: NNCheckpoint.load(run.id, tag),
            lambda tag=tag: NNCheckpoint.load_with_training_state(run.id, tag),
            lambda tag=tag: NNCheckpoint.verify(run.id, tag),
            lambda tag=tag: read_point(run.id, tag),
        ]
    import typer

    for read in readers:
        with contextlib.suppress(ValueError, OSError, typer.Exit):
            read()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_hostile_pickle_in_any_place_of_a_run_never_executes(run, hostile, tmp_path):
    marker, payloads = hostile
    backup = tmp_path / "backup"
    shutil.copytree("runs", backup, symlinks=True)
    places = [p.relative_to("runs") for p in Path("runs").rglob("*") if p.is_file()]
    extra = ["history/journal.json", "history/chunk-00000000.jsonl", "provenance.json"]
    extra += ["attempt.json", "checkpoints/step.pt", "checkpoints/step.pt.manifest.json"]
    extra += ["checkpoints/last.pt.manifest.json.staged", "checkpoints/best.pt.staged"]
    places += [Path(run.id) / name for name in extra]
    for number, place in enumerate(places):
        for payload in (payloads[number % len(payloads)], payloads[-1]):
            target = Path("runs") / place
            target.parent.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy(payload, target)
            read_everything(run)
            assert not marker.exists(), (place, payload.name)
            shutil.rmtree("runs")
            shutil.copytree(backup, "runs", symlinks=True)


def test_a_file_that_needs_code_is_refused_with_what_it_would_call(hostile):
    _, payloads = hostile
    for payload in payloads:
        with pytest.raises(ResumePointError, match=r"is refused|is corrupted|neither a checkpoint"):
            NNCheckpoint.from_file(str(payload))
    with pytest.raises(ResumePointError, match=r"could run code, \S*open"):
        NNCheckpoint.from_file(str(next(p for p in payloads if p.name == "zip")))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(plain)
def test_plain_data_comes_back_as_it_was(tmp_path_factory, value):
    path = str(tmp_path_factory.mktemp("data") / "x.pt")
    flushes = Flushes()
    save_data(as_data(value, "value"), path, flushes)
    flushes.wait()
    back = load_data(path)
    assert back == value
    assert repr(back) == repr(value)  # 1, 1.0 and True apart, lists and tuples too


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, lambda: 0, {"a": [object()]}, {("k",): slice(1)}, {object(): 1}]
)
def test_what_is_not_data_is_refused_by_its_path_before_anything_is_written(value, parts, root):
    with pytest.raises(TypeError, match=r"components\['x'\]"):
        check_data(value, "components['x']")
    with pytest.raises(TypeError, match="checkpoint holds"):
        parts.checkpoint(0).save("r", LAST, components={"x": value})
    assert [n for n in os.listdir("runs/r/checkpoints") if not n.endswith(".lock")] == []


def test_module_versions_and_ties_of_a_state_dict_survive(tmp_path, parts):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    net[1].bias = net[0].bias
    checkpoint = parts.checkpoint(0)
    state = net.state_dict()
    path = str(tmp_path / "x.pt")
    type(checkpoint)(
        net_params=checkpoint.net_params, net_state=state, model_params=checkpoint.model_params,
        idp=checkpoint.idp,
    ).to_file(path)  # fmt: skip
    back = NNCheckpoint.from_file(path).net_state
    assert list(back) == list(state)
    assert back._metadata == state._metadata
    assert back["0.bias"].data_ptr() == back["1.bias"].data_ptr()


# One file anywhere


@pytest.mark.parametrize("format", ["pickle", "safetensors"])
def test_a_checkpoint_file_of_either_format_comes_back(tmp_path, parts, format):
    path = str(tmp_path / "new" / "file")
    recipe = NNCheckpointTransform(name="acme.lora", version=2, options={"targets": ["a"], "r": 4})
    checkpoint = parts.checkpoint(3, transforms=(recipe, NNCheckpointTransform(name="acme.b")))
    checkpoint.to_file(path, format=format)
    back = NNCheckpoint.from_file(path)
    assert back.idp == checkpoint.idp
    assert back.net_params == checkpoint.net_params
    assert back.model_params == checkpoint.model_params
    assert list(back.net_state) == list(checkpoint.net_state)
    assert all(torch.equal(back.net_state[k], v) for k, v in checkpoint.net_state.items())
    assert os.listdir(tmp_path / "new") == ["file"]
    assert back.transforms == checkpoint.transforms
    assert back.reconstructible


def test_a_safetensors_checkpoint_is_read_by_the_library_itself(tmp_path, parts):
    from safetensors import safe_open

    path = str(tmp_path / "x.safetensors")
    parts.checkpoint(0).to_file(path, format="safetensors")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"weight", "bias"}
        assert json.loads(file.metadata()["idp"])["epoch_idx"] == 0


def test_safetensors_is_known_by_its_ninth_byte_even_when_it_starts_like_a_pickle(tmp_path, parts):
    from nnx.store import codec
    from safetensors.torch import save

    tensors, metadata = codec.to_safetensors(parts.checkpoint(0))
    path = tmp_path / "x"
    for pad in range(600):
        payload = save(tensors, metadata={**metadata, "pad": json.dumps("x" * pad)})
        if payload[0] == 0x80:
            path.write_bytes(payload)
            assert NNCheckpoint.from_file(str(path)).idp.epoch_idx == 0
            return
    raise AssertionError("no header of such a length")


def test_map_location_rules(tmp_path, parts):
    for format in ("pickle", "safetensors"):
        parts.checkpoint(0).to_file(str(tmp_path / format), format=format)
    for where in ("cpu", torch.device("cpu")):
        for format in ("pickle", "safetensors"):
            assert NNCheckpoint.from_file(str(tmp_path / format), map_location=where)
    assert NNCheckpoint.from_file(
        str(tmp_path / "pickle"), map_location=lambda storage, where: storage
    )
    for where in (lambda storage, where: storage, {"cuda:0": "cpu"}):
        with pytest.raises(TypeError, match=r"must be a device string or torch\.device"):
            NNCheckpoint.from_file(str(tmp_path / "safetensors"), map_location=where)


def test_other_files_are_told_apart(tmp_path):
    from safetensors.torch import save_file

    assert NNCheckpoint.from_file(str(tmp_path / "absent")) is None
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")
    assert NNCheckpoint.from_file(str(tmp_path / "weights.pt")) is None
    save_file({"weight": torch.ones(1)}, str(tmp_path / "weights.safetensors"))
    with pytest.raises(ResumePointError, match="holds tensors but not a checkpoint"):
        NNCheckpoint.from_file(str(tmp_path / "weights.safetensors"))
    with pytest.raises(ResumePointError, match="is a directory"):
        NNCheckpoint.from_file(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(ResumePointError, match="is empty"):
        NNCheckpoint.from_file(str(tmp_path / "empty"))
    (tmp_path / "text").write_text("not a checkpoint at all, just words")
    with pytest.raises(ResumePointError, match="neither"):
        NNCheckpoint.from_file(str(tmp_path / "text"))


def test_what_safetensors_cannot_hold_and_unknown_formats_are_refused(tmp_path, parts):
    checkpoint = parts.checkpoint(0)
    checkpoint.net_state["_extra_state"] = {"a": 1}
    with pytest.raises(TypeError, match=r"net_state\['_extra_state'\] is a dict"):
        checkpoint.to_file(str(tmp_path / "sub" / "x"), format="safetensors")
    with pytest.raises(ValueError, match="format must be 'pickle' or 'safetensors'"):
        checkpoint.to_file(str(tmp_path / "sub" / "x"), format="json")
    assert os.listdir(tmp_path) == []


# A Ctrl-C


def press(disk, name, at, times=1):
    """A disk on which Ctrl-C is pressed right before an operation."""
    real, count = getattr(files.Disk, name), [0]

    def operation(self, *args):
        count[0] += 1
        if count[0] == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return real(self, *args)

    setattr(disk, name, operation)


@pytest.mark.parametrize("at", [1, 2])
def test_a_ctrl_c_while_a_point_is_published_is_held_until_it_is_complete(
    run, parts, monkeypatch, at
):
    class Interrupted(files.Disk):
        pass

    press(Interrupted, "replace", at)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            parts.checkpoint(5).save(run.id, LAST, **parts.state(5))
    assert NNCheckpoint.verify(run.id, LAST)["position"]["completed_epoch"] == 5
    assert not list(folder(run).glob("*.staged"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once_and_the_point_is_still_read(run, parts, monkeypatch):
    class Interrupted(files.Disk):
        pass

    press(Interrupted, "replace", 2, times=2)  # the checkpoint is published, its manifest not
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            parts.checkpoint(5).save(run.id, LAST, **parts.state(5))
    assert list(folder(run).glob("last.pt.manifest.json.staged"))
    assert NNCheckpoint.verify(run.id, LAST)["position"]["completed_epoch"] == 5
    assert read_point(run.id, "last").checkpoint.idp.epoch_idx == 5
    parts.checkpoint(6).save(run.id, LAST, **parts.state(6))
    assert not list(folder(run).glob("*.staged"))
    assert NNCheckpoint.verify(run.id, LAST)["generation"] == 4


def test_a_ctrl_c_before_the_window_leaves_the_previous_point(run, parts, monkeypatch):
    class Interrupted(files.Disk):
        pass

    press(Interrupted, "create", 2)
    before = sorted(os.listdir(folder(run)))
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            parts.checkpoint(5).save(run.id, LAST, **parts.state(5))
    assert sorted(os.listdir(folder(run))) == before
    assert NNCheckpoint.verify(run.id, LAST)["position"]["completed_epoch"] == 1


def test_interrupts_are_left_alone_in_other_threads_and_custom_handlers_get_them():
    seen = []
    previous = signal.signal(signal.SIGINT, lambda *args: seen.append(args[0]))
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)

    def elsewhere():
        with hold_interrupts():
            seen.append("ran")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[-1] == "ran"


def test_concurrent_writers_of_one_tag_leave_one_whole_point(run, parts):
    def write(epoch):
        for _ in range(5):
            parts.checkpoint(epoch).save(run.id, LAST, **parts.state(epoch))

    def read():
        for _ in range(30):
            checkpoint, state = NNCheckpoint.load_with_training_state(run.id, LAST)
            assert state["completed_epoch"] == checkpoint.idp.epoch_idx

    errors = []

    def guarded(act, *args):
        try:
            act(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(write, e)) for e in (1, 7, 8)]
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    manifest = NNCheckpoint.verify(run.id, LAST)
    assert manifest["generation"] == 2 + 15
    assert len(list(folder(run).glob("last.pt.opt.*.pt"))) == 1
