"""Bundles of strangers: whatever was changed is named, and nothing is run, built or left."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tracemalloc
import zipfile

import pytest
from made_bundles import change_header, change_state, everything, generation, stated
from nnx.bundles import (
    BundleError,
    BundleIntegrityError,
    BundleReconstructionError,
    inspect_bundle,
    reconstruct_bundle,
    validate_bundle,
)

STATE, MODEL = "state.json", "model.safetensors"


def refused(bundle, said, kind=BundleIntegrityError, readers=(validate_bundle, reconstruct_bundle)):
    before = everything(bundle) if os.path.isdir(bundle) else None
    for read in readers:
        with pytest.raises(kind, match=said):
            read(bundle)
    if before is not None:
        assert everything(bundle) == before


def test_a_changed_byte(bundle):
    for name in os.listdir(generation(bundle)):
        path = generation(bundle) / name
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        whole = path.read_bytes()
        path.write_bytes(data)
        refused(bundle, rf"SHA-256 of .*{name}")
        path.write_bytes(whole)
    assert validate_bundle(bundle).verified


def test_a_size_is_compared_before_a_byte_is_read(bundle):
    with open(generation(bundle) / MODEL, "ab") as stream:
        stream.write(b"x")
    refused(bundle, r"bytes, not the \d+ that are stated")


def test_a_missing_file(bundle):
    (generation(bundle) / "training.safetensors").unlink()
    refused(bundle, "is missing")


@pytest.mark.parametrize("where", ["top", "generation"])
def test_an_unlisted_file(bundle, where):
    folder = bundle if where == "top" else generation(bundle)
    (folder / "extra.pt").write_bytes(b"x")
    refused(bundle, "unlisted")


def test_a_linked_file(bundle):
    path = generation(bundle) / MODEL
    path.rename(bundle.parent / "elsewhere")
    path.symlink_to(bundle.parent / "elsewhere")
    refused(bundle, "symbolic link|not a regular file")


def test_a_linked_manifest_or_generation(bundle):
    folder = generation(bundle)
    folder.rename(bundle.parent / "elsewhere")
    folder.symlink_to(bundle.parent / "elsewhere")
    refused(bundle, "symbolic link")
    folder.unlink()
    (bundle.parent / "elsewhere").rename(folder)
    (bundle / "bundle.json").rename(bundle.parent / "manifest")
    (bundle / "bundle.json").symlink_to(bundle.parent / "manifest")
    refused(bundle, "symbolic link")


def test_a_fifo_is_never_opened(bundle):
    path = generation(bundle) / MODEL
    path.unlink()
    os.mkfifo(path)
    for read in (validate_bundle, reconstruct_bundle):
        with pytest.raises(BundleIntegrityError, match="FIFO|not a regular file"):
            read(bundle)


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "a/b.json", "calibrator-01.json"])
def test_a_name_that_leaves_the_bundle(bundle, name):
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["payloads"][name] = manifest["payloads"][STATE]
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    refused(bundle, "no file of a bundle")


@pytest.mark.parametrize("value", ["../../x", "0" * 31, "G" * 32, 7])
def test_a_generation_that_is_none(bundle, value):
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["generation"] = value
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    refused(bundle, "names no generation")


def test_a_swapped_generation(bundle):
    manifest = json.loads((bundle / "bundle.json").read_text())
    other = "f" * 32
    shutil.copytree(generation(bundle), bundle / f"g-{other}")
    manifest["generation"] = other
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    refused(bundle, "another generation than the manifest")
    change_state(bundle, lambda d: d.update(generation=other))
    refused(bundle, "does not belong to this bundle's generation")


def test_a_manifest_that_changes_while_the_bundle_is_read(bundle, monkeypatch):
    from nnx.bundles import reading

    def swap(found):
        data = (bundle / "bundle.json").read_text()
        (bundle / "bundle.json").write_text(data.replace("a", "b", 1).replace("b", "a", 0))
        manifest = json.loads(data)
        manifest["payloads"][STATE]["size"] += 1
        (bundle / "bundle.json").write_text(json.dumps(manifest))

    monkeypatch.setattr(reading, "check_generation", swap)
    with pytest.raises(BundleIntegrityError, match="changed while it was read"):
        validate_bundle(bundle)


@pytest.mark.parametrize("version", [0, 2, "1", True, None])
def test_another_version(bundle, version):
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["version"] = version
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    refused(bundle, "reads version 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "nnx.run-bundle", "format": "nnx.run-bundle"}', "there twice"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply|more than 200 levels"),
        ("[" * 300 + "]" * 300, "more than 200 levels"),
        ('{"format": NaN}', "no JSON number"),
        ("{", "not strict JSON"),
        ("[1]", "not the manifest"),
        ("9" * 10_000, "not strict JSON"),
    ],
    ids=["twice", "deep", "levels", "nan", "cut", "list", "digits"],
)
def test_json_that_is_not_strict(bundle, text, said):
    (bundle / "bundle.json").write_text(text)
    refused(bundle, said)


def test_a_json_bomb_is_not_parsed(bundle):
    path = generation(bundle) / STATE
    path.write_bytes(b"[" + b"[]," * 2_500_000 + b"[]]")
    stated(bundle, STATE)
    tracemalloc.start()
    refused(bundle, r"at most 4000000 are read", readers=(inspect_bundle,))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_json_beyond_the_limit_is_not_read(bundle):
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["payloads"][STATE]["size"] = 1 << 40
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    refused(bundle, "at most 67108864 are read")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_a_header_of_any_length_allocates_nothing(bundle, length):
    path = generation(bundle) / MODEL
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    stated(bundle, MODEL)
    tracemalloc.start()
    refused(bundle, "states a header of")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def overlap(header):
    a, b = header["layers.0.weight"], header["layers.0.bias"]
    size = b["data_offsets"][1] - b["data_offsets"][0]
    b["data_offsets"] = [a["data_offsets"][0], a["data_offsets"][0] + size]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overlap, "overlaps another|leaves a hole"),
        (lambda h: h["layers.0.bias"].update(shape=[7]), "states 32 bytes for"),
        (lambda h: h["layers.0.bias"].update(dtype="PICKLE"), "is not known"),
        (lambda h: h["layers.0.bias"].update(shape=[-8]), "no valid shape"),
        (lambda h: h["layers.0.bias"].update(shape=[1 << 40, 1 << 40]), "more elements"),
        (lambda h: h["layers.0.bias"].update(data_offsets=[0, 1 << 62]), "no valid data_offsets"),
        (lambda h: h["layers.0.bias"].update(code="x"), "exactly dtype, shape"),
        (lambda h: h.update(other=h.pop("layers.0.bias")), "disagree about the tensors"),
        (lambda h: h["__metadata__"].update({"nnx.bundle": "training"}), "does not belong"),
    ],
    ids=["overlap", "shape", "dtype", "negative", "huge", "outside", "key", "name", "part"],
)
def test_a_header_that_cannot_be_true(bundle, change, said):
    change_header(bundle, MODEL, change)
    refused(bundle, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(capability="inference"), "does not fit the capability"),
        (lambda d: d.update(capability="root"), "has the capability"),
        (lambda d: d.update(extra=1), "must hold exactly"),
        (lambda d: d.update(net_state=d["net_state"] * 2), "names something twice"),
        (lambda d: d.update(calibrators=["calibrator-0.json"]), "disagree about"),
        (lambda d: d.update(checkpoint={"$object": "os.system"}), "is not known"),
        (lambda d: d.update(checkpoint={"plain": 1, "two": 2}), "no typed encoding"),
        (lambda d: d["checkpoint"]["$dict"].pop("idp"), "must hold exactly"),
        (lambda d: d.update(source={"run_id": 1, "checkpoint": "x"}), "run and checkpoint"),
        (
            lambda d: d["training_state"]["$dict"].update(scaler={"$tensor": "t0"}),
            "twice",
        ),
        (lambda d: d["training_state"]["$dict"].update(scaler={"$tensor": "t999"}), "disagree"),
    ],
)
def test_a_record_that_cannot_be_true(bundle, change, said):
    change_state(bundle, change)
    refused(bundle, said)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("input_dim", 10**12, "does not describe the weights"),
        ("hidden_dims", str([10**6] * 4), "does not describe the weights|layers"),
        ("hidden_dims", str([8] * 10_000), "asks for 10000 layers"),
        ("output_dim", 4, "does not describe the weights"),
    ],
)
def test_a_configuration_of_other_weights_is_never_built(bundle, field, value, said):
    def change(document):
        document["checkpoint"]["$dict"]["net_params"]["$dict"][field] = value

    change_state(bundle, change)
    tracemalloc.start()
    refused(bundle, said, (BundleReconstructionError, BundleError), readers=(reconstruct_bundle,))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_parameters_that_are_none(bundle):
    def change(document):
        document["checkpoint"]["$dict"]["net_params"]["$dict"]["hidden_dims"] = "__import__('os')"

    change_state(bundle, change)
    refused(bundle, "not a readable checkpoint", readers=(reconstruct_bundle,))


def test_a_training_state_that_is_none(bundle):
    change_state(bundle, lambda d: d["training_state"]["$dict"]["rng"]["$dict"].pop("numpy"))
    refused(bundle, "is not one", readers=(reconstruct_bundle,))


def test_archives_in_place_of_a_folder(bundle, tmp_path):
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.write(bundle / "bundle.json", "bundle.json")
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        archive.add(bundle, "bundle")
    for name in ("b.zip", "b.tar"):
        refused(tmp_path / name, "must be unpacked first", BundleError)
    for name in (STATE, MODEL):
        shutil.copy(tmp_path / "b.zip", generation(bundle) / name)
        stated(bundle, name)
        refused(bundle, "not strict JSON|no safetensors file")


def test_a_pickle_in_place_of_weights_is_not_loaded(bundle):
    import pickle

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    (generation(bundle) / MODEL).write_bytes(pickle.dumps(Evil()))
    stated(bundle, MODEL)
    refused(bundle, "no safetensors file")
    assert not os.path.exists("evil")


# -- a bundle that changes under its reader --------------------------------------------------


def after_header(monkeypatch, change):
    """Do it once, between the look at a header and the look at the bytes."""
    from nnx.bundles import reading

    real, left = reading.check_header, [change]

    def check_header(bundle, name, header):
        real(bundle, name, header)
        if left and name == MODEL:  # files are read side by side: this one is open now
            left.pop()()

    monkeypatch.setattr(reading, "check_header", check_header)


@pytest.mark.parametrize("read", [validate_bundle, reconstruct_bundle])
@pytest.mark.parametrize("how", ["one byte", "cut", "longer", "another file"])
def test_a_payload_that_changes_while_it_is_read(bundle, monkeypatch, read, how):
    path = generation(bundle) / MODEL
    data = bytearray(path.read_bytes())

    def change():
        if how == "one byte":
            data[-1] ^= 1
            with open(path, "r+b") as stream:
                stream.write(data)
        elif how == "cut":
            os.truncate(path, len(data) - 4)
        elif how == "longer":
            with open(path, "ab") as stream:
                stream.write(b"x" * 4)
        else:  # the reader keeps the file that it opened and checked
            path.rename(path.with_name("old"))
            path.write_bytes(b"other")

    after_header(monkeypatch, change)
    if how == "longer":  # what was stated is there, and nothing beyond it is read
        read(bundle)
    elif how == "another file":
        read(bundle)
        monkeypatch.undo()
        refused(bundle, "unlisted|bytes, not the")
    else:
        with pytest.raises(BundleIntegrityError, match="SHA-256|became shorter|changed while"):
            read(bundle)


def test_an_export_while_a_bundle_is_validated(trained, bundle, monkeypatch):
    from nnx.bundles import export_bundle

    folder, run, _ = trained
    before = inspect_bundle(bundle).generation
    after_header(monkeypatch, lambda: export_bundle(run.id, bundle, root=str(folder / "runs")))
    with pytest.raises(BundleIntegrityError, match="changed while it was read: read it again"):
        validate_bundle(bundle)
    assert validate_bundle(bundle).generation != before


def test_an_export_while_a_bundle_is_rebuilt(trained, bundle, monkeypatch):
    """The reader keeps the generation that it began with, which is not removed yet."""
    import torch
    from made_bundles import X
    from nnx.bundles import export_bundle

    folder, run, wanted = trained
    before = inspect_bundle(bundle).generation
    after_header(
        monkeypatch,
        lambda: export_bundle(run.id, bundle, root=str(folder / "runs"), checkpoint="first"),
    )
    rebuilt = reconstruct_bundle(bundle)
    assert (rebuilt.info.generation, rebuilt.info.epoch) == (before, 1)
    assert torch.equal(torch.from_numpy(rebuilt.model.predict(X).logits), wanted)
    assert inspect_bundle(bundle).epoch == 0
