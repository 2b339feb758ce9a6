"""Random windows of random terms against the loss of their union, term by term."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.engine.update import UpdateEngine
from nnx.objectives import LossTerm, ObjectiveResult
from torch import nn

SIZES = st.integers(min_value=0, max_value=4)


@st.composite
def runs(draw):
    """Microbatches of up to three terms: (rows, seed, weight) each, or absent."""
    weights = [draw(st.sampled_from([0.0, 0.5, 1.0, -2.0])) for _ in range(3)]
    reductions = [draw(st.sampled_from(["mean", "sum"])) for _ in range(3)]
    microbatches = draw(st.lists(
        st.lists(st.one_of(st.none(), SIZES), min_size=3, max_size=3), min_size=1, max_size=7
    ))  # fmt: skip
    return (
        weights, reductions, microbatches, draw(st.integers(1, 4)), draw(st.booleans()),
        draw(st.integers(0, 10_000)),
    )  # fmt: skip


class Net(nn.Module):
    """Every term sees a shared trunk and a head of its own."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x, term):
        return self.heads[term](torch.tanh(self.trunk(x))).square().sum()


def sample(rows, seed):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(runs())
def test_any_window_is_the_update_of_its_union(run):
    weights, reductions, microbatches, accumulate, scaled, seed = run
    torch.manual_seed(seed)
    ours = Net().double()
    plain = Net().double()
    plain.load_state_dict(ours.state_dict())
    optimizers = {
        "trunk": torch.optim.SGD(ours.trunk.parameters(), lr=0.05, momentum=0.9),
        "heads": torch.optim.Adam(ours.heads.parameters(), lr=0.05),
    }
    oracle = [
        torch.optim.SGD(plain.trunk.parameters(), lr=0.05, momentum=0.9),
        torch.optim.Adam(plain.heads.parameters(), lr=0.05),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    engine = UpdateEngine(optimizers, accumulate=accumulate, scaler=scaler)
    totals = [[0.0, 0], [0.0, 0], [0.0, 0]]  # the epoch's sums
    live_in_epoch = [False] * 3
    updates = 0
    for start in range(0, len(microbatches), accumulate):
        window = microbatches[start : start + accumulate]
        for offset, sizes in enumerate(window):
            index = start + offset
            terms = []
            for term, rows in enumerate(sizes):
                if rows is None:
                    continue
                numerator = ours(sample(rows, index), term)
                denominator = rows if reductions[term] == "mean" else None
                terms.append(
                    LossTerm(str(term), numerator, denominator, reductions[term], weights[term])
                )
            applied = engine.apply(
                ObjectiveResult(terms), epoch_idx=0, batch_idx=index,
                is_last=index + 1 == len(microbatches),
            )  # fmt: skip
        loss, touched = 0.0, [False] * 3
        for term in range(3):
            present = [(start + o, s[term]) for o, s in enumerate(window) if s[term] is not None]
            count = sum(rows for _, rows in present)
            if not present or (reductions[term] == "mean" and count == 0):
                continue
            value = sum(plain(sample(rows, index), term) for index, rows in present)
            totals[term][0] += weights[term] * value.item()
            totals[term][1] += count
            live_in_epoch[term] = True
            touched[term] = weights[term] != 0
            loss = loss + weights[term] * (value / count if reductions[term] == "mean" else value)
        for optimizer in oracle:
            optimizer.zero_grad()
        if any(touched):
            loss.backward()
            # A head of weight 0 took no backward pass of its own.
            for term in range(3):
                if not touched[term]:
                    plain.heads[term].zero_grad()
            for optimizer in oracle:
                optimizer.step()
            updates += 1
            assert applied.committed
            assert math.isclose(applied.events[0].loss, loss.item(), rel_tol=1e-9, abs_tol=1e-12)
        else:
            assert not applied.committed
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert engine.updates == updates
    expected = [
        weighted / count if reductions[term] == "mean" else weighted
        for term, (weighted, count) in enumerate(totals)
        if live_in_epoch[term]
    ]
    if not expected:
        assert engine.epoch_loss() is None
    else:
        assert math.isclose(engine.epoch_loss(), sum(expected), rel_tol=1e-9, abs_tol=1e-12)


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(0, 6))
def test_a_window_continues_from_its_state_at_any_microbatch(run, cut):
    weights, reductions, microbatches, accumulate, scaled, seed = run

    def play(resume_at):
        torch.manual_seed(seed)
        net = Net().double()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        engine = UpdateEngine({"all": optimizer}, accumulate=accumulate, scaler=scaler)
        for index, sizes in enumerate(microbatches):
            if index == resume_at:
                state, counters = engine.window_state(), engine.component_state()
                net.zero_grad(set_to_none=True)
                engine = UpdateEngine({"all": optimizer}, accumulate=accumulate, scaler=scaler)
                engine.load_component_state(counters, version=1)
                engine.load_window_state(state)
            terms = [
                LossTerm(
                    str(term), net(sample(rows, index), term),
                    rows if reductions[term] == "mean" else None, reductions[term], weights[term],
                )
                for term, rows in enumerate(sizes)
                if rows is not None
            ]  # fmt: skip
            engine.apply(
                ObjectiveResult(terms), epoch_idx=0, batch_idx=index,
                is_last=index + 1 == len(microbatches),
            )  # fmt: skip
        return net, engine

    straight, ours = play(None)
    resumed, theirs = play(cut)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))
    assert ours.updates == theirs.updates
    assert ours.epoch_loss() == theirs.epoch_loss()
