"""The run ids of the original system, by the constructor and after a round trip."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import nnx
import pytest
import yaml
from nnx import (
    MonitorSpec,
    NNModelParams,
    NNOptimParams,
    NNOptimParamsBuilder,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNSchedulerParamsBuilder,
    NNTrainerParams,
    NNTrainParams,
    NNTransformerParams,
    NNTransformerParamsBuilder,
    Optims,
)
from nnx.params import run_id, run_state

DATA = Path(__file__).parents[2] / "data"
ROWS = json.loads((DATA / "run_ids.json").read_text())
RUNS = [row for row in ROWS if "train" in row]


def build(expression: str):
    names = {
        name: getattr(nnx, name) for name in dir(nnx) if name[0].isupper() and name in expression
    }
    return eval(expression, {"__builtins__": {}}, names)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["name"])
def test_the_golden_state_and_id_are_reproduced(row):
    net, model, train = build(row["net"]), build(row["model"]), build(row["train"])
    partial = {"model": model.state()}
    if net is not None:
        partial["net"] = net.state()
    partial["train"] = train.state()
    assert hashlib.md5(str(partial).encode()).hexdigest() == row["id"]
    assert run_state(net=net, model=model, train=train) == row["state"]
    salted = run_state(net=net, model=model, train=train, salt="replicate-2")
    assert salted["id"] == run_id(salted) == row["salted_id"]


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["name"])
def test_the_id_survives_from_state(row):
    state = row["state"]
    again = run_state(
        net=NNParams.resolve_from_state(state["net"]) if "net" in state else None,
        model=NNModelParams.from_state(state["model"]),
        train=NNTrainParams.from_state(state["train"]),
    )
    assert again == state
    assert list(again["train"]) == list(state["train"])


def through_builders(optim, scheduler):
    if type(optim) is NNOptimParams:
        optim = NNOptimParamsBuilder.from_params(optim).build()
    return optim, NNSchedulerParamsBuilder.from_params(scheduler).build()


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["name"])
def test_the_id_is_the_same_through_the_builders(row):
    net, model, train = build(row["net"]), build(row["model"]), build(row["train"])
    if isinstance(net, NNTransformerParams):
        net = NNTransformerParamsBuilder.from_params(net).build()
    optim, scheduler = through_builders(train.optim, train.scheduler)
    train = dataclasses.replace(train, optim=optim, scheduler=scheduler)
    assert run_state(net=net, model=model, train=train)["id"] == row["id"]


def spelled_out(value):
    """The same value through its constructor, field by field."""
    return type(value)(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)})


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["name"])
def test_the_id_is_the_same_through_the_direct_constructors(row):
    net, model, train = build(row["net"]), build(row["model"]), build(row["train"])
    parts = {"optim": spelled_out(train.optim), "scheduler": spelled_out(train.scheduler)}
    train = NNTrainParams(
        **{f.name: getattr(train, f.name) for f in dataclasses.fields(train)} | parts
    )
    net = None if net is None else spelled_out(net)
    assert run_state(net=net, model=spelled_out(model), train=train) == row["state"]


def test_a_transformer_has_the_same_id_by_the_constructor_and_by_the_builder():
    (row,) = (row for row in RUNS if row["name"] == "transformer")
    direct = NNTransformerParams(
        input_dim=64, output_dim=64, dropout_prob=0.0, vocab_size=64, n_layers=2, n_heads=2,
        d_model=32, max_seq_len=16,
    )  # fmt: skip
    assert direct == build(row["net"])
    assert direct.state() == row["state"]["net"]


def test_the_trainer_row_is_reproduced_by_builder_constructor_and_state():
    (row,) = (row for row in ROWS if "trainer" in row)
    built = build(row["trainer"])
    group = {name: [NNParamGroupSpec(name_pattern=f"{name}.*")] for name in "GD"}
    adam = {"name": Optims.ADAM, "max_lr": 2e-4, "momentum": (0.5, 0.999), "weight_decay": 0.0}
    direct = NNTrainerParams(
        n_epochs=50,
        optims={name: NNOptimParams(**adam, param_groups=group[name]) for name in "GD"},
        schedulers={
            "G": NNSchedulerParams(min_lr=1e-7, factor=0.5, patience=2, cooldown=1, threshold=1e-3)
        },
    )
    assert direct == built
    for params in (built, direct, NNTrainerParams.from_state(built.state())):
        assert params.state() == row["trainer_state"]
        assert str(params.state()) == str(row["trainer_state"])
    assert list(built.optims) == ["G", "D"], "optimizers are built in the order they were named"


ORIGINAL = {
    "csv": """
model: {device: cpu, loss: cross_entropy, net: feed_fwd}
net: {activation: relu, dropout_prob: 0.1, hidden_dims: '[8]', input_dim: 6, output_dim: 3}
train:
  n_epochs: 8
  optim: {max_lr: 0.01, momentum: '(0.9, 0.999)', name: adam, weight_decay: 5.0e-05}
  scheduler: {cooldown: 2, factor: 0.95, min_lr: 1.0e-07, patience: 8, threshold: 0.001}
  seed: 3
id: 94b2773bc8b80591cf7a806eda81639a
""",
    "monitor": """
model: {device: cpu, loss: cross_entropy, net: feed_fwd}
net: {activation: relu, dropout_prob: 0.1, hidden_dims: '[8]', input_dim: 6, output_dim: 3}
train:
  metrics: [{id: nll, version: 1}, {id: brier, version: 1}]
  monitor: {metric: nll, min_delta: 0.0, mode: null, on_missing: skip, on_nonfinite: skip, split: val}
  n_epochs: 3
  optim: {max_lr: 0.01, momentum: '(0.9, 0.999)', name: adam, weight_decay: 5.0e-05}
  scheduler: {cooldown: 2, factor: 0.95, min_lr: 1.0e-07, patience: 8, threshold: 0.001}
  seed: 5
id: 8cc9d376362d1cd859dd8512be8e0e0b
""",
}


@pytest.mark.parametrize("kind", ORIGINAL)
def test_a_run_file_of_the_original_system_keeps_its_id_whatever_its_key_order(kind):
    state = yaml.safe_load(ORIGINAL[kind])
    again = run_state(
        net=NNParams.resolve_from_state(state["net"]),
        model=NNModelParams.from_state(state["model"]),
        train=NNTrainParams.from_state(state["train"]),
    )
    assert again == state


def test_a_monitor_stores_the_direction_it_knows_and_leaves_the_other_open():
    assert MonitorSpec(metric="loss").state()["mode"] == "min"
    assert MonitorSpec(metric="nll").state()["mode"] is None
