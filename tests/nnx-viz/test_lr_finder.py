from __future__ import annotations

import copy
import inspect
import math
import multiprocessing
import sys

import pytest
import torch
import torch.nn.functional as F
from made_models import Pair, pair_model
from nnx import LRFinderResult, lr_finder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(n=64, generator=None):
    torch.manual_seed(3)
    x = torch.randn(n, 5)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True,
                      generator=generator)  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
    )


def test_the_sweep_equals_a_hand_written_one():
    net, loader = network(), data()
    torch.manual_seed(7)
    result = lr_finder(net, loader, loss_fn=F.cross_entropy, num_iter=12, start_lr=1e-4, end_lr=1.0)

    torch.manual_seed(7)
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    rates, losses = [1e-4 * 1e4 ** (i / 11) for i in range(12)], []
    while len(losses) < 12:
        for x, y in loader:
            if len(losses) == 12:
                break
            optimizer.param_groups[0]["lr"] = rates[len(losses)]
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    assert result.losses == losses[: len(result.losses)]
    assert result.lrs == pytest.approx(rates[: len(result.lrs)])


def test_nothing_of_the_sweep_stays():
    generator = torch.Generator().manual_seed(5)
    net, loader = network(), data(generator=generator)
    net[1].eval()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    weights, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    ambient, drawn = torch.get_rng_state(), generator.get_state()
    lr_finder(net, loader, loss_fn=F.cross_entropy, num_iter=20)
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[4].weight.grad is None
    assert torch.equal(torch.get_rng_state(), ambient)
    assert torch.equal(generator.get_state(), drawn)


def test_nothing_stays_after_an_error():
    net, loader = network(), data()
    weights, ambient, calls = copy.deepcopy(net.state_dict()), torch.get_rng_state(), []

    def fails_later(output, target):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("boom")
        return F.cross_entropy(output, target)

    with pytest.raises(RuntimeError, match="boom"):
        lr_finder(net, loader, loss_fn=fails_later, start_lr=0.1)
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), ambient)
    assert all(p.grad is None for p in net.parameters())


def test_divergence_stops_early():
    result = lr_finder(network(), data(), loss_fn=F.cross_entropy, start_lr=1e-3, end_lr=1e6,
                       num_iter=200, optimizer_cls=torch.optim.SGD)  # fmt: skip
    assert len(result.lrs) == len(result.losses) < 200


def test_the_threshold_is_relative_to_the_lowest_smoothed_loss():
    values = iter([1.0, 0.5, 0.5, 0.9, 1.6, 3.0, 9.0])
    net = nn.Linear(1, 1)

    def scripted(output, target):
        return output.sum() * 0 + next(values)

    loader = [(torch.ones(1, 1), torch.ones(1))]
    result = lr_finder(
        net, loader, loss_fn=scripted, num_iter=7, diverge_threshold=2.0, ema_alpha=1.0
    )
    # Lowest 0.5: the sweep ends at the first value above 0.5 + 1 * 0.5.
    assert result.losses == pytest.approx([1.0, 0.5, 0.5, 0.9, 1.6])


def test_the_suggestion_is_where_the_loss_falls_fastest():
    values = [4.0, 3.9, 3.5, 1.0, 0.8, 0.79, 0.78]
    script = iter(values)
    result = lr_finder(nn.Linear(1, 1), [(torch.ones(1, 1), torch.ones(1))], num_iter=7, ema_alpha=1.0,
                       loss_fn=lambda o, t: o.sum() * 0 + next(script), start_lr=1e-3, end_lr=1e3)  # fmt: skip
    assert result.suggested_lr == pytest.approx(
        result.lrs[2]
    ) or result.suggested_lr == pytest.approx(result.lrs[3])
    slopes = [
        (values[min(i + 1, 6)] - values[max(i - 1, 0)]) / (min(i + 1, 6) - max(i - 1, 0))
        for i in range(7)
    ]
    assert result.lrs.index(result.suggested_lr) == slopes.index(min(slopes))


def test_the_figure_marks_the_suggestion():
    result = lr_finder(network(), data(), loss_fn=F.cross_entropy, num_iter=10)
    assert isinstance(result, LRFinderResult)
    assert [t.name for t in result.figure.data] == ["loss", "smoothed"]
    assert result.figure.layout.shapes[0].x0 == result.suggested_lr
    (label,) = result.figure.layout.annotations
    assert label.x == pytest.approx(math.log10(result.suggested_lr))
    assert f"{result.suggested_lr:.2e}" in label.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_lr": 0.0}, "start_lr must be"),
        ({"end_lr": 1e-9}, "end_lr must be"),
        ({"end_lr": math.inf}, "end_lr must be"),
        ({"num_iter": 2}, "num_iter must be"),
        ({"diverge_threshold": 1.0}, "diverge_threshold must be a finite number > 1"),
        ({"ema_alpha": 0.0}, "ema_alpha must be"),
    ],
)
def test_arguments_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        lr_finder(network(), data(), loss_fn=F.cross_entropy, **change)


def test_an_empty_loader_and_a_frozen_model():
    with pytest.raises(ValueError, match="yields no batch"):
        lr_finder(network(), [], loss_fn=F.cross_entropy)
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        lr_finder(frozen, data(), loss_fn=F.cross_entropy)


def test_the_module_of_the_same_name_is_the_function_too():
    import nnx.lr_finder as module

    result = module(network(), data(), loss_fn=F.cross_entropy, num_iter=5)
    assert type(result).__name__ == "LRFinderResult"


def test_the_signature_can_be_asked_for():
    import nnx
    import nnx.lr_finder as first
    from nnx.lr_finder import lr_finder as function

    expected = inspect.signature(function)
    module = sys.modules["nnx.lr_finder"]
    assert [inspect.signature(f) for f in (nnx.lr_finder, first, module)] == [expected] * 3
    assert list(expected.parameters)[:3] == ["model", "train_loader", "loss_fn"]
    assert expected.parameters["num_iter"].default == 100


def pairs():
    torch.manual_seed(1)
    rows = [
        {"left": torch.randn(5), "right": torch.randn(3), "labels": torch.tensor(i % 2)}
        for i in range(32)
    ]
    return DataLoader(rows, batch_size=8)


def test_a_model_reads_its_batches_by_its_adapter():
    model = pair_model()
    result = lr_finder(model, pairs(), loss_fn=F.cross_entropy, num_iter=6, start_lr=1e-3)
    net, losses = Pair(), []
    optimizer = torch.optim.Adam(net.parameters())
    for rate, batch in zip(result.lrs, [*pairs(), *pairs()]):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        output = net(left=batch["left"], right=batch["right"])["logits"]
        loss = F.cross_entropy(output, batch["labels"])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert result.losses == losses


class Counts(nn.Module):
    """Keeps what it saw beside its tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("last", torch.zeros(2), persistent=False)
        self.seen = {"batches": 0}

    def forward(self, x):
        self.seen["batches"] += 1
        self.last = self.layer(x).detach().mean(0)
        return self.layer(x)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_extra_state_and_replaced_buffers_are_put_back():
    net = Counts()
    buffer = net.last
    lr_finder(net, data(), loss_fn=F.cross_entropy, num_iter=5)
    assert net.seen == {"batches": 0}
    assert net.last is buffer
    assert torch.equal(buffer, torch.zeros(2))


def test_generators_below_wrappers_are_put_back():
    generator = torch.Generator().manual_seed(5)
    plain = data().dataset
    sampler = torch.utils.data.RandomSampler(plain, generator=generator)
    batches = torch.utils.data.BatchSampler(sampler, 16, drop_last=False)
    loader = DataLoader(plain, batch_sampler=batches)
    before = generator.get_state()
    lr_finder(network(), loader, loss_fn=F.cross_entropy, num_iter=9)
    assert torch.equal(generator.get_state(), before)


def test_persistent_workers_end_with_the_sweep():
    loader = DataLoader(
        data().dataset, batch_size=16, num_workers=1, persistent_workers=True, shuffle=True
    )
    torch.manual_seed(2)
    expected = [x for x, _ in loader]
    loader._iterator._shutdown_workers()
    loader._iterator = None
    net = network()
    torch.manual_seed(2)
    lr_finder(net, loader, loss_fn=F.cross_entropy, num_iter=5)
    assert loader._iterator is None
    assert not multiprocessing.active_children()
    assert all(torch.equal(a, b) for a, (b, _) in zip(expected, loader))
    live = iter(loader)
    next(live)
    with pytest.raises(ValueError, match="persistent workers of train_loader are in use"):
        lr_finder(network(), loader, loss_fn=F.cross_entropy, num_iter=5)
    assert len(list(live)) == len(expected) - 1
    loader._iterator._shutdown_workers()


def test_an_iterator_of_the_callers_is_refused_unread():
    live = iter(data())
    with pytest.raises(ValueError, match="train_loader is an iterator .*; pass the loader itself"):
        lr_finder(network(), live, loss_fn=F.cross_entropy)
    assert len(list(live)) == 4
