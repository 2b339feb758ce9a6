"""Nothing that is published holds a pickle that could run code, by a scanner of others."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from nnx import Losses, Nets, NNModel, NNModelParams, NNParams, NNTrainParams
from nnx.bundles import export_bundle

scanner = pytest.importorskip("picklescan.scanner")
pytest.importorskip("onnxruntime")

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def unpacked(folder):
    """Unpack every archive in a folder, and those inside of them; the files that there are then."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and zipfile.is_zipfile(path):
            inside = path.with_name(f"{path.name}.d")
            with zipfile.ZipFile(path) as archive:
                archive.extractall(inside)
            path.unlink()
            unpacked(inside)
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def findings(folder):
    found = scanner.scan_directory_path(str(folder))
    assert not found.scan_err
    return found.issues_count, found.infected_files, found.suspicious_count


def imports(data):
    """What a file names to import, read as a pickle; nothing when it is none."""
    try:
        return [str(arg) for op, arg, _ in pickletools.genops(data) if "GLOBAL" in op.name]
    except Exception:  # the bytes of something else
        return []


def test_the_scanner_finds_what_it_should():
    Path("bad").mkdir()
    Path("bad/x.pkl").write_bytes(pickle.dumps(eval))
    assert findings("bad")[0] == 1
    assert imports(pickle.dumps(eval))


def test_everything_that_is_published_is_clean():
    torch.manual_seed(0)
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    loader = [(X, torch.arange(20) % 3)]
    run = model.train(NNTrainParams(n_epochs=2, seed=3, train_loader=loader, val_loader=loader))
    Path("published").mkdir()
    export_bundle(run.id, "published/bundle")
    model.save_pretrained("published/model", run=run)
    model.export("published/model.safetensors", "safetensors")
    model.export("published/model.pt2", "pt2", example_input=X)
    model.to_onnx("published/model.onnx", X)
    assert findings("published") == (0, 0, 0)
    for path in unpacked("published"):
        assert not imports(path.read_bytes()), path
    assert findings("runs") == (0, 0, 0)  # nor is there a finding in what stays at home


def test_what_is_published_names_no_folder_of_this_machine():
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    loader = [(X, torch.arange(20) % 3)]
    run = model.train(NNTrainParams(n_epochs=1, seed=3, train_loader=loader))
    export_bundle(run.id, "published/bundle")
    model.save_pretrained("published/model", run=run)
    model.export("published/model.safetensors", "safetensors")
    model.export("published/model.pt2", "pt2", example_input=X)
    model.to_onnx("published/model.onnx", X)
    model.to_onnx("published/dynamo.onnx", X, dynamo=True)
    here = {str(Path.cwd()), str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[2])}
    for path in unpacked("published"):
        for folder in here:
            assert folder.encode() not in path.read_bytes(), path


def test_an_exported_program_holds_no_row_of_the_example():
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    rows = torch.full((4, 6), 1234.5)
    model.export("m.pt2", "pt2", example_input=rows)
    with zipfile.ZipFile("m.pt2") as archive:
        for name in archive.namelist():
            assert rows.numpy().tobytes()[:8] not in archive.read(name), name
