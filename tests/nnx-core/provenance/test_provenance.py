from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.params import NNCheckpointTransform, TaskSpec
from nnx.provenance import (
    ExperimentManifest,
    IdentityRef,
    canonical_bytes,
    compare,
    hash_bytes,
    hash_file,
    load_provenance,
)
from nnx.store import NNRun, RunWriter, read_point
from nnx.utils.jsonlike import freeze


def manifest(**changes):
    fields = {
        "task": {"kind": "categorical", "labels": ["a", "b"]},
        "labels": ["a", "b"],
        "model": {"net": "feed_fwd"},
        "data": {"train": hash_bytes(b"rows")},
        "splits": {"val": "val-2024-06"},
        "objective": {"id": "supervised", "version": 1},
        "config": {"lr": 0.1},
    }
    return ExperimentManifest(**{**fields, **changes})


def test_the_fingerprint_is_the_sha256_of_sorted_utf8_json_with_its_format():
    plan = manifest()
    document = json.loads(plan.canonical_bytes())
    assert document["format"] == "nnx.provenance/1"
    spelled = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert plan.canonical_bytes() == spelled.encode()
    assert plan.fingerprint() == hashlib.sha256(spelled.encode()).hexdigest()
    assert ExperimentManifest.from_state(plan.state()) == plan
    assert ExperimentManifest.from_state(plan.document()).fingerprint() == plan.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"kind": "regression"}},
        {"labels": ["b", "a"]},
        {"splits": {"val": hash_bytes(b"x")}},
        {"objective": {"id": "supervised", "version": 2}},
        {"config": {"lr": 1}},
        {"data": {}},
    ],
)
def test_any_change_of_intent_changes_the_fingerprint(change):
    assert manifest(**change).fingerprint() != manifest().fingerprint()


def test_key_order_does_not_matter_but_number_kinds_do():
    assert manifest(config={"a": 1, "b": 2}) == manifest(config={"b": 2, "a": 1})
    assert manifest(config={"a": 1}) != manifest(config={"a": 1.0})
    assert hash(manifest()) == hash(manifest())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [1, math.nan]}, r"config\.x\[1\] must be finite"),
        ({"x": {1, 2}}, r"config\.x is a set"),
        ({"x": b"raw"}, r"config\.x is a bytes"),
        ({"x": len}, r"config\.x is a callable"),
        ({"x": object()}, r"config\.x is a object"),
        ({3: 1}, "keys must be strings"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_path(value, message):
    with pytest.raises(ValueError, match=message):
        manifest(config=value)


def test_a_manifest_copies_what_it_was_given():
    config = {"steps": [1, 2]}
    plan = manifest(config=config)
    before = plan.fingerprint()
    config["steps"].append(3)
    assert plan.fingerprint() == before
    with pytest.raises(TypeError):
        plan.config["lr"] = 1


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(json_like)
def test_canonical_bytes_are_the_value_and_equal_themselves_after_a_round_trip(value):
    data = canonical_bytes(value)
    again = json.loads(data.decode("utf-8", "surrogatepass"))
    assert canonical_bytes(again) == data


def test_references_are_declared_digest_or_unknown(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    digest = hash_file(tmp_path / "x", chunk_size=2)
    assert digest == hash_bytes(b"abc")
    assert digest.verified
    assert digest.value == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert not IdentityRef.declared("name").verified
    assert IdentityRef.unknown().value is None
    split = SimpleNamespace(digest=lambda: "ab" * 32)
    plan = manifest(splits={"main": split, "other": None})
    assert plan.splits["main"] == IdentityRef("digest", "sha256:" + "ab" * 32)
    assert plan.splits["other"] == IdentityRef.unknown()
    with pytest.raises(ValueError, match=r"data\.x: an identity is"):
        manifest(data={"x": 3})


def test_for_model_records_what_defines_the_experiment_and_nothing_of_the_attempt(parts):
    model = parts.run().model
    model = type(model)(
        net=model.net, device=model.device, loss=model.loss,
        task=TaskSpec.categorical(2, labels=("no", "yes")),
    )  # fmt: skip
    live = SimpleNamespace(params=model, net_params=parts.run().net)
    train = parts.run(5).train
    plan = ExperimentManifest.for_model(live, train=train, preprocessing=SimpleNamespace(
        state=lambda: {"mean": [0.5]}
    ))  # fmt: skip
    assert plan.labels == ("no", "yes")
    assert plan.task["kind"] == "categorical"
    assert plan.model["net_params"]["input_dim"] == 4
    assert plan.config["preprocessing"] == {"mean": (0.5,)}
    assert "n_epochs" not in plan.config["train"]
    assert plan.config["train"]["optim"] == freeze(train.optim.state())
    assert "transforms" not in plan.model
    live.transforms = (NNCheckpointTransform("lora", 1, {"r": 2, "targets": ["layers.0"]}),)
    adapted = ExperimentManifest.for_model(live, train=train, config={"lr": 1})
    assert adapted.model["transforms"][0]["options"]["targets"] == ("layers.0",)
    assert adapted.config["lr"] == 1
    del live.transforms
    longer = ExperimentManifest.for_model(
        live, train=parts.run(50, resume_from_run_id="a" * 32).train,
        preprocessing=SimpleNamespace(state=lambda: {"mean": [0.5]}),
    )  # fmt: skip
    assert longer.fingerprint() == plan.fingerprint()


def fit(parts, salt, *, plan=None, epochs=1, error=None, parent=None):
    run = parts.run(9, salt=salt)
    with RunWriter.open(run, provenance=plan, parent=parent) as writer:
        for epoch in range(epochs):
            writer.append(parts.record(epoch, 1))
            writer.commit_epoch(parts.checkpoint(epoch), parts.state(epoch))
            on_disk = load_provenance(run.id)
            assert plan is None or on_disk.attempt.status == "running"
        if error is not None:
            raise error
        return writer.finish()


def test_an_attempt_is_recorded_from_running_to_completed(parts, root):
    plan = manifest()
    run = fit(parts, "a", plan=plan, epochs=2)
    record = NNRun.load(run.id).provenance
    assert record.fingerprint == plan.fingerprint() == run.provenance.fingerprint
    assert record.manifest == plan
    attempt = record.attempt
    assert (attempt.status, attempt.run_id, attempt.error) == ("completed", run.id, None)
    assert attempt.last_committed == {"tag": "last", "epoch": 1, "generation": 2}
    assert attempt.started_at < attempt.finished_at
    assert run.id == parts.run(9, salt="a").id  # never part of the id
    stored = json.loads(Path(f"runs/{run.id}/attempt.json").read_text())
    assert (stored["status"], stored["attempt_id"]) == ("completed", attempt.attempt_id)


def test_an_attempt_is_read_flat_nested_and_with_keys_of_other_writers(parts, root):
    run = fit(parts, "a", plan=manifest())
    path = Path(f"runs/{run.id}/attempt.json")
    stored = json.loads(path.read_text())
    expected = load_provenance(run.id).attempt
    flat = {key: value for key, value in stored.items() if key != "format"}
    for document in (
        {"format": "nnx.attempt/1", "attempt": flat},
        flat,
        {**flat, "format": "nnx.provenance/1", "host": "elsewhere"},
    ):
        path.write_text(json.dumps(document))
        assert load_provenance(run.id).attempt == expected


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad batch"), "failed"), (KeyboardInterrupt(), "cancelled")]
)
def test_a_fit_that_ends_early_says_how(parts, root, error, status):
    with pytest.raises(type(error)):
        fit(parts, "a", plan=manifest(), epochs=1, error=error)
    attempt = load_provenance(parts.run(9, salt="a").id).attempt
    assert attempt.status == status
    assert attempt.error == {"type": type(error).__name__, "message": str(error)}
    assert attempt.last_committed["epoch"] == 0


def test_an_attempt_that_wrote_nothing_releases_its_reservation(parts, root):
    with pytest.raises(ValueError, match="at once"):
        fit(parts, "a", plan=manifest(), epochs=0, error=ValueError("at once"))
    assert not os.path.exists(f"runs/{parts.run(9, salt='a').id}")


def test_a_failed_first_last_keeps_the_run_with_a_failed_attempt(parts, root, monkeypatch):
    from nnx.utils import files

    class NoFirstLast(files.Disk):
        def replace(self, source, target):
            if str(target).endswith("last.pt"):
                raise OSError(5, "broken")
            super().replace(source, target)

    monkeypatch.setattr(files, "disk", NoFirstLast())
    with pytest.raises(OSError, match="broken"):
        fit(parts, "a", plan=manifest())
    run = NNRun.load(parts.run(9, salt="a").id)
    assert run.idps == []
    assert (run.provenance.attempt.status, run.provenance.attempt.last_committed) == (
        "failed",
        None,
    )


def test_a_failure_to_record_a_failure_does_not_replace_the_error(parts, root, monkeypatch):
    from nnx.provenance import attempts

    real = attempts.write_json

    def write_json(path, document):
        if "failed" in json.dumps(document):
            raise OSError("disk full")
        real(path, document)

    monkeypatch.setattr(attempts, "write_json", write_json)
    with (
        pytest.warns(RuntimeWarning, match="failed attempt could not be recorded: disk full"),
        pytest.raises(ValueError, match="bad batch"),
    ):
        fit(parts, "a", plan=manifest(), error=ValueError("bad batch"))


def test_a_resume_is_a_new_attempt_that_links_its_parent(parts, root):
    first = fit(parts, "a", plan=manifest(), epochs=2)
    before = {p: p.read_bytes() for p in Path(f"runs/{first.id}").glob("*.json")}
    second = fit(parts, "b", plan=manifest(), parent=read_point(first.id, "last"))
    attempt = second.provenance.attempt
    assert attempt.attempt_id != first.provenance.attempt.attempt_id
    assert attempt.parent["attempt_id"] == first.provenance.attempt.attempt_id
    assert (attempt.parent["run_id"], attempt.parent["epoch"]) == (first.id, 1)
    assert attempt.parent["generation"] == 2
    assert {p: p.read_bytes() for p in Path(f"runs/{first.id}").glob("*.json")} == before
    NNRun.load(first.id).save()
    assert {p: p.read_bytes() for p in Path(f"runs/{first.id}").glob("*.json")} == before


@pytest.mark.parametrize("name", ["provenance.json", "attempt.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe", b"null"]
)
def test_unreadable_provenance_is_a_warning_and_the_run_loads(parts, root, name, content):
    run = fit(parts, "a", plan=manifest())
    Path(f"runs/{run.id}/{name}").write_bytes(content)
    with pytest.warns(RuntimeWarning, match=f"{name} is ignored"):
        loaded = NNRun.load(run.id)
    assert len(loaded.idps) == 1
    assert (loaded.provenance is None) == (name == "provenance.json")


def test_a_manifest_that_was_edited_no_longer_matches_its_fingerprint(parts, root):
    run = fit(parts, "a", plan=manifest())
    path = Path(f"runs/{run.id}/provenance.json")
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.warns(RuntimeWarning, match="does not match its fingerprint"):
        assert load_provenance(run.id) is None


# Comparing


def statuses(left, right):
    return {path: field.status for path, field in compare(left, right).by_path().items()}


def test_fields_are_compared_by_path_and_status():
    left = manifest(data={"train": hash_bytes(b"a"), "aux": None}, config={"lr": 1, "k": [1, 2]})
    right = manifest(data={"train": hash_bytes(b"a"), "aux": "x"}, config={"lr": 1.0, "k": [1]})
    found = statuses(left, right)
    assert found["data.train"] == "verified"
    assert found["data.aux"] == "unknown"
    assert found["splits.val"] == "declared"
    assert found["labels[1]"] == "equal"
    assert found["config.lr"] == "different"
    assert (found["config.k[0]"], found["config.k[1]"]) == ("equal", "missing")
    assert found["objective.version"] == "equal"
    result = compare(left, right)
    assert {f.path for f in result.differences} == {"config.lr", "config.k[1]"}
    assert not result.verified_equal
    assert result.by_path()["config.lr"].left == 1


def test_verified_equal_needs_every_field_equal_or_verified():
    sure = manifest(splits={"val": hash_bytes(b"v")})
    assert compare(sure, manifest(splits={"val": hash_bytes(b"v")})).verified_equal
    assert not compare(manifest(), manifest()).verified_equal  # a declared split
    assert statuses(sure, manifest(splits={"val": hash_bytes(b"w")}))["splits.val"] == "different"
    assert statuses(sure, manifest(splits={"val": "name"}))["splits.val"] == "different"


def test_a_side_without_provenance_is_absent_never_equal(parts, root):
    plain, planned = fit(parts, "plain"), fit(parts, "planned", plan=manifest())
    result = compare(plain, planned)
    assert {f.status for f in result.fields} == {"absent"}
    assert not result.verified_equal
    assert not compare(plain, plain).verified_equal
    assert compare(planned.id, planned).by_path()["config.lr"].status == "equal"
    assert compare(planned.id, manifest()).by_path()["config.lr"].status == "equal"
    with pytest.raises(TypeError, match="takes manifests, runs or run ids, not int"):
        compare(3, planned)


def test_comparing_reads_only_provenance_files(parts, root, monkeypatch):
    left, right = (fit(parts, salt, plan=manifest()) for salt in "ab")
    for run in (left, right):
        for path in Path(f"runs/{run.id}").rglob("*"):
            if path.is_file() and path.name not in ("provenance.json", "attempt.json"):
                path.unlink()
    assert compare(left.id, right.id).by_path()["data.train"].status == "verified"
