"""The short way through a backward pass and an optimizer step is taken only where nobody can tell."""

from __future__ import annotations

import functools

import pytest
import torch
from nnx.engine import direct
from torch.optim.optimizer import register_optimizer_step_post_hook


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))


def loss_of(net, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return net(torch.randn(5, 4, generator=generator)).square().mean()


def short_ways(monkeypatch):
    """Counts the passes and steps that went the short way."""
    taken = []
    real = direct._run_backward
    monkeypatch.setattr(
        direct, "_run_backward", lambda *a, **k: (taken.append("backward"), real(*a, **k))[1]
    )
    return taken


@pytest.mark.filterwarnings("error")  # a scheduler warns when it has seen no optimizer step
@pytest.mark.parametrize("build", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("scheduled", [False, True])
def test_weights_and_states_equal_those_of_the_entry_points(net, build, scheduled):
    def train(backward, step):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        model.load_state_dict(net.state_dict())
        optimizer = build(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
        for seed in range(5):
            optimizer.zero_grad()
            backward(loss_of(model, seed))
            step(optimizer)
            if scheduler is not None:
                scheduler.step()
        return [*model.state_dict().values()], optimizer.state_dict()

    weights, state = train(direct.backward, direct.step)
    other_weights, other_state = train(torch.Tensor.backward, lambda optimizer: optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights))
    assert str(state) == str(other_state)


def test_a_plain_loss_goes_the_short_way(net, monkeypatch):
    taken = short_ways(monkeypatch)
    direct.backward(loss_of(net))
    assert taken == ["backward"]


@pytest.mark.parametrize("place", ["Tensor.backward", "autograd.backward"])
def test_a_patched_backward_is_called(net, monkeypatch, place):
    owner = torch.Tensor if place == "Tensor.backward" else torch.autograd
    real, called = owner.backward, []

    @functools.wraps(real)
    def patched(*args, **options):
        called.append(place)
        return real(*args, **options)

    monkeypatch.setattr(owner, "backward", patched)
    direct.backward(loss_of(net))
    assert called == [place]


def test_a_mode_over_torch_functions_sees_the_backward(net):
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    loss = loss_of(net)
    with Watch():
        direct.backward(loss)
    assert "backward" in seen


def test_a_loss_that_is_no_scalar_or_needs_no_gradient_is_refused_by_torch(net):
    with pytest.raises(RuntimeError, match="scalar outputs"):
        direct.backward(net(torch.randn(2, 4)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        direct.backward(torch.tensor(1.0))


def test_hooks_of_a_step_run(net):
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("everywhere"))
    direct.backward(loss_of(net))
    try:
        direct.step(optimizer)
    finally:
        everywhere.remove()
    assert seen == ["before", "after", "everywhere"]


@pytest.mark.parametrize("where", ["class", "instance", "override"])
def test_a_step_of_somebody_else_is_called(net, monkeypatch, where):
    called = []

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            called.append("override")
            return super().step(closure)

    optimizer = (Mine if where == "override" else torch.optim.SGD)(net.parameters(), lr=0.1)
    real = torch.optim.SGD.step

    @functools.wraps(real)
    def patched(*args, **options):
        called.append(where)
        return real(*(args if where == "class" else (optimizer, *args)), **options)

    if where != "override":
        monkeypatch.setattr(torch.optim.SGD if where == "class" else optimizer, "step", patched)
    before = [p.detach().clone() for p in net.parameters()]
    direct.backward(loss_of(net))
    direct.step(optimizer)
    assert called == [where]
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters()))


def test_a_profiler_sees_the_range_of_a_step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    direct.backward(loss_of(net))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        direct.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
