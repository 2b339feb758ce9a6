"""Adapters cross over to Hugging Face PEFT and back with the same outputs."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from nnx.peft import (
    DoRALinear,
    LoRAConv2d,
    LoRAEmbedding,
    LoRALinear,
    add_adapter,
    apply_dora_to,
    apply_lora_to,
    load_peft_adapter,
    save_lora_weights,
    save_peft_adapter,
)
from safetensors.torch import load_file, save_file
from torch import nn

hf = pytest.importorskip("peft", reason="Hugging Face PEFT is the oracle here")
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = (nn.Linear, nn.Conv2d, nn.Embedding)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 18)
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.layers = nn.ModuleList([nn.Linear(16, 12), nn.Linear(12, 8)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, ids):
        x = self.table(ids).view(-1, 2, 3, 3)
        x = nn.functional.pad(self.conv(x), (0, 2, 0, 2))[..., :2, :2].flatten(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


IDS = torch.arange(11)


def fill(model, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.copy_(torch.randn_like(p) * 0.3)
            if "magnitude" in name:
                p.mul_(1 + torch.rand_like(p))
    return model.eval()


def ours_to_peft(model, directory, **options):
    save_peft_adapter(model, directory, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf.PeftModel.from_pretrained(Net(), directory).eval()


def peft_to_ours(config, directory, seed=1):
    theirs = fill(hf.get_peft_model(Net(), config), seed)
    theirs.save_pretrained(directory)
    ours = Net().eval()
    return theirs, ours, load_peft_adapter(ours, directory)


class TestExport:
    def test_linear_convolution_and_embedding_compute_the_same(self, tmp_path):
        model = Net()
        assert apply_lora_to(model, "*", r=4, alpha=6.0, kinds=KINDS) == 6
        fill(model)
        theirs = ours_to_peft(model, tmp_path)
        torch.testing.assert_close(theirs(IDS), model(IDS), atol=1e-6, rtol=1e-6)
        assert not torch.allclose(model(IDS), Net()(IDS), atol=1e-2)

    def test_ranks_scales_and_rslora_may_differ_between_layers(self, tmp_path):
        model = Net()
        apply_lora_to(model, "layers.0", r=2, alpha=3.0)
        apply_lora_to(model, "layers.1", r=5, alpha=3.0, rslora=True)
        apply_lora_to(model, "head.0", "table", r=2, alpha=7.0, kinds=KINDS)
        fill(model)
        theirs = ours_to_peft(model, tmp_path)
        torch.testing.assert_close(theirs(IDS), model(IDS), atol=1e-6, rtol=1e-6)

    def test_rslora_alone_is_written_as_rslora(self, tmp_path):
        model = Net()
        apply_lora_to(model, "*", r=4, alpha=8.0, rslora=True)
        fill(model)
        theirs = ours_to_peft(model, tmp_path)
        assert theirs.peft_config["default"].use_rslora
        assert theirs.peft_config["default"].lora_alpha == 8.0
        torch.testing.assert_close(theirs(IDS), model(IDS), atol=1e-6, rtol=1e-6)

    def test_dora_computes_the_same(self, tmp_path):
        model = Net()
        apply_dora_to(model, "*", r=4, alpha=6.0)
        fill(model)
        theirs = ours_to_peft(model, tmp_path)
        torch.testing.assert_close(theirs(IDS), model(IDS), atol=1e-6, rtol=1e-6)

    def test_only_the_adapted_layers_are_adapted_there(self, tmp_path):
        class Nested(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.fc = nn.Linear(4, 4)
                self.inner = nn.ModuleDict({"fc": nn.Linear(4, 4)})

            def forward(self, x):
                return self.inner["fc"](self.fc(x))

        model = Nested()
        apply_lora_to(model, "fc", r=2)
        fill(model)
        save_peft_adapter(model, tmp_path)
        assert isinstance(
            json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"], str
        )
        theirs = hf.PeftModel.from_pretrained(Nested(), tmp_path).eval()
        x = torch.randn(3, 4)
        torch.testing.assert_close(theirs(x), model(x), atol=1e-6, rtol=1e-6)

    def test_a_named_adapter_is_written_alone(self, tmp_path):
        model = Net()
        apply_lora_to(model, "layers.*", r=4)
        add_adapter(model, "other", r=2, alpha=5.0)
        fill(model)
        save_peft_adapter(model, tmp_path, adapter="other", base_model="me/base")
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (2, 5.0)
        assert config["base_model_name_or_path"] == "me/base"
        ours = Net().eval()
        load_peft_adapter(ours, tmp_path)
        assert torch.equal(ours.layers[0].lora_A, model.layers[0].adapter("other").lora_A)

    def test_refusals_write_nothing(self, tmp_path):
        target = tmp_path / "adapter"
        with pytest.raises(ValueError, match="no LoRA layer has an adapter called 'default'"):
            save_peft_adapter(Net(), target)
        model = Net()
        apply_dora_to(model, "layers.0")
        apply_lora_to(model, "layers.1")
        with pytest.raises(ValueError, match="mixes them"):
            save_peft_adapter(model, target)
        with pytest.raises(ValueError, match="no name for"):
            save_peft_adapter(LoRALinear(nn.Linear(2, 2)), target)
        model = nn.Sequential(nn.Conv2d(2, 2, 3, dilation=2))
        apply_lora_to(model, "*", kinds=KINDS)
        with pytest.raises(ValueError, match=r"dilation=\(2, 2\)"):
            save_peft_adapter(model, target)
        assert not target.exists()


class TestImport:
    @pytest.mark.parametrize(
        "options",
        [
            {"target_modules": ["0", "1"], "r": 4, "lora_alpha": 6},
            {"target_modules": ["conv", "table", "layers.1"], "r": 3, "lora_alpha": 6},
            {"target_modules": ["0", "1"], "r": 4, "use_rslora": True, "lora_dropout": 0.2},
            {"target_modules": ["0", "1"], "r": 4, "use_dora": True},
            {"target_modules": ["0", "1"], "r": 4, "use_dora": True, "use_rslora": True},
            {
                "target_modules": ["0", "1"],
                "r": 4,
                "rank_pattern": {"layers.0": 2},
                "alpha_pattern": {"head.*": 3, "^layers.1": 20},
            },
        ],
    )
    def test_a_peft_checkpoint_computes_the_same(self, options, tmp_path):
        theirs, ours, count = peft_to_ours(hf.LoraConfig(**options), tmp_path)
        assert count == sum(
            isinstance(m, (LoRALinear, LoRAConv2d, LoRAEmbedding)) for m in ours.modules()
        )
        torch.testing.assert_close(ours(IDS), theirs(IDS), atol=1e-6, rtol=1e-6)
        if options.get("use_dora"):
            assert isinstance(ours.layers[0], DoRALinear)

    def test_there_and_back_is_bit_identical(self, tmp_path):
        model = Net()
        apply_lora_to(model, "*", r=4, kinds=KINDS, alpha=6.0)
        fill(model)
        save_peft_adapter(model, tmp_path)
        ours = Net().eval()
        state = torch.get_rng_state()
        assert load_peft_adapter(ours, tmp_path) == 6
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(v, ours.state_dict()[k]) for k, v in model.state_dict().items())
        assert torch.equal(ours(IDS), model(IDS))
        assert not any(m.training for m in ours.modules())

    def write(self, tmp_path, config=None, edit=None):
        theirs = fill(hf.get_peft_model(Net(), hf.LoraConfig(target_modules=["0", "1"], r=4)))
        theirs.save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
        if edit:
            tensors = load_file(tmp_path / "adapter_model.safetensors")
            edit(tensors)
            save_file(tensors, tmp_path / "adapter_model.safetensors")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"peft_type": "IA3"}, "only LORA can be read"),
            ({"bias": "all"}, "bias='all'"),
            (
                {"modules_to_save": ["haed"]},
                "modules_to_save: 'haed' matches no module; the closest",
            ),
            (
                {"modules_to_save": ["conv"]},
                "'conv.bias': it is saved whole, and the file does not",
            ),
            ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
            ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
            ({"something_new": 1}, "something_new=1"),
        ],
    )
    def test_a_configuration_that_asks_for_more_is_refused(self, config, message, tmp_path):
        self.write(tmp_path, config)
        model = Net()
        with pytest.raises(ValueError, match=message):
            load_peft_adapter(model, tmp_path)
        assert all(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                lambda t: t.update({"base_model.model.head.extra": torch.ones(1)}),
                "no part of a LoRA",
            ),
            (lambda t: t.pop("base_model.model.head.0.lora_A.weight"), r"holds \['lora_B'\]"),
            (
                lambda t: t.update({"base_model.model.head.0.lora_B.weight": torch.ones(9, 4)}),
                r"'lora_B': \(9, 4\)",
            ),
            (
                lambda t: t.update(
                    {f"base_model.model.nowhere.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
                ),
                "'nowhere': the net has no such submodule",
            ),
            (lambda t: t.clear(), "is empty"),
        ],
    )
    def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(self, edit, message, tmp_path):
        self.write(tmp_path, edit=edit)
        model = Net()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            load_peft_adapter(model, tmp_path)
        assert list(model.state_dict()) == list(before)
        assert all(p.requires_grad for p in model.parameters())

    def test_a_wrapped_or_foreign_layer_is_refused(self, tmp_path):
        self.write(tmp_path)
        model = Net()
        apply_lora_to(model, "layers.0")
        with pytest.raises(ValueError, match=r"'layers\.0': it is a LoRALinear"):
            load_peft_adapter(model, tmp_path)
        with pytest.raises(ValueError, match="no such submodule"):
            load_peft_adapter(nn.Linear(2, 2), tmp_path)

    def test_a_directory_without_the_files_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is missing"):
            load_peft_adapter(Net(), tmp_path)
        self.write(tmp_path)
        (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
        with pytest.raises(ValueError, match="no safetensors file"):
            load_peft_adapter(Net(), tmp_path)


def test_training_follows_peft(tmp_path):
    """The same starting point and data give the same trained matrices."""
    theirs = fill(hf.get_peft_model(Net(), hf.LoraConfig(target_modules=["0", "1"], r=4)))
    theirs.save_pretrained(tmp_path)
    ours = Net().requires_grad_(False)  # PEFT freezes everything, not only adapted layers
    load_peft_adapter(ours, tmp_path)
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(5):
            model(IDS).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours(IDS), theirs(IDS), atol=1e-5, rtol=1e-5)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids):
        x = self.table(ids).view(-1, 2, 3, 3)
        x = nn.functional.pad(self.conv(x), (0, 2, 0, 2))[..., :2, :2].flatten(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x))


class TestWholeModules:
    WHOLE = ("norm", "head")

    def ours(self):
        model = Normed()
        apply_lora_to(model, "layers.*", r=4, freeze_base=True, modules_to_save=self.WHOLE)
        return model

    def theirs(self):
        config = hf.LoraConfig(
            target_modules=["layers.0", "layers.1"],
            r=4,
            lora_alpha=16,
            modules_to_save=[*self.WHOLE],
        )
        return hf.get_peft_model(Normed(), config)

    def fit(self, model, steps=5):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(steps):
            model(IDS).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    def test_the_same_tensors_train_as_there(self):
        count = lambda model: sum(p.numel() for p in model.parameters() if p.requires_grad)  # noqa: E731
        assert count(self.ours()) == count(self.theirs())

    def test_training_saving_and_loading_agree_with_peft(self, tmp_path):
        model = self.fit(self.ours().train())
        save_peft_adapter(model, tmp_path)
        there = hf.PeftModel.from_pretrained(Normed(), tmp_path).eval()
        torch.testing.assert_close(there(IDS), model(IDS), atol=1e-6, rtol=1e-6)
        here = Normed().eval()
        assert load_peft_adapter(here, tmp_path) == 2
        assert torch.equal(here(IDS), model(IDS))

    def test_what_peft_trained_and_saved_is_read_and_trains_on(self, tmp_path):
        theirs = self.fit(self.theirs().train())
        theirs.save_pretrained(tmp_path)
        ours = Normed()
        assert load_peft_adapter(ours, tmp_path) == 2
        torch.testing.assert_close(ours.eval()(IDS), theirs(IDS), atol=1e-6, rtol=1e-6)
        state = torch.load(save_lora_weights(ours.requires_grad_(False), tmp_path / "x.pt"))
        assert "head.0.weight" in state
        assert "norm.running_mean" in state

    def test_a_whole_module_that_does_not_fit_changes_nothing(self, tmp_path):
        save_peft_adapter(self.ours(), tmp_path)
        model = Normed()
        model.head[1] = nn.Linear(8, 5)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"'head.1.weight': the file's shape is \(3, 8\), the"):
            load_peft_adapter(model, tmp_path)
        assert list(model.state_dict()) == list(before)

    def test_what_trains_outside_the_folder_is_said(self, tmp_path):
        model = Normed()
        apply_lora_to(model, "layers.*", modules_to_save=["head"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save_peft_adapter(model, tmp_path)
        [warning] = caught
        assert str(warning.message).startswith("'conv.bias', 'conv.weight', 'norm.bias'")
        assert warning.filename == __file__

    def test_a_name_that_peft_would_find_twice_is_refused(self, tmp_path):
        model = nn.ModuleDict({"head": nn.Linear(2, 2), "second_head": nn.Linear(2, 2), "q": nn.Linear(2, 2)})  # fmt: skip
        apply_lora_to(model, "q", freeze_base=True, modules_to_save=["head"])
        with pytest.raises(ValueError, match="'second_head' ends like one of"):
            save_peft_adapter(model, tmp_path)
        assert list(tmp_path.iterdir()) == []
