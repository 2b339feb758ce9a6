"""Sharded training in two and three real processes, against one."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import WORKER, close, environment, free_port, results, torchrun  # isort: skip
import fsdp_worker
import torch
import worker
from nnx import Checkpoints, NNCheckpoint, NNModel
from nnx.distributed import FSDP, gather_checkpoint
from nnx.distributed.sharding import check_torch
from nnx.store import NNRun, ResumePointError, lease
from nnx.store.cleanup import collect
from nnx.store.paths import RunPaths
from torch.utils.data import DataLoader

try:
    check_torch()
except RuntimeError as error:  # the refusal names what this torch lacks
    pytest.skip(str(error), allow_module_level=True)

FSDP_WORKER = WORKER.with_name("fsdp_worker.py")


def run(folder, scenario, world, args=None, **options):
    Path(folder).mkdir(exist_ok=True)
    return torchrun(folder, scenario, world, args, worker=FSDP_WORKER, timeout=280, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def single(folder):
    """The same trainings in this process, without ``distributed=``."""
    with pytest.MonkeyPatch.context() as patch:
        (folder / "single").mkdir()
        patch.chdir(folder / "single")
        patch.setattr(worker, "WORLD", 1)
        patch.setattr(fsdp_worker, "SPEC", None)
        return {**fsdp_worker.equal({}), "whole": fsdp_worker.whole()}


@pytest.fixture(scope="module")
def two(folder):
    """What two processes found in every scenario: processes are slow to start."""
    return run(
        folder / "several", "several", 2, {"of": ["equal", "sharded", "resume", "begun", "crossed"]}
    )


@pytest.fixture(scope="module")
def three(folder, two):
    """Three processes, which also go on with a run of the two."""
    args = {"of": ["equal", "begun", "continued"], "run": two[0]["begun"]["run"], "salt": "2to3"}
    return run(folder / "several", "several", 3, args)


@pytest.fixture(scope="module")
def by_world(two, three):
    return {2: [found["equal"] for found in two], 3: [found["equal"] for found in three]}


BY_THREE = ["plain", "accumulated", "masked", "monitored", "clipped", "sparse", "terms", "narrow"]
BY_TWO = [
    *BY_THREE,
    "objective",
    "function",
    "sgd",
    "plateau",
    "journal",
    "tied",
    "uneven",
    "tiny",
    "evaluator",
    "frozen",
]
BY_TWO += ["container", "outside"]  # a ParameterList; a weight that its layer does not use


@pytest.mark.parametrize(
    ("world", "case"), [*((2, c) for c in BY_TWO), *((3, c) for c in BY_THREE)]
)
def test_every_update_is_the_one_of_a_single_process(single, by_world, case, world):
    one, several = single[case], by_world[world][0][case]
    if case == "function":  # its shares' F1 have no mean
        several = {**several, "f1": one["f1"]}
    if case == "tied":  # its class is of the processes' main module
        several = {**several, "id": one["id"]}
    if case == "terms":  # a batch's record is a mean of its shares'; the update is not
        several = {**several, **{k: one[k] for k in ("loss", "accuracy", "f1")}}
    close(one, several)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_agree_exactly(by_world, world):
    first, *others = by_world[world]
    for other in others:
        assert other == first


@pytest.mark.parametrize("world", [2, 3])
def test_a_process_without_a_row_of_a_parameter_takes_part(by_world, folder, world):
    found = by_world[world][0]["narrow"]
    runs = str(folder / "several" / f"equal-{world}" / "runs")
    state = NNCheckpoint.load(found["id"], "last", root=runs).net_state
    assert [t.double().flatten().tolist() for t in state.values()] == found["weights"]


def test_bf16_agrees_within_its_tolerance(single, by_world):
    close(single["bf16"]["loss"], by_world[2][0]["bf16"]["loss"], tolerance=2e-2)


def test_the_blocks_make_no_difference_to_the_result(by_world):
    close(by_world[2][0]["plain"]["loss"], by_world[2][0]["root"]["loss"])


# What each process holds, and what is left of it ------------------------------------------------


@pytest.fixture(scope="module")
def sharded(two):
    return [found["sharded"] for found in two]


def test_each_process_holds_a_part_of_parameters_gradients_and_optimizer_state(sharded):
    one, two = sharded
    for name, (whole, part) in one["parameters"].items():
        assert part[0] + two["parameters"][name][1][0] == whole[0]
        assert part[0] == -(-whole[0] // 2)
    for found in sharded:
        parts = [part for _, part in found["parameters"].values()]
        assert found["moments"] == parts
        assert found["gradients"] == parts


def test_the_model_is_an_ordinary_one_again(sharded, by_world):
    one, two = sharded
    for found in sharded:
        assert found["same_net"]
        assert found["same_kinds"]
        assert found["same_attributes"]
        assert found["same_parameters"]
        assert found["hooks"] == []
        assert found["pickled"]
    assert one["predicted"] == two["predicted"]
    assert one["weights"] == by_world[2][0]["plain"]["weights"]
    assert len(one["again"]) == 14  # and can be sharded again


def test_the_run_is_listed_verified_and_loaded_like_any_other(sharded, folder):
    runs = str(folder / "several" / "sharded-2" / "runs")
    found = sharded[0]
    stored = NNRun.load(found["id"], root=runs)
    assert [r.train_edp.loss for r in stored.idps] == found["loss"]
    assert {r.id for r in NNRun.all(root=runs)} >= {found["id"]}
    for tag in ("last", "best", "first", "snap_e1"):
        manifest = NNCheckpoint.verify(found["id"], tag, root=runs)
        names = [name for name in manifest["files"] if ".dcp/" in name]
        assert sorted(n.rpartition("/")[2] for n in names) == [
            "0.safetensors", "1.safetensors", "shards.json",
        ]  # fmt: skip
        checkpoint = NNCheckpoint.load(found["id"], tag, root=runs)
        assert all(type(t) is torch.Tensor for t in checkpoint.net_state.values())
    model = NNModel.from_checkpoint(NNCheckpoint.load(found["id"], "last", root=runs))
    rows = worker.data(5).tensors[0]
    assert model.predict(rows).logits.tolist() == found["predicted"]
    weights = [p.double().flatten().tolist() for p in model.net.state_dict().values()]
    assert weights == found["weights"]


def test_a_checkpoint_of_a_callback_has_the_weights_that_it_saw(sharded, folder):
    runs = str(folder / "several" / "sharded-2" / "runs")
    id = sharded[0]["doubled"]

    def weights(tag):
        NNCheckpoint.verify(id, tag, root=runs)
        return NNCheckpoint.load(id, tag, root=runs).net_state

    last = weights("last")
    assert all(torch.equal(last[k], 2 * t) for k, t in weights("then_e1").items())
    first = weights("first")
    assert all(torch.equal(first[k], 2 * t) for k, t in weights("then_e0").items())
    # Nothing of a checkpoint that is written by itself stays behind under LAST.
    assert len(os.listdir(os.path.join(runs, id, "checkpoints", "last.dcp"))) == 1


# Resuming ---------------------------------------------------------------------------------------


def test_a_split_run_equals_the_whole_one_bit_for_bit(two):
    for found in (rank["resume"] for rank in two):
        whole, rest = found["whole"], found["rest"]
        assert rest["weights"] == whole["weights"]
        assert rest["loss"] == whole["loss"][-len(rest["loss"]) :]
        assert rest["val"] == whole["val"][2:]
        assert found["status"] == "stateful"
        assert "data plan" in found["other"]


def test_a_run_goes_on_in_more_and_in_fewer_processes(single, folder, three):
    """Without dropout nothing is drawn, so the rest is the one of a single process."""
    args = {"of": ["continued"], "run": three[0]["begun"]["run"], "salt": "3to2"}
    fewer = run(folder / "several", "several", 2, args)
    for found in (*three, *fewer):
        close(found["continued"]["weights"], single["whole"]["weights"])
        close(found["continued"]["loss"], single["whole"]["loss"][14:])
        close(found["continued"]["val"], single["whole"]["val"][2:])


def test_replicas_go_on_with_shards_and_shards_with_replicas(single, two):
    for found in two:
        for name in ("DDP", "FSDP"):
            close(found["crossed"][name]["weights"], single["whole"]["weights"])
            close(found["crossed"][name]["loss"], single["whole"]["loss"][14:])


def test_one_process_goes_on_with_the_gathered_checkpoint(single, two, folder, monkeypatch):
    begun = two[0]["begun"]["run"]
    monkeypatch.chdir(folder / "several" / "shared")
    monkeypatch.setattr(worker, "WORLD", 1)
    given = worker.replace(
        worker.params(n_epochs=4), resume_from_run_id=begun, resume_mode="stateful",
        resume_epochs="planned", val_loader=DataLoader(worker.data(53, seed=1), 16),
    )  # fmt: skip
    with pytest.raises(ValueError, match="nnx.distributed.gather_checkpoint"):
        worker.model().train(given, salt="refused")
    sharded = NNCheckpoint.load_with_training_state(begun, Checkpoints.LAST)
    path = gather_checkpoint(begun, to="gathered")
    assert path.endswith("gathered.pt")
    resumed = worker.replace(given, resume_from_checkpoint="gathered")
    trained = worker.model(seed=9)
    found = worker.summary(trained.train(resumed, salt="gathered"), trained)
    close(found["weights"], single["whole"]["weights"])
    close(found["loss"], single["whole"]["loss"][14:])

    assert gather_checkpoint(begun).endswith("last.pt")  # in place
    assert not (Path("runs") / begun / "checkpoints" / "last.dcp").exists()
    plain = NNCheckpoint.load_with_training_state(begun, Checkpoints.LAST)
    for one, two in zip(sharded, plain):
        one, two = (c.net_state if hasattr(c, "net_state") else c for c in (one, two))
        same(one, two)
    NNCheckpoint.verify(begun, Checkpoints.LAST)
    model = NNModel.from_checkpoint(NNCheckpoint.from_file(path))
    assert model.predict(worker.data(3).tensors[0]).logits.shape == (3, 3)


def test_gathering_leaves_an_ordinary_point_alone(single, folder):
    """Losing nothing, and saying what is not there."""
    root, run_id = str(folder / "single" / "runs"), single["plain"]["id"]
    before = NNCheckpoint.verify(run_id, "last", root=root)
    path = Path(gather_checkpoint(run_id, root=root))
    assert path == Path(root) / run_id / "checkpoints" / "last.pt"
    assert NNCheckpoint.verify(run_id, "last", root=root) == before
    gather_checkpoint(run_id, Checkpoints.BEST, to="copied", root=root)
    one, two = (
        NNCheckpoint.load_with_training_state(run_id, tag, root) for tag in ("best", "copied")
    )
    same(one[0].net_state, two[0].net_state)
    same(one[1], two[1])
    with pytest.raises(FileNotFoundError, match="no run 'unknown'"):
        gather_checkpoint("unknown", root=root)
    with pytest.raises(FileNotFoundError, match="written: best, copied, first, last"):
        gather_checkpoint(run_id, "q3", root=root)
    with lease.lease(RunPaths(root, run_id)):
        call = f"from nnx.distributed import *; gather_checkpoint({run_id!r}, root={root!r})"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert "RunBusyError" in done.stderr
    assert f"run {run_id} in" in done.stderr


@pytest.mark.parametrize("blocks", ["layers.*", (1,), ("",)])
def test_blocks_are_names(blocks):
    with pytest.raises(ValueError, match="names or patterns of submodules"):
        FSDP(blocks=blocks)
    with pytest.raises(ValueError, match="FSDP.writer_rank"):
        FSDP(writer_rank=-1)


def same(one, two):
    if isinstance(one, dict):
        for key in set(one) & set(two) - {"generation", "checkpoint_id"}:
            same(one[key], two[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, two, strict=True):
            same(a, b)
    else:
        assert one == two


# Failures ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(folder):
    return run(folder / "failed", "failures", 2)


def test_a_refusal_changes_nothing(failed):
    for found in failed:
        assert "'nothing.*' matches no submodule" in found["pattern"]
        assert "nnx.distributed.train_loader" in found["plain"]
        assert "checkpoint_every" in found["checkpoint_every"]
        assert "the parameter odd: it is a scalar" in found["scalar"]
        assert "the parameter odd: it is empty" in found["empty"]
        assert "the parameter odd: it is not contiguous" in found["strided"]
        assert "FSDP(blocks=())" in found["outside"]
        assert found["refused_changes_nothing"]
        assert found["left"] == []


def test_a_failure_in_one_process_ends_all_with_one_message_and_a_whole_model(failed, folder):
    one, two = failed
    assert all(one[name] == two[name] for name in ("weights", "alone", "after"))
    assert "1 of 2 processes failed" in one["data"]
    assert "rank 1: OSError: the disk is gone" in one["data"]
    assert two["data"] == "own OSError: the disk is gone"
    assert "rank 1: BatchError: epoch 0, batch 0: row 0 has the class 7" in one["loss"]
    assert two["loss"].startswith("own BatchError")
    for name in ("inside", "inside_first"):
        assert one[name].endswith("\n  rank 1: ArithmeticError: not these rows")
        assert two[name] == "own ArithmeticError: not these rows"
    assert "trains with other blocks" in one["blocks"]
    assert "rank 0: it is about to run the network" in one["alone"]
    assert "no space left on this disk" in one["full"]
    assert "no space left on this disk" in two["full"]
    assert len(one["after"]) == 14  # and it trains again


def test_a_checkpoint_that_one_process_could_not_write_leaves_the_one_before(failed, folder):
    runs = folder / "failed" / "runs"
    stopped = [r for r in NNRun.all(root=str(runs)) if r.salt == "full"]
    assert len(stopped[0].idps) == 7
    assert (
        NNCheckpoint.verify(stopped[0].id, "last", root=str(runs))["position"]["completed_epoch"]
        == 0
    )
    assert len(list((runs / stopped[0].id / "checkpoints" / "last.dcp").iterdir())) == 1


def test_a_process_killed_while_writing_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Started without torchrun, which would end the others itself."""
    codes = by_hand(tmp_path, "killed", 2)
    assert codes[1] == -signal.SIGKILL
    (found,) = (r for r in results(tmp_path, "killed", 2) if r is not None)
    assert "lost contact with another process" in found["error"]
    monkeypatch.chdir(tmp_path)
    (stopped,) = NNRun.all()
    assert len(stopped.idps) == 7
    assert NNCheckpoint.verify(stopped.id, "last")["position"]["completed_epoch"] == 0
    shards = Path("runs") / stopped.id / "checkpoints" / "last.dcp"
    collect()
    assert len(list(shards.iterdir())) == 1
    assert NNCheckpoint.verify(stopped.id, "last")["position"]["completed_epoch"] == 0
    gather_checkpoint(stopped.id)
    assert not shards.exists()
    assert collect() == []


def test_a_process_that_stops_answering_ends_the_job_within_the_timeout(tmp_path):
    by_hand(tmp_path, "stopped", 3, wait_for=2)
    for found in results(tmp_path, "stopped", 3)[:-1]:
        assert "lost contact with another process" in found["error"]
        assert found["seconds"] < 40


def by_hand(folder, scenario, world, *, wait_for=None):
    """The exit status of each process; those that outlive a killed one end themselves."""
    port = free_port()
    processes = []
    for rank in range(world):
        env = {
            **environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, str(FSDP_WORKER), scenario, str(folder), '{"timeout": 5}']
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.DEVNULL))
    try:
        return [process.wait(90) for process in processes[:wait_for]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["shards.json", "0.safetensors", ".metadata"])
def test_a_hostile_pickle_never_executes(two, folder, tmp_path, name):
    source = folder / "several" / "sharded-2" / "runs" / two[0]["sharded"]["id"]
    shutil.copytree(source, tmp_path / "runs" / source.name)
    (shards,) = (tmp_path / "runs" / source.name / "checkpoints" / "best.dcp").iterdir()
    mark = tmp_path / "executed"
    (shards / name).unlink(missing_ok=True)
    (shards / name).write_bytes(pickle.dumps(Hostile(mark)))
    root = str(tmp_path / "runs")
    if name == ".metadata":  # where torch would keep one; here nobody looks
        assert NNCheckpoint.load(source.name, "best", root=root) is not None
        NNCheckpoint.verify(source.name, "best", root=root)
    else:
        with pytest.raises(ResumePointError, match="corrupted"):
            NNCheckpoint.verify(source.name, "best", root=root)
        with pytest.raises(ResumePointError, match=name.replace(".", "[.]")):
            NNCheckpoint.load(source.name, "best", root=root)
        with pytest.raises(ResumePointError):
            gather_checkpoint(source.name, "best", root=root)
    assert not mark.exists()


class Hostile:
    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return (open, (self.mark, "w"))


def test_missing_tensors_are_told_with_the_way_out(two, folder, tmp_path):
    source = folder / "several" / "sharded-2" / "runs" / two[0]["sharded"]["id"]
    shutil.copy(source / "checkpoints" / "last.pt", tmp_path / "last.pt")
    with pytest.raises(ResumePointError, match="gather_checkpoint"):
        NNCheckpoint.from_file(str(tmp_path / "last.pt"))
