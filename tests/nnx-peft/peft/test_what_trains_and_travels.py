"""Nothing that trains is lost between training, saving and loading an adapter."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from nnx.peft import (
    AdapterLayer,
    apply_dora_to,
    apply_ia3_to,
    apply_lora_to,
    load_ia3_weights,
    load_lora_weights,
    save_ia3_weights,
    save_lora_weights,
)
from torch import nn

APPLY = [apply_lora_to, apply_dora_to, apply_ia3_to]


class Net(nn.Module):
    """Two projections in a block, a norm with running statistics, and a head."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.block = nn.ModuleDict({"q": nn.Linear(6, 8), "v": nn.Linear(6, 8)})
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.block["q"](x)) * self.block["v"](x)))


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def fit(model, steps=30, mode=True):
    model.train(mode)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model.eval()


def training_names(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


class TestWhatTrains:
    def test_a_plain_call_freezes_the_adapted_bases_alone(self):
        model = Net()
        apply_lora_to(model, "block.q")
        assert training_names(model) == {
            "block.q.lora_A", "block.q.lora_B", "block.v.weight", "block.v.bias",
            "norm.weight", "norm.bias", "head.weight", "head.bias",
        }  # fmt: skip

    @pytest.mark.parametrize("apply", APPLY)
    def test_freeze_base_leaves_the_adapters_alone_to_train(self, apply):
        model = Net()
        assert apply(model, "block.[qv]", freeze_base=True) == 2
        owned = {
            apply_lora_to: {"lora_A", "lora_B"},
            apply_dora_to: {"lora_A", "lora_B", "magnitude"},
            apply_ia3_to: {"scaling"},
        }[apply]
        assert training_names(model) == {f"block.{n}.{t}" for n in "qv" for t in owned}

    def test_adapters_of_other_kinds_and_earlier_calls_train_on(self):
        model = Net()
        model.extra = AdapterLayer(dim=3, bottleneck=2)
        apply_ia3_to(model, "block.v", modules_to_save=["norm"])
        apply_lora_to(model, "block.q", freeze_base=True)
        assert training_names(model) == {
            "block.v.scaling", "block.q.lora_A", "block.q.lora_B", "norm.weight", "norm.bias",
            *(f"extra.{n}" for n, _ in model.extra.named_parameters()),
        }  # fmt: skip

    def test_a_module_to_save_trains_also_when_it_was_frozen(self):
        model = Net().requires_grad_(False)
        apply_lora_to(model, "block.q", freeze_base=True, modules_to_save=("he*",))
        assert {"head.weight", "head.bias"} < training_names(model)

    def test_a_second_call_freezes_too(self):
        model = Net()
        apply_lora_to(model, "block.q")
        assert apply_lora_to(model, "block.q", freeze_base=True) == 0
        assert training_names(model) == {"block.q.lora_A", "block.q.lora_B"}

    def test_the_base_is_bit_identical_after_training(self):
        model = Net()
        before = copy.deepcopy(model.state_dict())
        apply_lora_to(model, "block.*", freeze_base=True)
        fit(model, mode=False)
        after = {k.replace(".base.", "."): v for k, v in model.state_dict().items()}
        assert all(torch.equal(after[k], v) for k, v in before.items())

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"modules_to_save": ["haed"]}, ValueError,
             "modules_to_save: 'haed' matches no module; the closest names are 'head'"),
            ({"modules_to_save": "head"}, TypeError, "names in a list, not the string 'head'"),
            ({"modules_to_save": ["block"]}, ValueError, "'block', which is adapted or holds"),
            ({"modules_to_save": ["*"]}, ValueError, "which is adapted or holds"),
        ],
    )  # fmt: skip
    def test_refusals_change_nothing(self, options, error, message):
        model = Net()
        before = list(model.named_modules())
        with pytest.raises(error, match=message):
            apply_lora_to(model, "block.q", freeze_base=True, **options)
        assert list(model.named_modules()) == before
        assert training_names(model) == {n for n, _ in model.named_parameters()}

    def test_freeze_base_without_a_layer_is_refused(self):
        model = Net()
        with pytest.raises(ValueError) as caught:
            apply_lora_to(model, "blocks.[qv]", freeze_base=True)
        assert str(caught.value) == (
            "apply_lora_to(freeze_base=True): 'blocks.[qv]' matches no Linear; the closest names "
            "are 'block.q', 'block.v', 'head', so nothing would train"
        )
        assert training_names(model) == {n for n, _ in model.named_parameters()}

    def test_a_cycle_of_modules_ends(self):
        model = Net()
        model.block["q"].owner = model
        model.block["v"].block = model.block
        assert apply_lora_to(model, "*.q") == 1

    @pytest.mark.parametrize("apply", APPLY)
    def test_a_model_in_place_of_its_net_is_refused(self, apply):
        class Model:
            net = Net()

        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not a Model; pass its .net"):
            apply(Model(), "*")


class TestFiles:
    def adapted(self, apply=apply_lora_to, seed=0, **options):
        model = Net(seed)
        apply(model, "block.[qv]", **options)
        return model

    def test_a_file_that_would_lose_what_trained_is_refused(self, tmp_path):
        model = fit(self.adapted(), mode=False)
        with pytest.raises(ValueError) as caught:
            save_lora_weights(model, tmp_path / "lora.pt")
        message = str(caught.value)
        assert message.startswith("'head.bias', 'head.weight', 'norm.bias', 'norm.weight' train")
        for way_out in ("freeze_base=True", "modules_to_save", "include_trainable=True"):
            assert way_out in message
        assert list(tmp_path.iterdir()) == []

    def test_with_the_base_frozen_the_file_is_enough(self, tmp_path):
        model = fit(self.adapted(freeze_base=True), mode=False)
        assert (
            load_lora_weights(
                again := self.adapted(freeze_base=True).eval(),
                save_lora_weights(model, tmp_path / "lora.pt"),
            )
            == 4
        )
        assert torch.equal(again(X), model(X))

    def test_modules_to_save_travel_with_parameters_and_buffers(self, tmp_path):
        options = {"freeze_base": True, "modules_to_save": ["norm", "head"]}
        model = fit(self.adapted(**options))
        path = save_lora_weights(model, tmp_path / "lora.pt")
        held = set(torch.load(path, weights_only=True))
        assert held == {
            *(f"block.{n}.lora_{m}" for n in "qv" for m in "AB"),
            *(f"norm.{n}" for n in model.norm.state_dict()), "head.weight", "head.bias",
        }  # fmt: skip
        again = self.adapted(**options).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load_lora_weights(again, path) == len(held)
        assert torch.equal(again(X), model(X))

    def test_the_marks_survive_a_copy(self, tmp_path):
        model = copy.deepcopy(self.adapted(freeze_base=True, modules_to_save=["head"]))
        held = torch.load(save_lora_weights(model, tmp_path / "lora.pt"), weights_only=True)
        assert "head.weight" in held

    def test_include_trainable_takes_all_that_trains_both_ways(self, tmp_path):
        model = fit(self.adapted())
        path = save_lora_weights(model, tmp_path / "lora.pt", include_trainable=True)
        assert not any(".base." in key for key in torch.load(path, weights_only=True))
        again = self.adapted().eval()
        with pytest.warns(UserWarning, match="is loaded with it too"):
            load_lora_weights(again, path)
        assert load_lora_weights(again, path, include_trainable=True) == 4 + 2 + 5
        assert torch.equal(again(X), model(X))

    def test_what_a_destination_does_not_take_is_said(self, tmp_path):
        options = {"freeze_base": True, "modules_to_save": ["head"]}
        path = save_lora_weights(self.adapted(**options), tmp_path / "lora.pt")
        other = Net()
        apply_lora_to(other, "block.q", freeze_base=True)
        head = other.head.weight.clone()
        with pytest.warns(UserWarning, match="the source") as caught:
            assert load_lora_weights(other, path) == 2
        [warning] = caught
        assert str(warning.message).startswith(
            "'block.v.lora_A', 'block.v.lora_B', 'head.bias', 'head.weight' of the source were not"
        )
        assert torch.equal(other.head.weight, head)

    def test_what_a_source_lacks_is_said(self, tmp_path):
        small = Net()
        apply_lora_to(small, "block.q", freeze_base=True)
        path = save_lora_weights(small, tmp_path / "lora.pt")
        with pytest.warns(UserWarning, match="does not hold 'block.v.lora_A', 'block.v.lora_B'"):
            assert load_lora_weights(self.adapted(), path) == 2

    def test_a_full_checkpoint_is_read_without_a_word(self):
        source = fit(self.adapted())
        other = self.adapted(seed=1)
        base, head = other.block["q"].base.weight.clone(), other.head.weight.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load_lora_weights(other, source.state_dict()) == 4
        assert torch.equal(other.block["q"].base.weight, base)
        assert torch.equal(other.head.weight, head)
        assert torch.equal(other.block["q"].lora_B, source.block["q"].lora_B)

    def test_running_statistics_that_moved_are_said(self, tmp_path):
        model = self.adapted(freeze_base=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save_lora_weights(model, tmp_path / "before.pt")
        fit(model)
        with pytest.warns(
            UserWarning, match="'norm.num_batches_tracked', .* the file does not hold them. Name"
        ):
            save_lora_weights(model, tmp_path / "after.pt")

    def test_a_tensor_of_another_adapter_is_said_and_can_be_saved_beside(self, tmp_path):
        def build():
            model = Net()
            apply_ia3_to(model, "head")
            apply_lora_to(model, "block.*", freeze_base=True)
            return model

        model, again = fit(build(), mode=False), build().eval()
        with pytest.warns(UserWarning, match="'head.scaling' changed in training, or may"):
            load_lora_weights(again, save_lora_weights(model, tmp_path / "lora.pt"))
        with pytest.warns(UserWarning, match="lora_A"):
            load_ia3_weights(again, save_ia3_weights(model, tmp_path / "ia3.pt"))
        assert torch.equal(again(X), model(X))

    def test_a_tied_weight_that_travels_is_held_by_either_name(self, tmp_path):
        model = nn.ModuleDict({"table": nn.Embedding(5, 4), "q": nn.Linear(4, 4), "out": nn.Linear(4, 5)})  # fmt: skip
        model["out"].weight = model["table"].weight
        apply_lora_to(model, "q", freeze_base=True, modules_to_save=["out"])
        held = torch.load(save_lora_weights(model, tmp_path / "a.pt"), weights_only=True)
        assert sorted(held) == ["out.bias", "out.weight", "q.lora_A", "q.lora_B"]
