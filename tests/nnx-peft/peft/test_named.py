"""Several adapters on one base."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from nnx.peft import (
    adapter_names,
    add_adapter,
    apply_dora_to,
    apply_lora_to,
    combine_adapters,
    delete_adapter,
    disabled_adapters,
    load_lora_weights,
    merge_adapters,
    save_lora_weights,
    set_adapter,
    unmerge_adapters,
)
from torch import nn

KINDS = (nn.Linear, nn.Conv2d, nn.Embedding)


def fill(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.normal_(std=0.3)
    return model


def two():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    apply_lora_to(model, "*", r=2, alpha=4.0)
    add_adapter(model, "french", r=3, alpha=9.0)
    return fill(model)


def delta(layer, name):
    part = layer.adapter(name)
    return part.scaling * part.lora_B @ part.lora_A


def with_delta(model, x, amounts):
    """The net computed by hand with the given amounts of each adapter."""
    for i in (0, 2):
        layer = model[i]
        weight = layer.base.weight + sum(w * delta(layer, n) for n, w in amounts.items())
        x = nn.functional.linear(x, weight, layer.base.bias)
        x = x.relu() if i == 0 else x
    return x


def test_an_added_adapter_changes_nothing_until_it_is_selected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    apply_lora_to(model, "*", r=2)
    fill(model)
    x = torch.randn(4, 6)
    before = model(x)
    assert add_adapter(model, "french", "0", r=3) == 1
    assert adapter_names(model) == ("default", "french")
    assert torch.equal(model(x), before)
    set_adapter(model, "french")
    assert torch.equal(model(x), model[1].base(model[0].base(x)))


@pytest.mark.parametrize("names", [(), ("default",), ("french",), ("default", "french")])
def test_the_selected_adapters_add_up(names):
    model, x = two(), torch.randn(4, 6)
    set_adapter(model, *names)
    torch.testing.assert_close(model(x), with_delta(model, x, dict.fromkeys(names, 1.0)))


def test_only_the_selected_adapters_train():
    model = two()
    set_adapter(model, "french")
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable == [f"{i}.adapters.french.lora_{m}" for i in (0, 2) for m in "AB"]
    set_adapter(model, "default", trainable=False)
    assert not any(p.requires_grad for p in model.parameters())


def test_training_one_adapter_leaves_base_and_the_other_bit_identical():
    model = two()
    set_adapter(model, "french")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(4, 6)).pow(2).mean().backward()
    optimizer.step()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {f"{i}.adapters.french.lora_{m}" for i in (0, 2) for m in "AB"}


def test_a_disabled_block_computes_the_base_and_restores_also_on_errors():
    model, x = two(), torch.randn(4, 6)
    before = model(x)
    with disabled_adapters(model):
        torch.testing.assert_close(model(x), with_delta(model, x, {}))
    with pytest.raises(KeyError), disabled_adapters(model):
        raise KeyError
    assert torch.equal(model(x), before)


def test_a_combination_is_the_exact_weighted_sum():
    model, x = two(), torch.randn(4, 6)
    assert combine_adapters(model, "mix", {"default": 0.3, "french": -1.5}) == 2
    set_adapter(model, "mix")
    assert model[0].adapter("mix").r == 5
    expected = with_delta(model, x, {"default": 0.3, "french": -1.5})
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_a_truncated_combination_is_the_best_of_its_rank():
    model = two().double()
    combine_adapters(model, "mix", {"default": 1.0, "french": 1.0}, rank=2)
    total = delta(model[0], "default") + delta(model[0], "french")
    error = (total - delta(model[0], "mix")).norm()
    torch.testing.assert_close(error, torch.linalg.svdvals(total)[2:].norm())


@pytest.mark.parametrize("kind", ["conv", "embedding"])
def test_convolutions_and_embeddings_combine_too(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3) if kind == "conv" else nn.Embedding(7, 4))
    x = torch.randn(2, 3, 5, 5) if kind == "conv" else torch.arange(7)
    apply_lora_to(model, "*", r=2, kinds=KINDS)
    add_adapter(model, "other", r=3)
    fill(model)
    base = model[0].base(x)
    parts = []
    for name in ("default", "other"):
        set_adapter(model, name)
        parts.append(model(x) - base)
    combine_adapters(model, "mix", {"default": 0.5, "other": 2.0})
    set_adapter(model, "mix")
    torch.testing.assert_close(
        model(x), base + 0.5 * parts[0] + 2.0 * parts[1], atol=1e-4, rtol=1e-4
    )


def test_merging_takes_the_selected_adapters():
    model, x = two(), torch.randn(4, 6)
    set_adapter(model, "default", "french")
    expected = model(x)
    merge_adapters(model)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match="unmerge_adapters first"):
        set_adapter(model, "default")
    unmerge_adapters(model)
    set_adapter(model, "default")


def test_files_copies_and_pickles_hold_every_adapter(tmp_path):
    model, x = two(), torch.randn(4, 6)
    set_adapter(model, "french")
    path = save_lora_weights(model, tmp_path / "a.pt")
    assert len(torch.load(path, weights_only=True)) == 8
    twin = two()
    with torch.no_grad():
        twin[0].adapter("french").lora_A.zero_()
    set_adapter(twin, "french")
    assert load_lora_weights(twin, path) == 8
    for other in (twin, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_deleting_gives_the_old_state_keys_back():
    model = two()
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    apply_lora_to(plain, "*", r=2, alpha=4.0)
    set_adapter(model, "french", "default")
    assert delete_adapter(model, "french") == 2
    assert adapter_names(model) == ("default",)
    assert not any("french" in k for k in model.state_dict())
    assert repr(model) == repr(plain)
    with pytest.raises(ValueError, match="belongs to the wrappers"):
        delete_adapter(model, "default")
    with pytest.raises(ValueError, match="no layer has"):
        delete_adapter(model, "french")


def test_modes_are_inherited_per_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply_lora_to(model, "*")
    model[0].eval()
    add_adapter(model, "other", dropout=0.5)
    assert [m.adapter("other").lora_dropout.training for m in model] == [False, True]


@pytest.mark.parametrize("name", ["default", "french", "", "a.b", "1st", "keys", "training", 3])
def test_a_name_must_be_new_and_plain(name):
    model = two()
    before = list(model.state_dict())
    with pytest.raises(ValueError, match="name"):
        add_adapter(model, name)
    assert list(model.state_dict()) == before


def test_refusals_change_nothing():
    model = two()
    before = list(model.state_dict())
    with pytest.raises(
        ValueError, match="'nothing' matches no LoRA layer; the closest names are '0', '2'"
    ):
        add_adapter(model, "x", "nothing")
    with pytest.raises(ValueError, match="no layer has an adapter called 'german'"):
        set_adapter(model, "german")
    with pytest.raises(ValueError, match="no layer has an adapter called 'german'"):
        combine_adapters(model, "x", {"german": 1.0})
    with pytest.raises(ValueError, match="finite"):
        combine_adapters(model, "x", {"french": float("nan")})
    with pytest.raises(ValueError, match="twice"):
        set_adapter(model, "french", "french")
    with pytest.raises(ValueError, match="empty"):
        combine_adapters(model, "x", {})
    assert list(model.state_dict()) == before
    assert model[0].active == ("default",)


def test_dora_holds_one_adapter_that_can_be_switched_off():
    model = nn.Sequential(nn.Linear(4, 4))
    apply_dora_to(model, "0")
    with pytest.raises(ValueError, match="'0' is a DoRALinear"):
        add_adapter(model, "other")
    fill(model)
    x = torch.randn(2, 4)
    adapted = model(x)
    with disabled_adapters(model):
        assert torch.equal(model(x), model[0].base(x))
    set_adapter(model, "default", trainable=False)
    assert not model[0].magnitude.requires_grad
    assert torch.equal(model(x), adapted)


def test_several_adapters_compile():
    model, x = two(), torch.randn(4, 6)
    set_adapter(model, "default", "french")
    torch.testing.assert_close(
        torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x)
    )
