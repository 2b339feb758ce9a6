"""Load, freeze, group, train, export: the transfer-learning recipe in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    Callback,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNTrainParams,
    Optims,
    load_pretrained,
)
from nnx.finetune import frozen
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")


def model(seed):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(
            input_dim=4,
            output_dim=2,
            hidden_dims=[6, 5],
            dropout_prob=0.0,
            activation=Activations.RELU,
        ),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def params(**options):
    X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(X, (X[:, 0] > 0).long()), batch_size=8)
    return NNTrainParams(n_epochs=2, train_loader=loader, seed=1, **options)


class Groups(Callback):
    """The optimizer's groups as the run uses them, by parameter name."""

    def on_epoch_end(self, ctx):
        names = {id(p): n for n, p in ctx.model.net.named_parameters()}
        self.seen = {
            names[id(p)]: (group["lr"], group["weight_decay"])
            for group in ctx.optimizer.param_groups
            for p in group["params"]
        }


def test_the_recipe_trains_the_head_fast_the_block_slowly_and_the_rest_not_at_all():
    source = model(1)
    path = source.export_state_dict("weights.pt")
    assert path == "weights.pt"
    exported = torch.load(path, weights_only=True)
    assert list(exported) == list(source.net.state_dict())
    torch.save(
        {f"backbone.{k.removeprefix('layers.')}": v for k, v in exported.items()}, "foreign.pt"
    )

    tuned = model(2)
    result = load_pretrained(tuned.net, "foreign.pt", key_map={"backbone.": "layers."})
    assert len(result.loaded_keys) == 6
    assert result.missing_keys == result.unexpected_keys == []
    assert tuned.freeze("layers.0.*") == 2
    assert frozen(tuned.net) == ["layers.0.bias", "layers.0.weight"]

    optim = NNOptimParams(
        name=Optims.ADAM, max_lr=1e-3, momentum=(0.9, 0.999), weight_decay=5e-4,
        param_groups=[
            NNParamGroupSpec(name_pattern="layers.1.*bias", lr_multiplier=0.01, weight_decay=0.0),
            NNParamGroupSpec(name_pattern="layers.1.*", lr_multiplier=0.01),
            NNParamGroupSpec(name_pattern="*.bias", weight_decay=0.0),
        ],
    )  # fmt: skip
    groups = Groups()
    tuned.train(params(optim=optim), callbacks=[groups])
    assert groups.seen == {
        "layers.1.bias": (1e-5, 0.0),
        "layers.1.weight": (1e-5, 5e-4),
        "layers.2.bias": (1e-3, 0.0),
        "layers.2.weight": (1e-3, 5e-4),
    }
    after = tuned.net.state_dict()
    for name in ("layers.0.weight", "layers.0.bias"):
        assert torch.equal(after[name], exported[name])
    # Adam moves a weight by at most about its rate per update; there were eight.
    moved = {n: float((after[n] - exported[n]).abs().max()) for n in after}
    assert 0 < moved["layers.1.weight"] < 1e-4 < moved["layers.2.weight"] < 1e-2


def test_everything_trains_again_after_unfreezing():
    tuned = model(1)
    before = tuned.net.state_dict()["layers.0.weight"].clone()
    assert tuned.freeze("*") == 6
    assert tuned.unfreeze("*") == 6
    tuned.train(params())
    assert not torch.equal(tuned.net.state_dict()["layers.0.weight"], before)


def test_an_exported_file_survives_a_failed_write(monkeypatch):
    source = model(1)
    source.export_state_dict("weights.pt")
    held = Path("weights.pt").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        model(2).export_state_dict("weights.pt")
    assert Path("weights.pt").read_bytes() == held
