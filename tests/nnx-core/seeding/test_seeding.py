"""Random streams are pinned, borrowed and described."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from importlib import metadata

import numpy
import pytest
import torch
from nnx import seeding
from nnx.seeding import dataloader_worker_init_fn, env_snapshot, isolated_rng, set_seed
from torch.utils.data import DataLoader, Dataset


def draws():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def _give_back():
    held = seeding.rng_state()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    environment = dict(os.environ)
    yield
    seeding.set_rng_state(held)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


def test_a_seed_pins_python_numpy_and_torch():
    set_seed(11)
    first = draws()
    draws()
    set_seed(11)
    assert draws() == first
    assert first == (random.Random(11).random(), numpy.random.RandomState(11).rand(), first[2])
    assert first[2] == float(torch.rand((), generator=torch.Generator().manual_seed(11)))


def test_a_seed_sets_cudnn_and_the_hash_seed_of_children():
    set_seed(5)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["PYTHONHASHSEED"] == "5"


def test_strict_turns_on_deterministic_algorithms():
    set_seed(5, strict=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_numpy_integer_is_a_seed_and_other_kinds_are_refused():
    set_seed(numpy.int64(3))
    first = draws()
    set_seed(3)
    assert draws() == first
    for bad in (True, 1.0, "3", None, -1, 2**63):
        with pytest.raises(ValueError, match="seed must be"):
            set_seed(bad)
    assert draws() != first  # a refused seed touched nothing


def test_a_large_seed_is_accepted_by_every_stream():
    set_seed(2**40 + 7)
    assert numpy.random.rand() == numpy.random.RandomState((2**40 + 7) % 2**32).rand()


def test_isolated_draws_do_not_move_the_callers_streams():
    set_seed(1)
    expected = [draws(), draws()]
    set_seed(1)
    seen = [draws()]
    with isolated_rng(99):
        inside = draws()
    seen.append(draws())
    assert seen == expected
    with isolated_rng(99):
        assert draws() == inside


def test_isolated_streams_come_back_after_an_error():
    def fail():
        with isolated_rng(99):
            draws()
            raise RuntimeError

    set_seed(1)
    expected = draws()
    set_seed(1)
    with pytest.raises(RuntimeError):
        fail()
    assert draws() == expected


def test_gaussian_halves_survive_the_round_trip(tmp_path):
    set_seed(4)
    random.gauss(0, 1), numpy.random.randn()  # each keeps a second value
    torch.save(seeding.rng_state(), tmp_path / "rng.pt")
    expected = random.gauss(0, 1), numpy.random.randn(), draws()
    set_seed(77)
    seeding.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.gauss(0, 1), numpy.random.randn(), draws()) == expected


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)


def test_workers_draw_from_their_own_repeatable_streams():
    def epoch():
        torch.manual_seed(8)
        loader = DataLoader(Draws(), num_workers=2, worker_init_fn=dataloader_worker_init_fn)
        return torch.cat(list(loader))

    first = epoch()
    assert torch.equal(epoch(), first)
    assert len(first.unique()) == first.numel()


def test_the_snapshot_names_versions_and_the_platform():
    snapshot = env_snapshot()
    assert snapshot["torch"] == metadata.version("torch")
    assert snapshot["numpy"] == numpy.__version__
    assert snapshot["python"] == ".".join(map(str, sys.version_info[:3]))
    assert snapshot["cuda_available"] is torch.cuda.is_available()
    assert set(snapshot) >= {
        "nnx", "python", "torch", "numpy", "platform", "cuda_available", "cuda_device_count",
        "git_commit", "git_dirty",
    }  # fmt: skip


def test_the_snapshot_says_whether_algorithms_are_deterministic():
    try:
        for mode, said in (({"mode": True}, "on"), ({"mode": True, "warn_only": True}, "warn"),
                           ({"mode": False}, "off")):  # fmt: skip
            torch.use_deterministic_algorithms(**mode)
            assert env_snapshot()["deterministic_algorithms"] == said
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for variable in [v for v in os.environ if v.startswith("GIT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    return subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_git_is_asked_only_when_read_and_once(repository, monkeypatch, tmp_path):
    calls = []
    real = subprocess.run
    monkeypatch.setattr(
        seeding.subprocess, "run", lambda *a, **k: (calls.append(a), real(*a, **k))[1]
    )
    snapshot = env_snapshot(force_refresh=True)
    assert snapshot["torch"]
    assert not calls
    assert snapshot["git_commit"] == repository
    assert snapshot["git_dirty"] is False
    (tmp_path / "file").write_text("2")
    assert env_snapshot()["git_dirty"] is False  # frozen at the first read
    assert len(calls) == 1
    assert env_snapshot(force_refresh=True)["git_dirty"] is True


@pytest.mark.parametrize(
    "read",
    [dict, lambda s: json.loads(json.dumps(s)), lambda s: {**s}, lambda s: s.copy(),
     lambda s: dict(s.items()), lambda s: pickle.loads(pickle.dumps(s)),
     lambda s: dict(zip(s.keys(), s.values())), lambda s: {k: s.get(k) for k in s},
     lambda s: s | {}, lambda s: {} | s, lambda s: {k: s.pop(k) for k in list(s)}],
)  # fmt: skip
def test_every_way_of_reading_gives_plain_values(read, repository):
    value = read(env_snapshot(force_refresh=True))
    assert value["git_commit"] == repository
    assert value == env_snapshot()


def test_a_failing_field_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    snapshot = env_snapshot(force_refresh=True)
    assert snapshot["git_commit"] is None
    assert snapshot["git_dirty"] is None
    monkeypatch.undo()
    env_snapshot(force_refresh=True)


def test_changing_a_snapshot_does_not_change_the_next():
    env_snapshot()["precision"] = "x"
    assert "precision" not in env_snapshot()


def test_importing_the_module_loads_no_torch():
    code = "import sys, nnx.seeding; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
