"""Models of strangers in the Hub's layout: refused by name, with nothing run, built or left."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from nnx import Losses, MissingModelFactoryError, ModelSpec, Nets, NNModel, NNModelParams, NNParams
from nnx.hub import inspect_pretrained
from nnx.hub.layout import PretrainedError

sys.path.insert(0, str(Path(__file__).parents[1]))
from failing_disk import FAULTS, FailingDisk, act, killed

READERS = (inspect_pretrained, NNModel.from_pretrained)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_model():
    torch.manual_seed(0)
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    return NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))


@pytest.fixture
def saved(here):
    make_model().save_pretrained("s")
    return Path("s")


def everything(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def refused(said, folder="s", readers=READERS):
    before = everything(".")
    tracemalloc.start()
    for read in readers:
        with pytest.raises(PretrainedError, match=said):
            read(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert everything(".") == before


def header(change):
    path = Path("s/model.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    change(document)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_fifos_and_folders_are_not_opened(saved, name):
    path = saved / name
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    refused("FIFO")
    path.unlink()
    path.mkdir()
    refused("a folder")
    path.rmdir()
    Path("outside").write_bytes(whole)
    path.symlink_to(os.path.abspath("outside"))
    refused("symbolic link out of the folder")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_a_header_of_any_length(saved, length):
    path = saved / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refused("states a header of")


def overlap(document):
    a, b = document["layers.0.weight"], document["layers.0.bias"]
    b["data_offsets"] = [a["data_offsets"][0], a["data_offsets"][0] + 32]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overlap, "overlaps another|leaves a hole"),
        (lambda h: h["layers.0.bias"].update(shape=[1 << 40, 1 << 40]), "more elements"),
        (lambda h: h["layers.0.bias"].update(data_offsets=[0, 1 << 61]), "states"),
        (lambda h: h["layers.0.bias"].update(dtype="PICKLE"), "is not known"),
        (lambda h: h["layers.0.bias"].update(code="x"), "exactly dtype, shape"),
    ],
)
def test_a_header_that_cannot_be_true(saved, change, said):
    header(change)
    refused(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"params": {}, "params": {}}', "there twice"),
        (b"[" * 100_000 + b"]" * 100_000, "nested"),
        (b"[" + b"[]," * 2_500_000 + b"[]]", "at most 4000000 are read"),
        (b'{"params": NaN}', "no JSON number"),
        (b"\xff\xfe", "not strict JSON"),
        (b"[1]", "describes no model"),
        (pickle.dumps(print), "not strict JSON"),
    ],
    ids=["twice", "deep", "bomb", "nan", "bytes", "list", "pickle"],
)
def test_a_configuration_that_is_not_strict_json(saved, text, said):
    (saved / "config.json").write_bytes(text)
    refused(said)


def test_a_configuration_beyond_the_limit_is_not_read(saved):
    with open(saved / "config.json", "r+b") as stream:
        stream.truncate(1 << 40)  # a hole, which takes no room
    for read in READERS:
        with pytest.raises(PretrainedError, match="at most 16777216 are read"):
            read("s")


@pytest.mark.parametrize(
    "dims", [{"input_dim": 10**12}, {"hidden_dims": str([10**6] * 4)}, {"hidden_dims": "[8]*9"}]
)
def test_a_configuration_of_a_trillion_parameters_is_not_built(saved, dims):
    config = json.loads((saved / "config.json").read_text())
    config["net_params"].update(dims)
    (saved / "config.json").write_text(json.dumps(config))
    refused("does not describe the weights|asks for|cannot be read", readers=READERS[1:])


def test_a_factory_that_is_not_registered_is_not_imported(saved):
    config = {"params": NNModelParams(net=ModelSpec("os.system", 1)).state(), "transforms": []}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingModelFactoryError, match=r"os\.system"):
        NNModel.from_pretrained("s")


def test_archives_and_pickles_in_place_of_weights(saved):
    path = saved / "model.safetensors"
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.write(path, "model.safetensors")
    with tarfile.open("a.tar", "w") as archive:
        archive.add(path, "model.safetensors")

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    Path("a.pkl").write_bytes(pickle.dumps(Evil()))
    torch.save({"x": torch.ones(2)}, "a.pt")
    for name in ("a.zip", "a.tar", "a.pkl", "a.pt"):
        refused("is a file", name)
        shutil.copy(name, path)
        refused("no safetensors file")
    assert not os.path.exists("evil")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", ["nothing", "a model", "a model and notes"])
def test_a_save_that_fails_anywhere_leaves_a_whole_model_or_the_old_one(fault, before, monkeypatch):
    other = make_model()
    torch.nn.init.zeros_(other.net.layers[0].weight)

    def prepare():
        shutil.rmtree("s", ignore_errors=True)
        if before != "nothing":
            make_model().save_pretrained("s")
        if before == "a model and notes":
            Path("s/notes.txt").write_text("mine")

    prepare()
    counted = FailingDisk()
    act(lambda: other.save_pretrained("s"), counted, monkeypatch)
    assert len(counted.done) > 10
    for at in range(1, len(counted.done) + 1):
        prepare()
        for leftover in [n for n in os.listdir(".") if n != "s"]:
            shutil.rmtree(leftover)
        disk, error = FailingDisk(at, FAULTS[fault]), None
        try:
            (killed if fault == "killed" else act)(
                lambda: other.save_pretrained("s"), disk, monkeypatch
            )
        except (OSError, KeyboardInterrupt) as caught:
            error = caught
        where = f"{counted.done[at - 1]}, operation {at}: {error!r}"
        cleaning = counted.done[at - 1] in ("unlink", "rmdir")
        if fault != "killed" and not cleaning:
            assert set(os.listdir(".")) <= {"s"}, where
        if before == "a model":  # one step, where the system has it
            assert os.path.isdir("s") or not hasattr(os, "fork"), where
        if os.path.isdir("s"):
            model = NNModel.from_pretrained("s")
            total = float(model.net.layers[0].weight.detach().abs().sum())
            assert total == 0 or torch.equal(
                model.net.layers[0].weight, make_model().net.layers[0].weight
            ), where
            if error is None and fault != "killed":
                assert total == 0, where
        elif fault != "killed":
            assert before == "nothing", where
        if before == "a model and notes" and os.path.isdir("s"):
            assert Path("s/notes.txt").read_text() == "mine"
