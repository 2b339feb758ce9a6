"""A declared split and a fitted standardizer, from the table to a run and its predictions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNDatasetBase,
    NNModel,
    NNModelParams,
    NNParams,
    NNTabularDataset,
    NNTrainParams,
    TaskSpec,
)
from nnx.data_splits import SplitManifest, plan_split
from nnx.preprocessing import Standardizer
from nnx.provenance import ExperimentManifest, hash_file
from torch.utils.data import DataLoader, Subset, TensorDataset


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")


def table():
    generator = np.random.default_rng(0)
    age = generator.integers(20, 70, 60)
    return pd.DataFrame(
        {
            "row_id": [f"r{i}" for i in range(60)],
            "patient": np.repeat(np.arange(20), 3),
            "age": age,
            "income": generator.normal(1000, 300, 60),
            "label": (age > 45).astype(int),
            "cost": age * 10.0 + generator.normal(size=60),
        }
    )


def model(task=None, loss=Losses.CROSS_ENTROPY, outputs=2):
    torch.manual_seed(0)
    return NNModel(
        net_params=NNParams(
            input_dim=2, output_dim=outputs, hidden_dims=[8], dropout_prob=0.0,
            activation=Activations.TANH,
        ),
        params=NNModelParams(net=Nets.FEED_FWD, loss=loss, task=task),
    )  # fmt: skip


def test_a_planned_split_and_its_standardizer_are_recorded_and_replayed():
    df = table()
    df.to_csv("rows.csv", index=False)
    source = hash_file("rows.csv")
    plan_split(
        df["row_id"], strategy="group", groups=df["patient"], proportions=(0.7, 0.15, 0.15),
        seed=7, source=source,
    ).save("split.json")  # fmt: skip
    plan = SplitManifest.load("split.json")
    dataset = NNTabularDataset(
        df=df, feature_cols=["age", "income"], target_col="label", batch_sizes=(8, None, None),
        split=plan, id_col="row_id", source_identity=source, standardize=True,
    )  # fmt: skip
    trained = model()
    params = NNTrainParams(
        n_epochs=3, train_loader=dataset.train_loader, val_loader=dataset.val_loader, seed=1
    )
    manifest = ExperimentManifest.for_model(
        trained, train=params, data={"train": source}, splits={"main": plan},
        preprocessing=dataset.standardizer,
    )  # fmt: skip
    run = trained.train(params, provenance=manifest)
    assert run.provenance.manifest.splits["main"] == plan.identity()
    assert run.provenance.manifest.splits["main"].verified
    again = ExperimentManifest.for_model(
        trained, train=params, data={"train": source},
        splits={"main": SplitManifest.from_json(plan.to_json())},
        preprocessing=Standardizer.from_json(dataset.standardizer.to_json()),
    )  # fmt: skip
    assert again.fingerprint() == manifest.fingerprint()
    other = ExperimentManifest.for_model(
        trained, train=params, data={"train": source}, splits={"main": plan},
        preprocessing=Standardizer((0.0, 0.0), (1.0, 1.0), ("age", "income")),
    )  # fmt: skip
    assert other.fingerprint() != manifest.fingerprint()

    # At inference the reloaded standardizer is applied once to raw rows.
    dataset.standardizer.save("standardizer.json")
    prepared = Standardizer.load("standardizer.json").transform(df.iloc[[3, 4]])
    raw = (df.iloc[[3, 4]][["age", "income"]].to_numpy() - dataset.standardizer.mean) / (
        dataset.standardizer.scale
    )
    by_hand = trained.net(torch.tensor(raw, dtype=torch.float32)).detach().numpy()
    assert trained.predict(prepared).logits == pytest.approx(by_hand, abs=1e-6)


def test_a_split_adds_nothing_to_the_run():
    df = table()

    def run_id(**options):
        dataset = NNTabularDataset(
            df=df, feature_cols=["age", "income"], target_col="label", **options
        )
        params = NNTrainParams(
            n_epochs=1, train_loader=dataset.train_loader, seed=1, overwrite_existing=True
        )
        return model().train(params).id

    plan = plan_split(df["row_id"], strategy="stratified", labels=df["label"], seed=1)
    assert run_id(split=plan, id_col="row_id") == run_id(seed=3)


def test_a_regression_trains_on_a_floating_target():
    dataset = NNTabularDataset(
        df=table(), feature_cols=["age", "income"], target_col="cost", target_dtype=torch.float32,
        standardize=True, seed=1,
    )  # fmt: skip
    regressor = model(TaskSpec.regression(1), Losses.MEAN_SQUARED_ERROR, dataset.output_dim)
    run = regressor.train(NNTrainParams(n_epochs=2, train_loader=dataset.train_loader, seed=1))
    assert run.idps[-1].train_edp.metrics["mse"] > 0
    assert regressor.evaluate(dataset.test_loader).count == len(dataset.test_loader.dataset)


def test_training_and_inference_never_read_tensors_row_by_row(monkeypatch):
    dataset = NNTabularDataset(
        df=table(), feature_cols=["age", "income"], target_col="label", batch_sizes=(8, 4, 4),
        standardize=True, seed=1,
    )  # fmt: skip

    def refuse(*args):
        raise AssertionError("a row was read alone")

    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    trained = model()
    params = NNTrainParams(
        n_epochs=1, train_loader=dataset.train_loader, val_loader=dataset.val_loader, seed=1
    )
    trained.train(params)
    trained.evaluate(dataset.test_loader)
    assert len(trained.predict(dataset.test_loader).classes) == 9
    assert len(list(trained.iter_predict(dataset.test_loader))) == 3


@dataclasses.dataclass
class Circles(NNDatasetBase):
    """A dataset of one's own: it fills what the base declares."""

    n: int = 24

    def __post_init__(self):
        X = torch.randn(self.n, 2, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(X, (X.norm(dim=1) > 1).long())
        self.name, self.input_dim, self.output_dim = "circles", 2, 2
        self.train_loader = DataLoader(data, batch_size=8, shuffle=True)
        self.val_loader = self.test_loader = None


def test_a_dataset_of_ones_own():
    dataset = Circles(n=16)
    assert dataset.state() == {"name": "circles", "input_dim": 2, "output_dim": 2}
    params = NNTrainParams(
        n_epochs=1, train_loader=dataset.train_loader, val_loader=dataset.val_loader, seed=1
    )
    assert len(model().train(params).idps) == 2


def test_a_plan_splits_any_dataset_by_subset():
    data = TensorDataset(torch.arange(6.0))
    plan = plan_split(list("abcdef"), strategy="group", groups=[1, 1, 2, 2, 3, 3], seed=1)
    indices = plan.resolve(list("fedcba"))
    train = Subset(data, indices.train)
    assert [float(x) for (x,) in train] == [float(5 - "abcdef".index(i)) for i in plan.train]
