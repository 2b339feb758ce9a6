"""Two and three real processes, started by torchrun, against one."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from conftest import WORKER, close, environment, free_port, results, torchrun  # isort: skip
from nnx.store import NNRun

BY_TWO = ["plain", "accumulated", "masked", "monitored", "clipped", "plateau", "warm", "objective",
          "function", "journal", "extra", "tiny"]  # fmt: skip
BY_THREE = ["plain", "accumulated", "masked", "monitored", "clipped"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("equal")


@pytest.fixture(scope="module")
def by_world(folder):
    found = {}
    for world in (1, 2, 3):
        where = folder / str(world)
        where.mkdir()
        found[world] = torchrun(where, "equal", world)
    return found


@pytest.mark.parametrize(
    ("world", "case"), [*((2, c) for c in BY_TWO), *((3, c) for c in BY_THREE)]
)
def test_every_update_is_the_one_of_a_single_process(by_world, case, world):
    one, several = by_world[1][0][case], by_world[world][0][case]
    if case == "function":  # its shares' F1 have no mean
        assert set(several["f1"]) == {None}
        several = {**several, "f1": one["f1"]}
    close(one, several)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_agree_exactly(by_world, world):
    first, *others = by_world[world]
    for other in others:
        assert other == first


def test_bf16_agrees_within_its_tolerance(by_world):
    close(by_world[1][0]["bf16"]["loss"], by_world[2][0]["bf16"]["loss"], tolerance=2e-2)


def test_a_world_of_one_is_plain_training(folder, by_world, monkeypatch):
    import worker
    from torch.utils.data import DataLoader

    monkeypatch.chdir(folder)
    monkeypatch.setattr(worker, "WORLD", 1)
    given = worker.params()
    plain = worker.replace(given, val_loader=DataLoader(worker.data(53, seed=1), 16))
    trained = worker.model()
    run = trained.train(plain, salt="alone")
    assert worker.summary(run, trained) | {"id": ""} == by_world[1][0]["plain"] | {"id": ""}


def test_one_writer_leaves_an_ordinary_run(folder, by_world):
    found = by_world[2][0]["monitored"]
    run = NNRun.load(found["id"], root=str(folder / "2" / "runs"))
    assert [r.train_edp.loss for r in run.idps] == found["loss"]
    assert run.id == by_world[1][0]["monitored"]["id"]


def test_callbacks_and_stops(folder):
    one, two = torchrun(folder, "callbacks", 2)
    assert one["note"] == two["note"]
    assert [n for _, n in one["note"]] == [7, 14]
    assert one["rates"] == two["rates"]
    assert (one["built"], two["built"]) == ([0], [])
    for found in (one, two):
        assert "Silent does not say in which processes it runs" in found["refused"]
        assert "writer_only" in found["function"]
        assert found["early"] == 2
        assert found["asked"] == 2
        assert len(found["inside"]) == 7  # stopped inside the second epoch: the first stays
    assert (folder / "runs").exists()


def test_a_split_run_equals_the_whole_one(folder):
    one, two = torchrun(folder, "resume", 2)
    for found in (one, two):
        whole, rest = found["whole"], found["rest"]
        assert rest["weights"] == whole["weights"]
        assert rest["loss"] == whole["loss"][-len(rest["loss"]) :]
        assert rest["val"] == whole["val"][2:]
        assert found["status"] == "stateful"
        for script in found["scripts"]:
            assert script["weights"] == whole["weights"]
            assert script["id"] == found["scripts"][0]["id"]
        assert "data plan" in found["other_data"]
    three = torchrun(folder, "resume_elsewhere", 3, {"run": one["rest"]["id"]})
    for found in three:
        assert "trained by 2 processes, this run has 3" in found["stateful"]
        assert found["mode"] == "weights_only"


def test_a_failure_on_one_rank_ends_all_and_is_told_to_the_others(folder):
    one, two = torchrun(folder, "failures", 2)
    for found in (one, two):
        assert "own ValueError: rank" in found["mismatch"]
        assert "other loaders" in found["mismatch"]
        assert "other run" in found["model"]
        assert "nnx.distributed.train_loader" in found["plain_loader"]
        assert "own RunExistsError" in found["exists"]
        assert "default_train_step" in found["drifting"]
        assert found["after"] == 14
    assert one["data"].count("rank ") == 1
    assert "rank 1: OSError: the disk is gone" in one["data"]
    assert two["data"] == "own OSError: the disk is gone"
    assert "rank 1: ValueError: a callback broke" in one["callback"]
    assert two["callback"] == "own ValueError: a callback broke"
    assert one["writer"] == "own OSError: no space"
    assert "rank 0: OSError: no space" in two["writer"]
    left = {p.name for p in (folder / "runs").iterdir()}
    assert not any(name.startswith("tmp") for name in left)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_lost_process_ends_the_job_within_the_timeout(folder, name):
    """Started without torchrun, which would end the others itself."""
    port, world, args = free_port(), 3, {"signal": name, "timeout": 6}
    processes = []
    for rank in range(world):
        env = {
            **environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, str(WORKER), "lost", str(folder), json.dumps(args)]
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.DEVNULL))
    try:
        deadline = time.monotonic() + 60
        for process in processes[:-1]:
            process.wait(max(1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for found in results(folder, "lost", world)[:-1]:
        assert "lost contact with another process" in found["error"]
        assert found["seconds"] < 30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are read from /proc")
@pytest.mark.parametrize("call", ["shutdown()", "pass"])
def test_no_thread_of_the_backend_outlives_the_group(tmp_path, call):
    """One that drops a collective's tensor while the interpreter ends aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(f"""\
import atexit
import sys

import worker
from nnx.distributed import init_process_group, shutdown

atexit.register(lambda: print("left:", worker.backend_threads(), flush=True))
worker.RANK, worker.WORLD = init_process_group()
worker.fit("script")
print("before:", len(worker.backend_threads()))
{call}
""")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**environment(), **alone, "MASTER_PORT": str(free_port()),
             "PYTHONPATH": str(WORKER.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "before: 0" not in done.stdout
    assert "left: []" in done.stdout


def test_two_nodes_meet_through_the_rendezvous(tmp_path):
    """Two agents on loopback, one process each, as on two machines."""
    port = free_port()
    agents = []
    for node in range(2):
        extra = (
            "--nnodes", "2", "--node-rank", str(node), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
        )  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *extra,
            str(WORKER), "resume", str(tmp_path), "{}",
        ]  # fmt: skip
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment()))
    assert [agent.wait(120) for agent in agents] == [0, 0]
    one, two = results(tmp_path, "resume", 2)
    assert one["rest"] == two["rest"]
    assert one["rest"]["weights"] == one["whole"]["weights"]
