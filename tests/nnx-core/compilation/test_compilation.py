"""Fits whose forward goes through torch.compile."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from nnx import (
    Callback,
    CompileFailed,
    CompileRecord,
    CompileSpec,
    Losses,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNRun,
    NNTrainParams,
    Optims,
    PrecisionPolicy,
    supervised_objective,
)
from nnx.compilation.forward import CompiledForward
from nnx.engine.request import FitRequest
from nnx.enums import Checkpoints
from nnx.records import NNEvaluationDataPoint
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.compile.*:UserWarning")


@pytest.fixture(autouse=True)
def runs_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()


def fail_to_compile(graph, inputs):
    raise RuntimeError("this backend compiles nothing")


def fail_in_backward(graph, inputs):
    class Output(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("the backward does not compile")

    def run(*args):
        return tuple(Output.apply(out) for out in graph(*args))

    return run


torch._dynamo.register_backend(fail_to_compile, name="nnx_test_fails")
torch._dynamo.register_backend(fail_in_backward, name="nnx_test_fails_in_backward")


def model(seed=0, dropout=0.0, **params):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=dropout),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, **params),
    )


def batches(sizes=(8, 8)):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def train_params(**fields):
    optim = NNOptimParams(name=Optims.SGD, max_lr=0.1, weight_decay=0.0, momentum=0.9)
    return NNTrainParams(
        **{"n_epochs": 2, "train_loader": batches(), "val_loader": batches((5,)), "seed": 0,
           "optim": optim, **fields}
    )  # fmt: skip


EAGER = CompileSpec(backend="eager")


def weights(m):
    return [p.detach().clone() for p in m.net.parameters()]


# -- what a compiled fit is ------------------------------------------------------------------


def test_a_compiled_fit_trains_the_same_weights_and_records_a_full_capture():
    compiled, plain = model(), model()
    run = compiled.train(train_params(), compile=EAGER)
    plain.train(train_params(), salt="eager")
    assert all(torch.equal(a, b) for a, b in zip(weights(compiled), weights(plain)))
    record = run.compile
    assert (record.effective, record.capture, record.graph_breaks) == ("compiled", "full", 0)
    assert record.restart is None
    assert record.torch_version == str(torch.__version__)
    assert record.requested["backend"] == "eager"


def test_compilation_is_no_part_of_the_run_id():
    assert (
        model().train(train_params(), compile=EAGER).id
        == model().train(train_params(overwrite_existing=True)).id
    )


def test_the_record_is_on_disk_wherever_the_run_says_what_it_did():
    run = model().train(train_params(), compile=EAGER)
    assert NNRun.load(run.id).compile == run.compile
    metadata = yaml.safe_load(Path(f"runs/{run.id}/metadata.yaml").read_text())
    assert metadata["compile"]["effective"] == "compiled"
    state = NNCheckpoint.load_training_state(run.id, Checkpoints.LAST)
    assert CompileRecord.from_record(state["compile"]) == run.compile
    assert "compile" not in yaml.safe_load(Path(f"runs/{run.id}/run.yaml").read_text())


def test_the_canonical_module_stays_canonical():
    m = model()
    net = m.net
    seen = []

    class Look(Callback):
        def on_epoch_end(self, ctx):
            assert ctx.model.net is net
            owned = {id(p) for g in ctx.optimizer.param_groups for p in g["params"]}
            seen.append(owned == {id(p) for p in net.parameters()})

    run = m.train(train_params(), compile=EAGER, callbacks=[Look()])
    assert seen == [True, True]
    assert m.net is net
    assert not any("_orig_mod" in key for key in net.state_dict())
    assert list(NNCheckpoint.load(run.id, Checkpoints.LAST).net_state) == list(net.state_dict())


def test_validation_goes_through_the_wrapper_and_everything_after_the_fit_is_eager():
    m = model()
    calls = {"compiled": 0}
    original = CompiledForward.__call__

    def count(self, *args, **kwargs):
        calls["compiled"] += 1
        return original(self, *args, **kwargs)

    class Asks(Callback):
        def on_epoch_end(self, ctx):
            ctx.model.predict(batches()[0][0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledForward, "__call__", count)
        m.train(train_params(n_epochs=1), compile=EAGER)
        assert calls["compiled"] == 3  # two training batches, one validation batch
        model().train(train_params(n_epochs=1), compile=EAGER, salt="asks", callbacks=[Asks()])
        assert calls["compiled"] == 3 + 4
        m.evaluate(batches((4,)))
        m.predict(batches()[0][0])
        assert calls["compiled"] == 7
    assert m.compiled is None


def test_a_resume_builds_a_fresh_wrapper():
    first = model().train(train_params(n_epochs=1), compile=EAGER)
    params = train_params(n_epochs=1, resume_from_run_id=first.id)
    again = model().train(params, compile=EAGER)
    assert again.compile.effective == "compiled"
    straight = model()
    straight.train(train_params(n_epochs=2), compile=EAGER)
    last = NNCheckpoint.load(again.id, Checkpoints.LAST)
    for key, value in straight.net.state_dict().items():
        assert torch.equal(last.net_state[key], value)


def test_a_net_with_a_graph_break_is_a_partial_capture(monkeypatch):
    from nnx.nets import FeedFwdNN

    original = FeedFwdNN.forward

    def broken(self, *args):
        torch._dynamo.graph_break()
        return original(self, *args)

    monkeypatch.setattr(FeedFwdNN, "forward", broken)
    run = model().train(train_params(), compile=EAGER)
    assert run.compile.capture == "partial"
    assert run.compile.graph_breaks >= 1

    torch._dynamo.reset()
    spec = CompileSpec(backend="eager", fullgraph=True)
    with pytest.raises(CompileFailed) as failure:
        model().train(train_params(), compile=spec, salt="full")
    assert failure.value.record.effective == "failed"


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "recompile_limit"),
    reason="this torch compiles again for every module, so each capture is seen",
)
def test_a_graph_from_the_process_wide_cache_leaves_the_capture_unknown():
    model().train(train_params(), compile=EAGER)
    run = model().train(train_params(), compile=EAGER, salt="again")
    assert run.compile.effective == "compiled"
    assert run.compile.capture is None


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="inductor is built for older Pythons")
@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "recompile_limit"),
    reason="inductor of this torch flushes subnormal numbers in the whole process",
)
def test_inductor_trains_close_to_eager():
    compiled, plain = model(), model()
    run = compiled.train(train_params(n_epochs=1), compile=CompileSpec())
    plain.train(train_params(n_epochs=1), salt="eager")
    assert run.compile.backend == "inductor"
    assert run.compile.effective == "compiled"
    for a, b in zip(weights(compiled), weights(plain)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- failures --------------------------------------------------------------------------------

FAILS = "nnx_test_fails"


def test_a_compile_failure_stops_the_fit_and_says_the_way_out():
    m = model()
    before = weights(m)
    with pytest.raises(
        CompileFailed, match=r"train epoch 0, batch 0.*compiles nothing.*on_failure"
    ) as e:
        m.train(train_params(), compile=CompileSpec(backend=FAILS))
    record = e.value.record
    assert (record.effective, record.restart["stage"]) == ("failed", "forward")
    assert record.restart["phase"] == "train"
    assert (record.restart["epoch"], record.restart["batch"]) == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(weights(m), before))
    assert m.compiled is None


def test_on_failure_eager_finishes_the_run_exactly_as_an_eager_one():
    fallen, plain = model(dropout=0.5), model(dropout=0.5)
    run = fallen.train(train_params(), compile=CompileSpec(backend=FAILS, on_failure="eager"))
    plain.train(train_params(), salt="eager")
    assert all(torch.equal(a, b) for a, b in zip(weights(fallen), weights(plain)))
    record = run.compile
    assert record.effective == "eager"
    assert dict(record.restart) == {
        "stage": "forward", "phase": "train", "epoch": 0, "batch": 0,
        "error": record.restart["error"],
    }  # fmt: skip
    assert "compiles nothing" in record.restart["error"]
    assert NNRun.load(run.id).compile == record


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize("policy", ["error", "eager"])
def test_a_failed_call_leaves_rng_and_buffers_as_one_eager_call_or_none(policy):
    net, expected, x = WithBuffer(), WithBuffer(), torch.ones(2, 3)
    expected.load_state_dict(net.state_dict())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    forward = CompiledForward(net, CompileSpec(backend=FAILS, on_failure=policy))
    if policy == "error":
        with forward, pytest.raises(CompileFailed):
            forward(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert net.calls == 0
        return
    with forward:
        output = forward(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert torch.equal(output, expected(x))
    assert torch.equal(torch.get_rng_state(), after)
    assert net.calls == 1


@pytest.mark.parametrize("policy", ["error", "eager"])
def test_the_forwards_own_error_propagates_unchanged(policy):
    net = WithBuffer()
    state = torch.get_rng_state()
    forward = CompiledForward(net, CompileSpec(backend="eager", on_failure=policy))
    with forward, pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        forward(torch.ones(2, 5))
    assert not isinstance(error.value, CompileFailed)
    assert forward.record.effective == "pending"
    assert torch.equal(torch.get_rng_state(), state)
    assert net.calls == 0


def test_a_failed_backward_is_recorded_and_propagates():
    m = model()
    with pytest.raises(RuntimeError, match="the backward does not compile") as error:
        m.train(
            train_params(),
            compile=CompileSpec(backend="nnx_test_fails_in_backward", on_failure="eager"),
        )
    assert not isinstance(error.value, CompileFailed)


def test_the_recorded_stage_of_a_failed_backward(monkeypatch):
    forwards = []
    original = CompiledForward.__init__

    def remember(self, *args):
        original(self, *args)
        forwards.append(self)

    monkeypatch.setattr(CompiledForward, "__init__", remember)
    with pytest.raises(RuntimeError, match="the backward does not compile"):
        model().train(train_params(), compile=CompileSpec(backend="nnx_test_fails_in_backward"))
    (forward,) = forwards
    assert forward.record.effective == "failed"
    assert forward.record.restart["stage"] == "backward"
    assert forward.record.restart["phase"] == "train"


def test_a_failure_after_the_last_commit_shows_in_the_attempt_only():
    from nnx.provenance import ExperimentManifest

    m = model()

    class Breaks(Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch == 1:
                ctx.model.compiled._compiled = lambda *a: (_ for _ in ()).throw(
                    RuntimeError("late")
                )

    params = train_params()
    with pytest.raises(CompileFailed, match="train epoch 1, batch 0"):
        m.train(
            params, compile=EAGER, callbacks=[Breaks()],
            provenance=ExperimentManifest.for_model(m, train=params),
        )  # fmt: skip
    (run_id,) = [run.id for run in NNRun.all()]
    attempt = json.loads(Path(f"runs/{run_id}/attempt.json").read_text())
    assert attempt["compile"]["effective"] == "failed"
    state = NNCheckpoint.load_training_state(run_id, Checkpoints.LAST)
    assert state["compile"]["effective"] == "compiled"


LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)


@torch._dynamo.config.patch(**{LIMIT: 2})
def test_every_fit_gets_the_recompile_limit_afresh():
    spec = CompileSpec(backend="eager", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(4):  # each with one training and one validation entry
            run = model().train(
                train_params(n_epochs=1, train_loader=batches((4 + index,))),
                compile=spec, salt=str(index),
            )  # fmt: skip
            assert run.compile.effective == "compiled"
        if not hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
            return  # this torch goes on eagerly beyond its limit, and says so in its log
        with pytest.raises(CompileFailed, match=r"(?i)recompile"):
            model().train(
                train_params(n_epochs=1, train_loader=batches((21, 22, 23, 24))),
                compile=spec, salt="too many",
            )  # fmt: skip
    assert getattr(torch._dynamo.config, LIMIT) == 2
    gc.collect()


# -- refusals --------------------------------------------------------------------------------


class ChangesTopology(Callback):
    def checkpoint_transforms(self):
        return ()


def step(ctx):
    return NNEvaluationDataPoint(loss=0.0)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (model, {"train_step_fn": step}, "train_step_fn is another step"),
        (model, {"objective": supervised_objective()}, "objective is another step"),
        (
            lambda: model(precision=PrecisionPolicy("bf16")),
            {},
            "needs full precision, and this run resolves to bf16",
        ),
        (model, {"callbacks": [ChangesTopology()]}, "ChangesTopology changes the net's topology"),
        (
            lambda: NNModel(
                module=nn.Linear(6, 3), params=NNModelParams(loss=Losses.CROSS_ENTROPY)
            ),
            {},
            "needs a built-in net",
        ),
    ],
)
def test_anything_else_is_refused_before_a_run_is_reserved(tmp_path, make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make().train(train_params(), compile=EAGER, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("net", [Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT])
def test_graph_nets_are_refused(net):
    from nnx.engine.compiled import check_compile

    m = model()
    object.__setattr__(m.params, "net", net)
    request = FitRequest(model=m, params=train_params(), compile=EAGER)
    with pytest.raises(ValueError, match=f"graph nets \\({net}\\) are not covered"):
        check_compile(request, (), m.resolved_precision)


def test_the_request_must_be_a_spec(tmp_path):
    with pytest.raises(TypeError, match="compile must be a CompileSpec or None, not bool"):
        model().train(train_params(), compile=True)
    assert not list(tmp_path.iterdir())


def test_a_record_is_plain_data_and_comes_back():
    record = CompileRecord(
        "inductor", {"mode": None, "fullgraph": False, "dynamic": None}, "eager", "2.6.0",
        effective="eager", graph_breaks=2, restart={"stage": "forward", "error": "no"},
    )  # fmt: skip
    assert CompileRecord.from_record(json.loads(json.dumps(record.record()))) == record
    assert record.capture == "partial"
    with pytest.raises(ValueError, match=r"CompileRecord\.effective"):
        CompileRecord("inductor", {}, "error", "2.6.0", effective="fast")


def test_a_spec_states_what_is_not_the_default():
    assert CompileSpec().state() == {}
    assert CompileSpec(backend="eager", dynamic=False).state() == {
        "backend": "eager",
        "dynamic": False,
    }
    for spec in (CompileSpec(), CompileSpec(fullgraph=True, on_failure="eager")):
        assert CompileSpec.from_state(spec.state()) == spec


@pytest.mark.parametrize("inner", [None, CompileSpec(backend="eager")])
def test_a_fit_inside_a_compiled_one_does_not_end_its_compiling(inner):
    m, seen = model(), []

    class Trains(Callback):
        def on_epoch_begin(self, ctx):
            outer = m.compiled
            seen.append(outer)
            if ctx.epoch == 1:
                nested = train_params(n_epochs=1, data_id="nested")
                m.train(nested, compile=inner, callbacks=[Sees()])
                assert m.compiled is outer

    class Sees(Callback):
        def on_epoch_begin(self, ctx):
            seen.append(m.compiled)

    run = m.train(
        train_params(n_epochs=3), compile=CompileSpec(backend="eager"), callbacks=[Trains()]
    )
    first, second, nested, third = seen
    assert first is second is third is not None
    assert (nested is None) == (inner is None)
    assert nested is not first
    assert m.compiled is None
    assert run.compile.effective == "compiled"
