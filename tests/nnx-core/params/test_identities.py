"""Stored forms that carry an identity, as the original system writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    CompileSpec,
    Losses,
    MetricSpec,
    ModelSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
    PrecisionPolicy,
    RuntimeModule,
    TaskSpec,
)
from nnx.params import NNOptimParams
from torch import nn

WANTED = json.loads((Path(__file__).parents[2] / "data" / "identities.json").read_text())


def net(**changes):
    given = {"input_dim": 6, "output_dim": 3, "hidden_dims": [8], "dropout_prob": 0.0}
    return NNParams(**{**given, "activation": Activations.RELU, **changes})


def model(**changes):
    return NNModelParams(**{"net": Nets.FEED_FWD, "loss": Losses.CROSS_ENTROPY, **changes})


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("k", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def own():
    Own.__module__, Own.__qualname__ = "acme.nets", "Own"
    return NNModel(module=Own(), params=NNModelParams(loss=Losses.CROSS_ENTROPY)).params


CASES = {
    "precision_fp32_explicit": lambda: (net(), model(precision=PrecisionPolicy("fp32"))),
    "precision_fp16_fallback": lambda: (
        net(),
        model(precision=PrecisionPolicy("fp16", fallback="fp32")),
    ),
    "multilabel_by_labels": lambda: (
        net(output_dim=2),
        model(loss=Losses.BINARY_CROSS_ENTROPY, task=TaskSpec.multilabel(labels=["a", "b"])),
    ),
    "runtime_module": lambda: (None, own()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_stored_form_and_the_id_are_those_of_the_original(case):
    net_params, params = CASES[case]()
    run = NNRun(net=net_params, model=params, train=NNTrainParams(n_epochs=2, seed=1))
    assert run.id == WANTED[case]["id"]
    assert run.state() == WANTED[case]["state"]


# -- precision -----------------------------------------------------------------------


def test_a_policy_states_its_mode_and_a_fallback_that_is_not_the_default():
    assert PrecisionPolicy("bf16").state() == {"mode": "bf16"}
    assert PrecisionPolicy("bf16", "fp32").state() == {"mode": "bf16", "fallback": "fp32"}
    earlier = {"mode": "bf16", "fallback": "error"}
    assert PrecisionPolicy.from_state(earlier) == PrecisionPolicy("bf16")


def test_full_precision_is_no_policy_whatever_its_fallback():
    for policy in (PrecisionPolicy("fp32"), PrecisionPolicy("fp32", fallback="fp32")):
        assert model(precision=policy) == model()
        assert model(precision=policy).state() == model().state()


def test_the_older_flag_is_dropped_beside_fp16_and_refused_beside_anything_else():
    fp16 = PrecisionPolicy("fp16")
    assert model(mixed_precision=True, precision=fp16) == model(precision=fp16)
    for mode in ("bf16", "fp32"):
        with pytest.raises(ValueError, match=f'precision=PrecisionPolicy."{mode}".*leave mixed_'):
            model(mixed_precision=True, precision=PrecisionPolicy(mode))
    earlier = {**model().state(), "mixed_precision": True, "precision": {"mode": "bf16"}}
    assert NNModelParams.from_state(earlier) == model(precision=PrecisionPolicy("bf16"))


def test_no_state_holds_an_option_at_its_default():
    assert CompileSpec().state() == {}
    assert CompileSpec(mode="default").state() == {"mode": "default"}
    earlier = {"backend": "inductor", "mode": None, "fullgraph": False, "dynamic": None}
    assert CompileSpec.from_state({**earlier, "on_failure": "error"}) == CompileSpec()
    assert MetricSpec("nll").state() == {"id": "nll", "version": 1}
    assert TaskSpec.multilabel(2).state() == {"version": 1, "kind": "multilabel", "num_outputs": 2}
    assert set(NNOptimParams.builder().adam(max_lr=0.1).build().state()) == {
        "name", "max_lr", "momentum", "weight_decay",
    }  # fmt: skip


# -- tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_labels_tell_the_width_of_a_task_that_has_one_output_for_each(kind):
    task = getattr(TaskSpec, kind)(labels=["a", "b"])
    assert task.num_outputs == 2
    assert (
        task == TaskSpec(kind, labels=("a", "b")) == getattr(TaskSpec, kind)(2, labels=list("ab"))
    )
    earlier = {"version": 1, "kind": kind, "labels": ["a", "b"]}
    assert TaskSpec.from_state(earlier) == task


def test_labels_of_classes_leave_the_width_open():
    assert TaskSpec.categorical(labels=["a", "b"]).num_outputs is None


def test_a_width_that_labels_tell_is_checked_against_the_net():
    with pytest.raises(ValueError, match="2"):
        NNModel(
            net(output_dim=3),
            model(loss=Losses.BINARY_CROSS_ENTROPY, task=TaskSpec.multilabel(labels=["a", "b"])),
        )


# -- modules -------------------------------------------------------------------------


def fingerprint(module, layout):
    return hashlib.md5(json.dumps([layout, repr(module)]).encode()).hexdigest()


def test_a_topology_is_the_digest_of_all_that_a_module_saves_and_of_its_repr():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = [[n, list(t.shape), str(t.dtype)] for n, t in module.state_dict().items()]
    assert len(layout) == 7  # buffers too
    descriptor = RuntimeModule.of(module)
    assert descriptor.topology == fingerprint(module, layout)
    assert descriptor.module == "torch.nn.modules.container.Sequential"
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    both = [["0.weight", [2, 2], "torch.float32"], ["1.weight", [2, 2], "torch.float32"]]
    assert RuntimeModule.of(tied).topology == fingerprint(tied, both)
    lazy = nn.LazyLinear(3)
    waiting = [["weight", None, "torch.float32"], ["bias", None, "torch.float32"]]
    assert RuntimeModule.of(lazy).topology == fingerprint(lazy, waiting)
    half = nn.Linear(1, 1).half()
    layout = [["weight", [1, 1], "torch.float16"], ["bias", [1], "torch.float16"]]
    assert RuntimeModule.of(half).topology == fingerprint(half, layout)


def test_descriptors_say_their_kind_and_whether_they_can_be_rebuilt():
    wrapped = RuntimeModule.of(nn.Linear(1, 1))
    assert (wrapped.kind, wrapped.reconstructible) == ("runtime", False)
    assert (ModelSpec("a").kind, ModelSpec("a").reconstructible) == ("registered", True)
    assert list(wrapped.state()) == ["kind", "module", "topology", "reconstructible"]
    assert RuntimeModule.from_state(wrapped.state()) == wrapped
    with pytest.raises(ValueError, match="reconstructible must be False, not True"):
        RuntimeModule.from_state({**wrapped.state(), "reconstructible": True})
