"""What an index of a sharded point may say, whoever wrote it."""

from __future__ import annotations

import json

import pytest
import torch
from nnx.store import ResumePointError
from nnx.store.dcp import resolve
from safetensors.torch import save_file

WHOLE = torch.arange(15.0).reshape(5, 3)


@pytest.fixture
def folder(tmp_path):
    """Five rows, of which two processes wrote three and two."""
    chunks = []
    for rank, (first, end) in enumerate([(0, 3), (3, 5)]):
        save_file({"net/w": WHOLE[first:end].contiguous()}, tmp_path / f"{rank}.safetensors")
        sizes = [end - first, 3]
        chunks.append({"offsets": [first, 0], "sizes": sizes, "file": f"{rank}.safetensors"})
    entry = {"dtype": "F32", "shape": [5, 3], "chunks": chunks}
    document = {"format": "nnx.shards", "version": 1, "tensors": {"net/w": entry}}
    (tmp_path / "shards.json").write_text(json.dumps(document))
    return tmp_path


def read(folder):
    return resolve({"w": {"$shard": "net/w"}}, str(folder))["w"]


def edit(folder, change):
    path = folder / "shards.json"
    document = json.loads(path.read_text())
    change(document["tensors"]["net/w"])
    path.write_text(json.dumps(document))


def test_the_pieces_make_the_whole(folder):
    assert torch.equal(read(folder), WHOLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["chunks"].pop(),
        lambda entry: entry["chunks"].pop(0),
        lambda entry: entry["chunks"].clear(),
        lambda entry: entry["chunks"].append(entry["chunks"][0]),
        lambda entry: entry["chunks"][1]["sizes"].__setitem__(0, 50),
        lambda entry: entry["chunks"][1]["sizes"].__setitem__(1, 2),
        lambda entry: entry["chunks"][0]["offsets"].__setitem__(0, 0.5),
        lambda entry: entry["shape"].__setitem__(0, 10**13),
        lambda entry: entry["shape"].__setitem__(0, -1),
        lambda entry: entry["shape"].__setitem__(0, "5"),
        lambda entry: entry.update(shape=[], chunks=[]),
        lambda entry: entry.update(chunks=[5]),
        lambda entry: entry.update(dtype="pickle"),
    ],
)
def test_an_index_that_is_not_the_rows_of_its_tensors_is_refused(folder, change):
    edit(folder, change)
    with pytest.raises(ResumePointError, match="shards.json is corrupted"):
        read(folder)


def test_a_tensor_larger_than_its_files_is_refused_before_it_is_allocated(folder):
    def grow(entry):
        entry["shape"][0] = 10**13
        entry["chunks"][1]["sizes"][0] = 10**13 - 3

    edit(folder, grow)
    with pytest.raises(ResumePointError, match=r"1\.safetensors is corrupted: it is shorter"):
        read(folder)


def test_a_missing_file_is_told(folder):
    (folder / "1.safetensors").unlink()
    with pytest.raises(ResumePointError, match=r"torn: .*1\.safetensors is missing"):
        read(folder)
