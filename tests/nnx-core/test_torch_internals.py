"""Where torch's private names save time: each is still there, and does without when it is not.

A test that says "the short way" fails when a new torch moves a name: nothing
breaks then, but a step, an epoch or a commit has become slower.
"""

from __future__ import annotations

import io

import pytest
import torch
from nnx.compilation import forward
from nnx.data import loading
from nnx.engine import direct
from nnx.store import archive
from torch.utils.data import DataLoader, TensorDataset


def loss_and_optimizer():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    return (weight**2).sum(), torch.optim.SGD([weight], lr=0.25), weight


def stepped():
    loss, optimizer, weight = loss_and_optimizer()
    direct.backward(loss)
    direct.step(optimizer)
    return weight.tolist()


def test_a_backward_goes_the_short_way(monkeypatch):
    entered = []
    real = torch.Tensor.backward
    loss, _, _ = loss_and_optimizer()
    monkeypatch.setattr(direct, "_run_backward", lambda *a, **k: entered.append("short"))
    direct.backward(loss)
    assert entered == ["short"]
    assert torch.Tensor.backward is real


def test_a_step_goes_the_short_way():
    _, optimizer, _ = loss_and_optimizer()
    entry = type(optimizer).step
    assert entry.__globals__ is direct._OPTIM, "Optimizer.step is wrapped elsewhere now"
    assert callable(entry.__wrapped__)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert hasattr(optimizer, hooks)
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        assert hasattr(direct.optim, hooks)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert direct._only_noted_by_a_scheduler(vars(optimizer)["step"], entry)


def test_what_watches_a_step_can_be_asked():
    assert direct._always not in (direct._function_mode, direct._functorch, direct._profiler)


@pytest.mark.parametrize("name", ["_function_mode", "_functorch", "_profiler"])
def test_a_torch_that_cannot_be_asked_is_called_by_its_entry_points(monkeypatch, name):
    expected = stepped()
    monkeypatch.setattr(direct, name, direct._always)
    assert stepped() == expected == [0.5, 1.0]


def test_a_torch_without_the_engine_call_is_called_by_its_entry_point(monkeypatch):
    monkeypatch.setattr(direct, "_run_backward", None)
    assert stepped() == [0.5, 1.0]


def rows(batches):
    return [batch[0].tolist() for batch in batches]


def test_tensors_in_memory_are_fetched_by_index_and_otherwise_one_by_one(monkeypatch):
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)
    fast = loading.fast_batches(loader)
    assert type(fast).__name__ == "generator", "DataLoader's iterator has other names now"
    expected = rows(loader)
    assert rows(fast) == expected
    iterator = type(iter(loader))
    monkeypatch.setattr(iterator, "__next__", lambda self: self.fetched())
    monkeypatch.setattr(iterator, "fetched", iterator._next_data, raising=False)
    monkeypatch.delattr(iterator, "_next_data")
    monkeypatch.delattr(torch.utils.data.dataloader._BaseDataLoaderIter, "_next_data")
    plain = loading.fast_batches(loader)
    assert type(plain) is iterator
    assert rows(plain) == expected


def test_plain_data_is_archived_by_its_types_and_otherwise_by_torch(monkeypatch, tmp_path):
    value = {"weight": torch.arange(3.0), "epoch": 2}
    written = archive.Archive.of(value)
    assert written is not None, "torch.serialization has no _open_zipfile_writer any more"
    stream = io.BytesIO()
    written.write(stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=True)
    assert torch.equal(read["weight"], value["weight"])
    monkeypatch.setattr(archive, "_open_writer", None)
    assert archive.Archive.of(value) is None


def test_dynamo_counts_graphs_and_without_counts_a_capture_is_unknown(monkeypatch):
    utils = torch._dynamo.utils
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert forward._graphs() > 0, "dynamo counts its graphs elsewhere now"
    monkeypatch.delattr(utils, "counters")
    assert forward._graphs() == forward._graph_breaks() == 0
