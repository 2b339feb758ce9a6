"""Runs in reduced precision: bf16 on the CPU for real, fp16 on a CPU stand-in, CUDA when there."""

from __future__ import annotations

import pytest
import torch
import yaml
from nnx import (
    Callback,
    Checkpoints,
    Devices,
    Losses,
    LossTerm,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNRun,
    NNTrainerParams,
    NNTrainParams,
    ObjectiveResult,
    Optims,
    PrecisionPolicy,
    PrecisionUnsupportedError,
    ResolvedPrecision,
    Trainer,
    kd_objective,
    set_seed,
    supervised_objective,
)
from nnx.precision import REFERENCE_TOLERANCES
from nnx.records import NNEvaluationDataPoint
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def runs_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model(seed=0, **params):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(input_dim=6, output_dim=3, hidden_dims=[16], dropout_prob=0.0),
        params=NNModelParams(**{"net": Nets.FEED_FWD, "loss": Losses.CROSS_ENTROPY, **params}),
    )


def batches(sizes=(8, 8, 8), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def optim(**fields):
    return NNOptimParams(
        **{"name": Optims.SGD, "max_lr": 0.05, "weight_decay": 0.0, "momentum": 0.9, **fields}
    )


def train_params(**fields):
    return NNTrainParams(
        **{"n_epochs": 3, "train_loader": batches(), "val_loader": batches((8,), seed=2),
           "optim": optim(), "seed": 0, **fields}
    )  # fmt: skip


OWNERS = {
    "default": dict,
    "objective": lambda: {"objective": supervised_objective()},
    "distillation": lambda: {"objective": kd_objective(model(seed=5))},
}


def assert_close_to_reference(reduced, reference, runs, mode):
    tolerance = REFERENCE_TOLERANCES[mode]
    for a, b in zip(reduced.net.parameters(), reference.net.parameters()):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=tolerance.weights)
    for ours, theirs in zip(*(run.idps for run in runs)):
        assert ours.train_edp.loss == pytest.approx(theirs.train_edp.loss, abs=tolerance.loss)


# -- bf16 on the CPU -------------------------------------------------------------------------


@pytest.mark.parametrize("owner", OWNERS)
def test_bf16_trains_within_the_reference_tolerance(owner):
    reduced, reference = model(precision=PrecisionPolicy("bf16")), model()
    dtypes = set()
    reduced.net.register_forward_hook(lambda *a: dtypes.add(a[-1].dtype))
    run = reduced.train(train_params(), **OWNERS[owner]())
    other = reference.train(train_params(), salt="reference", **OWNERS[owner]())
    assert dtypes == {torch.bfloat16}
    assert_close_to_reference(reduced, reference, (run, other), "bf16")
    assert run.idps[0].train_edp.f1 is not None


def test_bf16_is_the_hand_written_autocast_loop_bit_for_bit():
    ours, plain = model(precision=PrecisionPolicy("bf16")), model()
    run = ours.train(train_params())
    set_seed(0)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = plain.net(x)
            loss = F.cross_entropy(out.float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for a, b in zip(ours.net.parameters(), plain.net.parameters()):
        assert torch.equal(a, b)
    assert [idp.train_edp.loss for idp in run.idps] == losses


def test_an_objective_runs_under_autocast_and_sums_in_full_precision():
    seen = []

    def objective(ctx):
        x, y = ctx.batch
        raw = ctx.model.net(x)
        full = ctx.full_precision(raw)
        seen.append((raw.dtype, full.dtype, ctx.precision.effective))
        return ObjectiveResult([LossTerm("ce", F.cross_entropy(full, y, reduction="sum"), len(y))])

    model(precision=PrecisionPolicy("bf16")).train(train_params(n_epochs=1), objective=objective)
    assert set(seen) == {(torch.bfloat16, torch.float32, "bf16")}


def test_the_resolved_precision_is_recorded_with_the_run_and_its_checkpoints():
    policy = PrecisionPolicy("fp16", fallback="fp32")
    run = model(precision=policy).train(train_params(n_epochs=1))
    assert (run.precision.requested, run.precision.effective) == ("fp16", "fp32")
    assert "needs CUDA" in run.precision.fallback_reason
    assert NNRun.load(run.id).precision == run.precision
    state = NNCheckpoint.load_training_state(run.id, Checkpoints.LAST)
    assert ResolvedPrecision.from_record(state["precision"]) == run.precision
    assert NNRun.load(run.id).model.precision == policy
    configuration = yaml.safe_load((_root(run) / "run.yaml").read_text())
    assert configuration["model"]["precision"] == policy.state()


def _root(run):
    from pathlib import Path

    return Path("runs") / run.id


def test_an_unsupported_precision_is_refused_before_a_run_is_reserved(tmp_path):
    with pytest.raises(PrecisionUnsupportedError, match="'fp16' is not supported on cpu"):
        model(precision=PrecisionPolicy("fp16")).train(train_params())
    assert not list(tmp_path.iterdir())


def test_the_legacy_flag_trains_in_full_precision_on_the_cpu():
    flagged, plain = model(mixed_precision=True), model()
    run = flagged.train(train_params())
    plain.train(train_params(), salt="plain")
    assert run.precision.source == "mixed_precision"
    assert run.precision.effective == "fp32"
    assert all(torch.equal(a, b) for a, b in zip(flagged.net.parameters(), plain.net.parameters()))


def test_a_full_precision_step_is_refused_under_a_reduced_policy(tmp_path):
    def step(ctx):
        return NNEvaluationDataPoint(loss=0.0)

    step.full_precision_only = True
    m = model(precision=PrecisionPolicy("bf16"))
    with pytest.raises(ValueError, match=r"step trains in full precision only.*resolves to bf16"):
        m.train(train_params(), train_step_fn=step)
    assert not list(tmp_path.iterdir())
    model(mixed_precision=True).train(train_params(n_epochs=1), train_step_fn=step)  # fp32 here


# -- fp16 on a CPU stand-in ------------------------------------------------------------------


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    """Autocast to float16 with torch's own CPU scaler: the protocol of a GPU run, slowly."""
    resolved = ResolvedPrecision("fp16", "fp16", "cpu", "policy")
    monkeypatch.setattr("nnx.precision._obstacle", lambda mode, kind: None)
    scalers = []
    original = ResolvedPrecision.build_scaler

    def build(self):
        scaler = original(self)
        if scaler is not None:
            scaler._init_scale = 2.0**10
            scalers.append(scaler)
        return scaler

    monkeypatch.setattr(ResolvedPrecision, "build_scaler", build)
    assert resolved.uses_scaler
    return scalers


@pytest.mark.parametrize("owner", OWNERS)
def test_fp16_trains_within_the_reference_tolerance(fp16_on_cpu, owner):
    reduced, reference = model(precision=PrecisionPolicy("fp16")), model()
    run = reduced.train(train_params(), **OWNERS[owner]())
    other = reference.train(train_params(), salt="reference", **OWNERS[owner]())
    assert run.precision.effective == "fp16"
    assert len(fp16_on_cpu) == 1
    assert_close_to_reference(reduced, reference, (run, other), "fp16")


def test_fp16_is_the_hand_written_scaler_loop_bit_for_bit(fp16_on_cpu):
    ours, plain = model(precision=PrecisionPolicy("fp16")), model()
    ours.train(train_params(optim=optim(grad_clip_norm=0.5)))
    set_seed(0)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = plain.net(x)
            scaler.scale(F.cross_entropy(out.float(), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(plain.net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    for a, b in zip(ours.net.parameters(), plain.net.parameters()):
        assert torch.equal(a, b)
    assert fp16_on_cpu[0].state_dict() == scaler.state_dict()


class CountsUpdates(Callback):
    def __init__(self):
        self.events, self.committed = [], []

    def on_train_begin(self, ctx):
        ctx.update_listeners.append(lambda: self.committed.append(ctx.committed_updates))

    def on_optimizer_update(self, ctx, event):
        self.events.append(event.update_idx)


@pytest.mark.parametrize("owner", ["default", "objective"])
def test_a_skipped_scaler_step_is_quiet_and_counts_as_no_update(fp16_on_cpu, owner):
    m = model(precision=PrecisionPolicy("fp16"))
    counts = CountsUpdates()
    loss = m.loss_fn

    class Exploding(nn.Module):
        """Gradients of the second batch overflow once they are scaled."""

        reduction = "mean"

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, output, target):
            self.calls += 1
            value = loss(output, target)
            steep = (output * 1e36).sum()
            return value + (steep - steep.detach()) if self.calls == 2 else value

    m.loss_fn = Exploding()
    run = m.train(train_params(n_epochs=1, val_loader=None), callbacks=[counts], **OWNERS[owner]())
    assert counts.committed == [1, 2]
    assert len(run.idps) == 3
    assert fp16_on_cpu[0].get_scale() == 2.0**9
    if owner == "objective":
        assert counts.events == [1, 2]


def test_the_scaler_is_checkpointed_and_continues(fp16_on_cpu):
    straight = model(precision=PrecisionPolicy("fp16"))
    straight.train(train_params(n_epochs=4))
    first = model(precision=PrecisionPolicy("fp16")).train(train_params(n_epochs=2))
    state = NNCheckpoint.load_training_state(first.id, Checkpoints.LAST)
    assert state["scaler_state"]["scale"] == fp16_on_cpu[-1].get_scale()
    resumed = model(precision=PrecisionPolicy("fp16"))
    resumed.train(train_params(n_epochs=2, resume_from_run_id=first.id, resume_mode="stateful"))
    assert all(
        torch.equal(a, b) for a, b in zip(straight.net.parameters(), resumed.net.parameters())
    )
    assert fp16_on_cpu[-1].state_dict() == fp16_on_cpu[0].state_dict()


def test_a_trainer_window_is_all_or_nothing(fp16_on_cpu):
    m = model(precision=PrecisionPolicy("fp16"))
    before = [p.clone() for p in m.net.parameters()]
    optims = {
        name: optim(param_groups=[NNParamGroupSpec(name_pattern=pattern)])
        for name, pattern in (("body", "layers.0.*"), ("head", "layers.1.*"))
    }
    events = []

    def objective(ctx):
        x, y = ctx.batch
        logits = ctx.full_precision(ctx.model.net(x))
        loss = F.cross_entropy(logits, y, reduction="sum")
        head = ctx.model.net.layers[1].bias.sum()  # only the head's gradient overflows
        return ObjectiveResult([LossTerm("loss", loss + head * 1e37 - 1e37 * head.detach(), 8)])

    class Events(Callback):
        def on_optimizer_update(self, ctx, event):
            events.append(event)

    run = Trainer(m).train(
        NNTrainerParams(n_epochs=1, train_loader=batches((8,)), seed=0, optims=optims),
        objective=objective, callbacks=[Events()],
    )  # fmt: skip
    assert events == []
    assert all(torch.equal(a, b) for a, b in zip(before, m.net.parameters()))
    state = NNCheckpoint.load_training_state(run.id, Checkpoints.LAST)
    assert state["scaler_state"]["scale"] == 2.0**9


def test_trainer_step_functions_own_full_precision(tmp_path, fp16_on_cpu):
    params = NNTrainerParams(n_epochs=1, train_loader=batches(), optims={"all": optim()})
    with pytest.raises(ValueError, match="trainer_step_fn owns its updates in full precision"):
        Trainer(model(precision=PrecisionPolicy("fp16"))).train(
            params, trainer_step_fn=lambda ctx: NNEvaluationDataPoint(loss=0.0)
        )
    assert not list(tmp_path.iterdir())


def test_the_trainer_does_not_apply_the_legacy_flag(monkeypatch):
    monkeypatch.setattr("nnx.precision._device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("nnx.precision._obstacle", lambda mode, kind: None)
    params = NNTrainerParams(n_epochs=1, train_loader=batches(), optims={"all": optim()}, seed=0)
    with pytest.warns(RuntimeWarning, match="does not apply the legacy mixed_precision flag"):
        run = Trainer(model(mixed_precision=True)).train(params, objective=supervised_objective())
    assert run.precision.effective == "fp32"


# -- CUDA ------------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("owner", OWNERS)
def test_reduced_runs_on_cuda(mode, owner):
    reduced = model(precision=PrecisionPolicy(mode), device=Devices.CUDA)
    reference = model(device=Devices.CUDA)
    run = reduced.train(train_params(), **OWNERS[owner]())
    other = reference.train(train_params(), salt="reference", **OWNERS[owner]())
    assert (run.precision.effective, run.precision.device_type) == (mode, "cuda")
    assert all(isinstance(flag, bool) for flag in run.precision.tf32.values())
    assert_close_to_reference(reduced, reference, (run, other), mode)


@cuda
def test_the_legacy_flag_is_fp16_training_on_cuda_and_full_precision_inference():
    m = model(mixed_precision=True, device=Devices.CUDA)
    dtypes = []
    m.net.register_forward_hook(lambda *a: dtypes.append(a[-1].dtype))
    run = m.train(train_params(n_epochs=1))
    assert run.precision.effective == "fp16"
    assert dtypes[0] is torch.float16
    dtypes.clear()
    m.predict(batches()[0][0])
    assert set(dtypes) == {torch.float32}


@cuda
def test_an_overflow_on_cuda_is_a_quiet_skip():
    m = model(precision=PrecisionPolicy("fp16"), device=Devices.CUDA)
    counts = CountsUpdates()
    m.train(
        train_params(n_epochs=1, optim=optim(max_lr=1e-3)), callbacks=[counts],
        objective=lambda ctx: ObjectiveResult([
            LossTerm("t", ctx.full_precision(ctx.model.net(ctx.batch[0].cuda())).sum() * 1e3, 1)
        ]),
    )  # fmt: skip
    assert len(counts.events) < 3  # the initial scale of 2**16 overflows float16 gradients
