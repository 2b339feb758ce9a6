"""Configurations of real stored runs: read back by the store, by hand, and trained again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nnx import (
    Activations,
    Losses,
    ModelSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParams,
    NNRun,
    NNTrainParams,
    OptimizerFactorySpec,
    RunConfig,
    RuntimeModule,
    register_optimizer_factory,
    unregister_optimizer_factory,
)
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)


def model():
    torch.manual_seed(0)
    net = NNParams(
        input_dim=4, output_dim=2, hidden_dims=[5], dropout_prob=0.0, activation=Activations.TANH
    )
    return NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))


def train(optim, **values):
    return NNTrainParams(n_epochs=2, seed=1, optim=optim, train_loader=loader(), **values)


def test_a_stored_configuration_trains_again_to_the_same_weights(here):
    optim = NNOptimParams.builder().adamw(max_lr=0.05).grad_clip(1.0).build()
    first = model()
    run = first.train(train(optim, data_id="1e5"), salt="2e-3")
    config = RunConfig.from_yaml(here / "runs" / run.id / "run.yaml")
    assert config.id == run.id
    assert (config.train.data_id, config.salt) == ("1e5", "2e-3")
    again = config.with_data(loader())
    torch.manual_seed(0)
    second = NNModel(again.net, again.model)
    rerun = second.train(dataclasses.replace(again.train, overwrite_existing=True), salt=again.salt)
    assert rerun.id == run.id
    for a, b in zip(first.net.parameters(), second.net.parameters()):
        assert torch.equal(a, b)


def test_a_run_of_a_registered_optimizer_is_read_without_it(here):
    def rprop(groups, config):
        for group in groups:
            group.pop("weight_decay")
        return torch.optim.Rprop(groups, etas=config["etas"])

    spec = OptimizerFactorySpec("test.rprop", 1, {"etas": [0.5, 1.2]})
    optim = NNOptimFactoryParams(factory=spec, max_lr=0.01)
    with pytest.raises(ValueError, match=r"no optimizer factory is registered as test\.rprop@v1"):
        model().train(train(optim))
    assert list(here.iterdir()) == [], "an unknown factory leaves nothing behind"
    register_optimizer_factory("test.rprop", 1, rprop)
    try:
        run = model().train(train(optim))
    finally:
        assert unregister_optimizer_factory("test.rprop", 1)
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id
    assert loaded.train.optim == optim
    text = str(loaded)
    assert "test.rprop@v1" in text
    assert "momentum" not in text


def test_a_run_shows_how_its_net_is_built():
    stored = NNModelParams(net=ModelSpec("acme.encoder", 2, {"width": 8}, seed=3))
    text = str(NNRun(net=None, model=stored, train=NNTrainParams(n_epochs=1)))
    for shown in ("acme.encoder@v2", "model.net.config.width", "model.net.seed"):
        assert shown in text
    assert "dropout" not in text
    wrapped = NNModelParams(net=RuntimeModule.of(torch.nn.Linear(2, 1)))
    text = str(NNRun(net=None, model=wrapped, train=NNTrainParams(n_epochs=1)))
    assert "torch.nn.modules.linear.Linear" in text
    assert "model.net.reconstructible" in text


def test_a_monitor_and_a_metric_are_part_of_the_stored_run(here):
    from nnx import MetricSpec, MonitorSpec

    watched = train(
        NNOptimParams.builder().adam(max_lr=0.05).build(),
        metrics=[MetricSpec("nll")],
        monitor=MonitorSpec(metric="nll", split="train"),
    )
    run = model().train(watched)
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id
    assert loaded.train.monitor == watched.monitor
    assert loaded.train.monitor.mode is None
    assert loaded.idps[-1].selection.monitor.mode == "min"
