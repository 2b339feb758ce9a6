"""A loss, a gradient or a weight that is NaN or infinite is never stepped on or committed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from nnx import (
    Checkpoints,
    Losses,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNTrainerParams,
    NNTrainParams,
    Optims,
    PositionalInputs,
    PrecisionPolicy,
    Trainer,
    default_train_step,
    supervised_objective,
)
from nnx.engine import gradients
from nnx.engine.finalize import finalize_step
from torch import nn
from torch.nn import functional as F

BATCHES, ZERO_IN = 4, 2


class Root(nn.Module):
    """Finite everywhere; the gradient of ``w`` is NaN where an input is exactly 0."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        root = torch.where(x > 0, (self.w * x).sqrt(), 0)
        return root.sum(1, keepdim=True) * torch.tensor([1.0, -1.0]) + self.b


def batches(zero_in=ZERO_IN):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8 * BATCHES, 3, generator=generator) + 0.1
    y = torch.randint(0, 2, (len(x),), generator=generator)
    if zero_in is not None:
        x[8 * zero_in, 1] = 0.0
    return list(zip(x.split(8), y.split(8)))


def model(**kwargs):
    return NNModel(
        module=Root(),
        params=NNModelParams(loss=Losses.CROSS_ENTROPY, **kwargs),
        batch_adapter=PositionalInputs(1),
    )


def sgd(**kwargs):
    return NNOptimParams(name=Optims.SGD, max_lr=0.1, weight_decay=0.0, momentum=0.0, **kwargs)


def params(n_epochs=2, loader=None, **kwargs):
    return NNTrainParams(
        n_epochs=n_epochs, train_loader=batches() if loader is None else loader, optim=sgd(**kwargs)
    )


def own_finish(ctx):
    x, y = ctx.batch
    loss = F.cross_entropy(ctx.model.net(x), y)
    ctx.optimizer.zero_grad()
    return NNEvaluationDataPoint(loss=finalize_step(ctx, loss))


STEPS = {
    "the default step": {},
    "a step that delegates": {"train_step_fn": lambda ctx: default_train_step(ctx)},
    "finalize_step": {"train_step_fn": own_finish},
    "an objective": {"objective": supervised_objective()},
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_refused_by_every_step(step, accumulate, precision):
    if step == "finalize_step" and (accumulate, precision) != (1, "fp32"):
        pytest.skip("finalize_step trains in full precision without accumulation")
    m = model(precision=PrecisionPolicy(precision))
    where = rf"the gradient of w, shape \(3,\), is not finite at epoch 0, batch {ZERO_IN + accumulate - 1}"
    with pytest.raises(FloatingPointError, match=where):
        m.train(params(accumulate_grad_batches=accumulate), **STEPS[step])
    assert all(torch.isfinite(p).all() for p in m.net.parameters())
    assert not list(Path("runs").glob("*/checkpoints/*.pt"))


def test_the_steps_before_it_are_those_of_a_plain_loop():
    m, oracle = model(), Root()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    with pytest.raises(FloatingPointError):
        m.train(params())
    for x, y in batches()[:ZERO_IN]:
        optimizer.zero_grad()
        F.cross_entropy(oracle(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(m.net.parameters(), oracle.parameters()):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_the_epochs_before_it_stay_committed():
    class LaterZero:
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            return iter(batches(ZERO_IN if self.epoch == 1 else None))

        def __len__(self):
            return BATCHES

    m = model()
    with pytest.raises(FloatingPointError, match="epoch 1"):
        m.train(params(3, LaterZero()))
    (folder,) = (p for p in Path("runs").iterdir() if p.is_dir() and len(p.name) == 32)
    for tag in (Checkpoints.LAST, Checkpoints.BEST):
        kept = NNCheckpoint.load(folder.name, tag)
        assert kept.idp.epoch_idx == 0
        assert all(torch.isfinite(v).all() for v in kept.net_state.values())


def test_an_objective_may_drop_the_window():
    m = model()
    run = m.train(params(1), objective=supervised_objective(nonfinite="skip"))
    assert run.idps[-1].update_count == BATCHES - 1
    assert all(torch.isfinite(p).all() for p in m.net.parameters())


@pytest.mark.parametrize("facade", ["train_step_fn", "trainer_step_fn"])
def test_a_step_that_takes_its_own_updates_commits_no_ruined_weights(facade):
    def careless(ctx):
        x, y = ctx.batch
        for optimizer in getattr(
            ctx, "optimizers", {"only": getattr(ctx, "optimizer", None)}
        ).values():
            optimizer.zero_grad()
            F.cross_entropy(ctx.model.net(x), y).backward()
            optimizer.step()
        return NNEvaluationDataPoint(loss=1.0, error=0.0)

    if facade == "train_step_fn":
        fit = partial(model().train, params(), train_step_fn=careless)
    else:
        groups = {n: [NNParamGroupSpec(name_pattern=n)] for n in "wb"}
        optims = {n: sgd(param_groups=g) for n, g in groups.items()}
        trained = NNTrainerParams(n_epochs=2, train_loader=batches(), optims=optims)
        fit = partial(Trainer(model()).train, trained, trainer_step_fn=careless)
    with pytest.raises(FloatingPointError, match="training made w, b NaN or infinite in epoch 0,"):
        fit()
    assert not list(Path("runs").glob("*/checkpoints/*.pt"))


def test_a_finite_gradient_that_overflows_the_weights_is_not_committed():
    m = model()
    huge = NNOptimParams(name=Optims.SGD, max_lr=3e38, weight_decay=0.0, momentum=0.0)
    one = NNTrainParams(
        n_epochs=1, train_loader=[(1e6 * x, y) for x, y in batches(None)[:1]], optim=huge
    )
    with pytest.raises(FloatingPointError, match="there is no earlier epoch"):
        m.train(one)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
@pytest.mark.parametrize(
    "kind",
    ["float32", "float64", "bfloat16", "complex64", "sparse", "expanded", "empty", "mixed", "huge"],
)
def test_every_kind_of_gradient_is_read(kind, bad):
    value = 0.0 if bad is None else bad
    one = torch.tensor([1.0, 2.0, value])
    made = {
        "float32": [torch.ones(2, 2), one],
        "float64": [one.double(), torch.ones(3).double()],
        "bfloat16": [one.bfloat16()],
        "complex64": [torch.complex(torch.ones(3), one)],
        "sparse": [
            torch.sparse_coo_tensor(torch.tensor([[0, 2, 5]]), one, (6,), check_invariants=True)
        ],
        "expanded": [one[2:].expand(4)],
        "empty": [torch.empty(0), one],
        "mixed": [one, torch.ones(2).double(), torch.ones(2).half()],
        "huge": [torch.full((4,), 3e38), one],  # their sum overflows, they do not
    }[kind]
    before = [g.clone() for g in made]
    assert gradients.all_finite(made) == (bad is None)
    for ours, kept in zip(made, before):  # the check changes nothing
        a, b = (g.coalesce().values() if g.is_sparse else g for g in (ours, kept))
        assert torch.equal(
            a.nan_to_num() if kind != "complex64" else a.real,
            b.nan_to_num() if kind != "complex64" else b.real,
        )
