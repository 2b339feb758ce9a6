"""What a bundle holds, and that a run continues from it as if it had never left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from made_bundles import Calibrator, X, everything, generation, make_model, make_params, patience
from nnx import (
    Checkpoints,
    Devices,
    ModelCheckpoint,
    ModelSpec,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNSchedulerParams,
    Optims,
    Schedulers,
)
from nnx.bundles import (
    BundleCapabilityError,
    BundleError,
    BundleIntegrityError,
    BundleReconstructionError,
    diff_bundles,
    export_bundle,
    inspect_bundle,
    reconstruct_bundle,
    validate_bundle,
)
from nnx.result import Err, Ok, inspect_bundle_result
from nnx.store import ResumePointError
from nnx.utils.weights import fingerprint_of
from safetensors.torch import load_file


def test_an_export_has_the_layout_and_says_what_it_holds(trained):
    folder, run, _ = trained
    info = inspect_bundle(folder / "bundle")
    assert sorted(os.listdir(folder / "bundle")) == ["bundle.json", f"g-{info.generation}"]
    assert sorted(os.listdir(generation(folder / "bundle"))) == [
        "model.safetensors", "state.json", "training.safetensors"
    ]  # fmt: skip
    assert (info.version, info.capability, info.verified) == (1, "resume", False)
    assert (info.source_run_id, info.source_checkpoint, info.epoch) == (run.id, "last", 1)
    assert info.model == "feed_fwd"
    assert info.net_params["hidden_dims"] == "[8]"
    assert info.model_params["task"]["labels"] == ["a", "b", "c"]
    assert info.components["early_stopping"]["version"] == 1
    assert validate_bundle(folder / "bundle").verified
    assert info.size == sum(p.stat().st_size for p in generation(folder / "bundle").iterdir())


def test_the_safetensors_package_opens_every_payload(trained):
    folder, run, _ = trained
    where = generation(folder / "bundle")
    wanted = NNCheckpoint.load(run.id, Checkpoints.LAST, root=str(folder / "runs")).net_state
    found = load_file(where / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    state = json.loads((where / "state.json").read_text())
    assert state["training_state"]["$dict"]["nnx_training_state_version"] == 4
    names = set(load_file(where / "training.safetensors"))
    assert names == {f"t{i}" for i in range(len(names))}


def test_a_rebuilt_model_predicts_bit_for_bit(trained):
    folder, _, wanted = trained
    rebuilt = reconstruct_bundle(folder / "bundle")
    assert torch.equal(torch.from_numpy(rebuilt.model.predict(X).logits), wanted)
    assert (rebuilt.capability, rebuilt.info.verified) == ("resume", True)


def test_rebuilding_moves_no_random_stream(trained):
    folder, _, _ = trained
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    reconstruct_bundle(folder / "bundle")
    assert torch.equal(torch.rand(3), wanted)


STEPS = NNSchedulerParams(
    kind=Schedulers.LINEAR_WARMUP_DECAY, clock="optimizer_update", total_steps=24,
    warmup_steps=4, min_lr=1e-7, factor=0.95, patience=8, cooldown=2, threshold=1e-3,
)  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": NNOptimParams(name=Optims.SGD, max_lr=0.05, momentum=0.9, weight_decay=0.0)},
        {
            "scheduler": STEPS,
            "optim": NNOptimParams(
                name=Optims.ADAMW, max_lr=0.01, momentum=(0.9, 0.99), weight_decay=0.01
            ),
        },
    ],
    ids=["adam-plateau", "sgd", "adamw-updates"],
)
def test_a_resumed_bundle_is_the_uninterrupted_run(settings):
    model = make_model()
    run = model.train(make_params(2, **settings), callbacks=[patience()])
    export_bundle(run.id, "bundle")
    whole = make_model()
    wanted = whole.train(make_params(4, **settings), callbacks=[patience()])
    shutil.rmtree("runs")  # nothing but the bundle is read
    rebuilt = reconstruct_bundle("bundle", components=[patience()])
    found = rebuilt.resume(make_params(2, **settings), callbacks=[patience()])
    assert [r.train_edp for r in found.idps] == [r.train_edp for r in wanted.idps[-8:]]
    assert found.idps[-1].val_edp == wanted.idps[-1].val_edp
    for a, b in zip(rebuilt.model.net.parameters(), whole.net.parameters()):
        assert torch.equal(a, b)
    again = rebuilt.resume(
        make_params(2, overwrite_existing=True, **settings), callbacks=[patience()]
    )
    assert [r.train_edp for r in again.idps] == [r.train_edp for r in found.idps]


def test_another_process_continues_a_killed_run_from_its_bundle(tmp_path):
    """Trained, killed, carried off as a bundle, and continued where no run is."""
    script = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[2])
        from made_bundles import make_model, make_params, patience
        from nnx.bundles import export_bundle, reconstruct_bundle

        if sys.argv[1] == "train":
            class Kill:
                def __call__(self, idps):
                    if idps and idps[-1].epoch_idx == 2:
                        os._exit(9)
            make_model().train(make_params(5), callbacks=[patience(), Kill()])
        elif sys.argv[1] == "export":
            export_bundle(os.listdir("runs")[0], "bundle")
        elif sys.argv[1] == "resume":
            run = reconstruct_bundle("bundle").resume(make_params(3), callbacks=[patience()])
            print(run.idps[-1].train_edp.loss.hex())
        else:
            run = make_model().train(make_params(5), callbacks=[patience()])
            print(run.idps[-1].train_edp.loss.hex())
        """
    )

    def process(what, folder):
        done = subprocess.run(
            [sys.executable, "-c", script, what, os.path.dirname(__file__)],
            cwd=folder, capture_output=True, text=True, timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1"},
        )  # fmt: skip
        return done.returncode, done.stdout.split()[-1:]

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    assert process("train", here)[0] == 9
    assert process("export", here)[0] == 0
    shutil.move(here / "bundle", there / "bundle")
    assert process("resume", there) == process("whole", tmp_path)


def test_lineage_is_recorded_without_the_run():
    from nnx.provenance import ExperimentManifest

    run = make_model().train(make_params(2))
    info = export_bundle(run.id, "bundle")
    shutil.rmtree("runs")
    rebuilt = reconstruct_bundle("bundle")
    name = f"bundle-{info.generation[:16]}_e1"
    assert rebuilt.resume_checkpoint == name
    manifest = ExperimentManifest.for_model(rebuilt.model)
    found = rebuilt.resume(make_params(1), provenance=manifest)
    train = found.state()["train"]
    assert (train["parent_run_id"], train["parent_checkpoint"]) == (run.id, name)
    parent = found.provenance.attempt.parent
    assert (parent["run_id"], parent["epoch"], parent["generation"]) == (run.id, 1, info.generation)
    assert found.resume_status.source_checkpoint == name


def test_a_snapshot_is_an_inference_bundle():
    run = make_model().train(make_params(2), callbacks=[ModelCheckpoint(epochs=[1], tag="snap")])
    stem = next(n[:-3] for n in os.listdir(f"runs/{run.id}/checkpoints") if n.startswith("snap"))
    info = export_bundle(run.id, "bundle", checkpoint=stem)
    assert (info.capability, info.source_checkpoint) == ("inference", stem)
    assert "training.safetensors" not in info.payloads
    rebuilt = reconstruct_bundle("bundle")
    with pytest.raises(BundleCapabilityError, match="inference bundle"):
        rebuilt.resume(make_params(1))


def test_best_and_phase_checkpoints_can_be_exported():
    run = make_model().train(make_params(3))
    for tag in ("best", "first", Checkpoints.LAST):
        assert export_bundle(run.id, "bundle", checkpoint=tag).capability == "resume"


def test_what_a_bundle_resumes_is_its_own_run(trained):
    rebuilt = reconstruct_bundle(trained[0] / "bundle")
    with pytest.raises(ValueError, match="another run to resume from"):
        rebuilt.resume(make_params(1, resume_from_run_id="0" * 32))
    with pytest.raises(ValueError, match="optimizer"):
        rebuilt.resume(
            make_params(
                1, optim=NNOptimParams(name=Optims.SGD, max_lr=0.1, momentum=0.9, weight_decay=0.0)
            )
        )
    assert not os.path.exists("runs")


# -- registered modules ------------------------------------------------------------------


def encoder(config):
    return torch.nn.Sequential(
        torch.nn.Linear(6, config["width"]), torch.nn.Linear(config["width"], 3)
    )


@pytest.fixture
def registered(monkeypatch):
    from nnx import register_model_factory, unregister_model_factory

    register_model_factory("test.travel", 1, encoder)
    params = NNModelParams(net=ModelSpec("test.travel", 1, config={"width": 4}))
    run = NNModel(params=params).train(make_params(1))
    export_bundle(run.id, "bundle")
    unregister_model_factory("test.travel", 1)
    return run


def test_a_registered_module_is_rebuilt_from_the_factories_given(registered):
    with pytest.raises(
        BundleReconstructionError, match=r"no model factory test.travel@v1"
    ) as caught:
        reconstruct_bundle("bundle")
    assert len(caught.value.problems) == 1
    calls = []

    def factory(config):
        calls.append(dict(config))
        return encoder(config)

    rebuilt = reconstruct_bundle("bundle", factories={("test.travel", 1): factory})
    assert calls == [{"width": 4}]
    assert inspect_bundle("bundle").model == "test.travel@v1"
    assert rebuilt.resume(make_params(1)).idps


def test_given_factories_are_the_only_ones(registered):
    from nnx import register_model_factory, unregister_model_factory

    register_model_factory("test.travel", 1, encoder)
    try:
        reconstruct_bundle("bundle")
        with pytest.raises(BundleReconstructionError, match="there are: none"):
            reconstruct_bundle("bundle", factories={})
    finally:
        unregister_model_factory("test.travel", 1)


def test_a_factory_that_builds_another_module_is_refused(registered):
    def other(config):
        return torch.nn.Linear(6, 3)

    with pytest.raises(BundleReconstructionError, match="does not build"):
        reconstruct_bundle("bundle", factories={("test.travel", 1): other})


def test_every_missing_part_is_named_at_once(registered, monkeypatch):
    class Counter:
        def component_spec(self):
            from nnx import ComponentSpec

            return ComponentSpec(name="counter", version=1, required=True)

        def component_state(self):
            return {}

        def load_component_state(self, state, *, version):
            raise AssertionError("nothing is loaded")

    from made_bundles import change_state

    def saved(document):
        document["checkpoint"]["$dict"]["model_params"]["$dict"]["device"] = "cuda"
        components = document["training_state"]["$dict"]["components"]["$dict"]
        components["other"] = {"$dict": {"version": 1, "required": True, "state": {"$dict": {}}}}

    change_state(Path("bundle"), saved)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BundleReconstructionError) as caught:
        reconstruct_bundle("bundle", components=[Counter()])
    assert len(caught.value.problems) == 4
    assert "device=Devices.CPU" in str(caught.value)
    rebuilt = reconstruct_bundle(
        "bundle", factories={("test.travel", 1): encoder}, device=Devices.CPU
    )
    assert rebuilt.model.device.type == "cpu"


# -- calibrators ---------------------------------------------------------------------------


def test_calibrators_travel_and_are_bound_to_the_weights(trained):
    folder, run, _ = trained
    root = str(folder / "runs")
    weights = NNCheckpoint.load(run.id, Checkpoints.LAST, root=root).net_state
    bound = Calibrator(model_id=fingerprint_of(weights))
    info = export_bundle(run.id, "b", root=root, calibrators=[Calibrator(), bound])
    assert [c["file"] for c in info.calibrators] == ["calibrator-0.json", "calibrator-1.json"]
    assert validate_bundle("b").calibrators[1]["model_id"] == bound.record["model_id"]
    assert len(reconstruct_bundle("b").calibrators) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_id": "sha256:" + "0" * 64}, "was fitted for the weights"),
        ({"labels": ["a", "c", "b"]}, "is for the classes"),
        ({"labels": ["a", "b"]}, "for 2 classes, the model has 3"),
        ({"labels": ["a", "a", "b"]}, "distinct labels"),
        ({"temperature": 0.0}, "no positive temperature"),
        ({"format": "other/1"}, "not the record of a calibrator"),
        ({"model_id": ""}, "names no model"),
    ],
)
def test_a_calibrator_of_something_else_is_refused_and_nothing_is_left(trained, changes, said):
    folder, run, _ = trained
    with pytest.raises(BundleError, match=said):
        export_bundle(run.id, "b", root=str(folder / "runs"), calibrators=[Calibrator(**changes)])
    assert not os.path.exists("b")


def test_what_is_no_calibrator_is_refused(trained):
    folder, run, _ = trained
    with pytest.raises(TypeError, match=r"calibrators\[0\]"):
        export_bundle(run.id, "b", root=str(folder / "runs"), calibrators=["mine"])


# -- publication ---------------------------------------------------------------------------


def test_an_export_replaces_the_bundle_and_keeps_the_previous_generation(trained):
    folder, run, _ = trained
    root = str(folder / "runs")
    generations = [export_bundle(run.id, "b", root=root).generation for _ in range(3)]
    assert sorted(n for n in os.listdir("b") if n.startswith("g-")) == sorted(
        f"g-{g}" for g in generations[1:]
    )
    assert validate_bundle("b").generation == generations[2]


def test_an_interrupted_export_leaves_the_previous_bundle(trained, monkeypatch):
    from nnx.utils import files

    folder, run, _ = trained
    root = str(folder / "runs")
    first = export_bundle(run.id, "b", root=root)
    before = everything(Path("b"))
    operations = ("create", "write", "flush", "replace", "mkdir", "flush_directory")
    for operation in operations:

        class Failing(files.Disk):
            def fail(self, *args, **kwargs):
                raise OSError(28, "No space left on device")

        setattr(Failing, operation, Failing.fail)
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", Failing())
            with pytest.raises(OSError, match="No space"):
                export_bundle(run.id, "b", root=root)
        assert everything(Path("b")) == before, operation
        assert validate_bundle("b").generation == first.generation


@pytest.mark.parametrize("name", ["notes.txt", "run.yaml", ".git"])
def test_a_folder_with_something_else_is_left_alone(trained, name):
    folder, run, _ = trained
    os.makedirs("mine")
    with open(f"mine/{name}", "w") as stream:
        stream.write("mine")
    with pytest.raises(BundleError, match="neither empty nor a bundle"):
        export_bundle(run.id, "mine", root=str(folder / "runs"))
    assert os.listdir("mine") == [name]


def test_a_strange_manifest_is_left_alone(trained):
    folder, run, _ = trained
    os.makedirs("mine")
    with open("mine/bundle.json", "w") as stream:
        stream.write("{}")
    with pytest.raises(BundleError, match="left alone"):
        export_bundle(run.id, "mine", root=str(folder / "runs"))
    assert Path("mine/bundle.json").read_text() == "{}"


def test_an_unknown_run_or_checkpoint_makes_no_folder(trained):
    folder, run, _ = trained
    root = str(folder / "runs")
    with pytest.raises(FileNotFoundError):
        export_bundle("0" * 32, "b", root=root)
    with pytest.raises(FileNotFoundError):
        export_bundle(run.id, "b", checkpoint="q7", root=root)
    assert not os.path.exists("b")


def test_a_runtime_module_has_no_bundle():
    module = torch.nn.Linear(6, 3)
    run = NNModel(params=NNModelParams(), module=module).train(make_params(1))
    with pytest.raises(BundleCapabilityError, match="runtime-only"):
        export_bundle(run.id, "b")
    assert not os.path.exists("b")


class Remembers:
    """A component whose state a checkpoint holds and a bundle does not."""

    def component_spec(self):
        from nnx import ComponentSpec

        return ComponentSpec(name="memory", version=1)

    def component_state(self):
        return {"seen": {(1, 2): 3.0}}

    def load_component_state(self, state, *, version):
        pass


def test_state_that_a_bundle_has_no_form_for_is_named():
    run = make_model().train(make_params(1), components=[Remembers()])
    with pytest.raises(BundleError, match=r"components.*memory.*seen.*keys of tuple"):
        export_bundle(run.id, "b")
    assert not os.path.exists("b")


# -- other readers -------------------------------------------------------------------------


def test_no_reader_opens_the_files_of_another(trained):
    folder, run, _ = trained
    where = generation(folder / "bundle")
    with pytest.raises(ResumePointError, match="directory"):
        NNCheckpoint.from_file(str(folder / "bundle"))
    for name in ("model.safetensors", "training.safetensors", "state.json"):
        with pytest.raises(ResumePointError):
            NNCheckpoint.from_file(str(where / name))
    last = folder / "runs" / run.id / "checkpoints" / "last.pt"
    for path, said in (
        (folder / "runs" / run.id, "is no bundle but a run"),
        (last, "is a file"),
        (folder, "it has no bundle.json"),
        (folder / "nowhere", "there is no bundle"),
    ):
        with pytest.raises(BundleError, match=said):
            inspect_bundle(path)


def test_an_inspection_as_a_value(trained):
    folder, _, _ = trained
    assert isinstance(inspect_bundle_result(folder / "bundle"), Ok)
    missing = inspect_bundle_result(folder / "nowhere")
    assert isinstance(missing, Err)
    assert missing.error.code == "artifact_missing"
    invalid = inspect_bundle_result(folder)
    assert isinstance(invalid, Err)
    assert (invalid.error.code, invalid.error.where) == ("bundle_invalid", "inspect_bundle")
    assert isinstance(invalid.error.cause, BundleError)


def test_inspecting_and_validating_load_no_torch(trained):
    code = (
        "import sys; from nnx.bundles import inspect_bundle, validate_bundle\n"
        "inspect_bundle(sys.argv[1]); validate_bundle(sys.argv[1]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained[0] / "bundle")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr


def test_two_bundles_are_told_apart(trained):
    folder, run, _ = trained
    root = str(folder / "runs")
    export_bundle(run.id, "a", root=root)
    export_bundle(run.id, "b", root=root)
    assert diff_bundles("a", "b") == {}
    export_bundle(run.id, "b", root=root, checkpoint="first")
    found = diff_bundles("a", "b")
    assert found["epoch"] == (1, 0)
    assert {"source_checkpoint", "weights", "training_state"} <= found.keys()


def test_an_excluded_submodule_is_left_out_and_does_not_resume():
    class Attach:
        def __call__(self, idps):
            pass

    model = make_model()
    model.net.helper = torch.nn.Linear(2, 2)
    run = model.train(make_params(1))
    export_bundle(run.id, "b")
    with pytest.raises(BundleReconstructionError, match="exclude_submodules"):
        reconstruct_bundle("b")
    rebuilt = reconstruct_bundle("b", exclude_submodules=("helper",))
    assert not hasattr(rebuilt.model.net, "helper")
    with pytest.raises(BundleCapabilityError, match="without helper"):
        rebuilt.resume(make_params(1))
    with pytest.raises(BundleReconstructionError, match="does not hold"):
        reconstruct_bundle("b", exclude_submodules=("nothing",))


def test_integrity_errors_are_bundle_errors():
    assert issubclass(BundleIntegrityError, BundleError)
    assert issubclass(BundleError, ValueError)


def test_a_bundle_of_several_optimizers_serves_and_does_not_resume():
    from nnx import NNTrainerParams, Trainer
    from nnx.objectives import supervised_objective

    optim = NNOptimParams(name=Optims.SGD, max_lr=0.05, momentum=0.9, weight_decay=0.0)
    given = {n: getattr(make_params(1), n) for n in ("train_loader", "val_loader", "seed")}
    params = NNTrainerParams(n_epochs=1, optims={"all": optim}, **given)
    model = make_model()
    run = Trainer(model).train(params, objective=supervised_objective())
    assert export_bundle(run.id, "b").capability == "resume"
    rebuilt = reconstruct_bundle("b")
    assert np.array_equal(rebuilt.model.predict(X).logits, model.predict(X).logits)
    before = os.listdir("runs")
    with pytest.raises(BundleCapabilityError, match="Trainer's run"):
        rebuilt.resume(make_params(1))
    assert os.listdir("runs") == before


def test_module_state_that_is_no_tensor_is_refused():
    from nnx import register_model_factory, unregister_model_factory

    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    register_model_factory("test.extra", 1, lambda config: Extra(6, 3))
    try:
        run = NNModel(params=NNModelParams(net=ModelSpec("test.extra", 1))).train(make_params(1))
        with pytest.raises(BundleError, match=r"_extra_state.* is a dict, not a tensor"):
            export_bundle(run.id, "b")
        assert not os.path.exists("b")
    finally:
        unregister_model_factory("test.extra", 1)


def test_an_unknown_transform_is_named_by_index_and_id(trained, monkeypatch):
    from nnx import NNCheckpointTransform
    from nnx.bundles import export

    folder, run, _ = trained
    known = export._check_checkpoint

    def changed(checkpoint):
        import dataclasses

        unknown = NNCheckpointTransform(name="acme.prune", version=3, options={})
        known(dataclasses.replace(checkpoint, transforms=(unknown,)))

    monkeypatch.setattr(export, "_check_checkpoint", changed)
    with pytest.raises(BundleError, match=r"transform 0, 'acme.prune' of version 3"):
        export_bundle(run.id, "b", root=str(folder / "runs"))
    assert not os.path.exists("b")


def test_a_legacy_pickle_beside_a_bundle_is_never_opened(bundle):
    """Neither reader looks at anything but the bundle's own files, or calls a factory."""
    code = (
        "import builtins, sys, pickle\n"
        "real = builtins.open\n"
        "def no(*a, **k): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = no\n"
        "from nnx.bundles import inspect_bundle, validate_bundle\n"
        "inspect_bundle(sys.argv[1]); validate_bundle(sys.argv[1]); print('read')"
    )
    (bundle.parent / "last.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch evil'\ntR.")
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "read", done.stderr
    assert not os.path.exists("evil")


def test_an_export_beside_another_is_refused(trained):
    import fcntl

    folder, run, _ = trained
    root = str(folder / "runs")
    export_bundle(run.id, "b", root=root)
    held = os.open("b", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BundleError, match="another process is exporting"):
            export_bundle(run.id, "b", root=root)
    finally:
        os.close(held)
    export_bundle(run.id, "b", root=root)


def test_a_reader_that_began_before_an_export_finishes(trained):
    from nnx.bundles.reading import check_generation, read_bundle

    folder, run, _ = trained
    root = str(folder / "runs")
    export_bundle(run.id, "b", root=root)
    began = read_bundle("b")
    export_bundle(run.id, "b", root=root)
    check_generation(began)  # its generation is there until the next but one


def test_a_calibrator_that_was_exchanged_later_is_refused_by_every_validation(trained):
    from made_bundles import stated

    folder, run, _ = trained
    root = str(folder / "runs")
    weights = NNCheckpoint.load(run.id, Checkpoints.LAST, root=root).net_state
    export_bundle(
        run.id, "b", root=root, calibrators=[Calibrator(model_id=fingerprint_of(weights))]
    )
    path = generation(Path("b")) / "calibrator-0.json"
    record = json.loads(path.read_text())
    for changes, said in (
        ({"model_id": "sha256:" + "1" * 64}, "was fitted for the weights"),
        ({"labels": ["a", "c", "b"]}, "is for the classes"),
        ({"labels": ["a", "b"]}, "for 2 classes"),
        ({"temperature": -1}, "no positive temperature"),
    ):
        path.write_text(json.dumps({**record, **changes}))
        stated(Path("b"), "calibrator-0.json")
        for read in (validate_bundle, reconstruct_bundle):
            with pytest.raises(BundleIntegrityError, match=said):
                read("b")


def test_a_batch_adapter_is_given_again_since_it_is_not_stored():
    from nnx import register_model_factory, unregister_model_factory
    from nnx.models import BatchAdapter

    class Rows(BatchAdapter):
        def split(self, batch):
            return (batch["x"],), {}, batch["y"]

    register_model_factory("test.rows", 1, encoder)
    try:
        spec = ModelSpec("test.rows", 1, config={"width": 4})
        rows = [{"x": X[i : i + 10], "y": torch.zeros(10, dtype=torch.long)} for i in (0, 10)]
        changes = {"train_loader": rows, "val_loader": rows}
        model = NNModel(params=NNModelParams(net=spec), batch_adapter=Rows())
        export_bundle(model.train(make_params(1, **changes)).id, "b")
        rebuilt = reconstruct_bundle("b", batch_adapter=Rows())
        assert rebuilt.resume(make_params(1, **changes)).idps[-1].epoch_idx == 1
        assert "Rows" not in (generation(Path("b")) / "state.json").read_text()
    finally:
        unregister_model_factory("test.rows", 1)


def test_a_model_in_the_layout_of_the_hub_is_no_bundle(tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    for read in (inspect_bundle, validate_bundle, reconstruct_bundle):
        with pytest.raises(BundleError, match=r"load it with NNModel.from_pretrained"):
            read(tmp_path / "hub")
