"""Weights come from a state dict, a file or a module, by name."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from nnx.finetune import load_pretrained
from safetensors.torch import save_file
from torch import nn


def net(seed, hidden=3, out=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, out))


KEYS = [
    "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var",
    "1.num_batches_tracked", "2.weight", "2.bias",
]  # fmt: skip


def assert_equal(module, other, keys=KEYS):
    ours, theirs = module.state_dict(), other.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in keys)


@pytest.mark.parametrize("kind", ["dict", "module", "pt", "path", "safetensors"])
def test_every_source_gives_the_same_weights(kind, tmp_path):
    source, target = net(1), net(2)
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save(source.state_dict(), path)
    given = {"dict": source.state_dict(), "module": source, "pt": str(path)}.get(kind, path)
    result = load_pretrained(target, given)
    assert_equal(target, source)
    assert sorted(result.loaded_keys) == sorted(KEYS)
    assert result.missing_keys == result.unexpected_keys == []


def test_the_weights_are_copied_not_shared():
    source, target = net(1), net(2)
    load_pretrained(target, source)
    with torch.no_grad():
        source[0].weight.zero_()
    assert bool(target[0].weight.any())


def test_the_prefix_goes_first_then_the_first_matching_entry_of_the_map():
    source = {f"model.backbone.{k}": v for k, v in net(1).state_dict().items()}
    target = net(2)
    with pytest.warns(UserWarning, match=r"key_map=...\): '0.\*' matches no name of the source"):
        result = load_pretrained(
            target,
            source,
            prefix="model.",
            key_map={"backbone.0.": "0.", "backbone.": "", "0.": "9."},
        )
    assert_equal(target, net(1))
    assert result.unexpected_keys == []


def test_a_map_replaces_the_start_only():
    source = {"a.a.weight": torch.ones(1, 1)}
    target = nn.ModuleDict({"b": nn.ModuleDict({"a": nn.Linear(1, 1)})})
    result = load_pretrained(target, source, key_map={"a.": "b."})
    assert result.loaded_keys == ["b.a.weight"]
    assert result.missing_keys == ["b.a.bias"]


def test_partial_loads_say_what_was_applied():
    source, target = net(1).state_dict(), net(2)
    del source["2.weight"]
    source["head.weight"] = torch.ones(1)
    before = target[2].weight.clone()
    result = load_pretrained(target, source)
    assert result.missing_keys == ["2.weight"]
    assert result.unexpected_keys == ["head.weight"]
    assert torch.equal(target[2].weight, before)
    assert_equal(target, net(1), [k for k in KEYS if k != "2.weight"])


def assert_refused_untouched(source, message, error=ValueError, **options):
    target, untouched = net(2), net(2)
    with pytest.raises(error, match=message):
        load_pretrained(target, source, **options)
    assert_equal(target, untouched)


def test_strict_refuses_a_name_without_a_partner_on_either_side():
    source = net(1).state_dict()
    del source["0.bias"]
    assert_refused_untouched(source, r"no weights for 0.bias.*no target for nothing", strict=True)
    source = {**net(1).state_dict(), "x": torch.ones(1)}
    assert_refused_untouched(source, r"no weights for nothing.*no target for x", strict=True)
    load_pretrained(net(2), net(1), strict=True)


def test_another_shape_is_refused_by_name_and_leaves_the_target_alone():
    assert_refused_untouched(
        net(1, out=5), r"2.weight \(source \(5, 3\), target \(2, 3\)\).*leave these entries out"
    )


def test_two_names_that_become_one_are_refused():
    source = {**net(1).state_dict(), "m.0.bias": torch.zeros(3)}
    assert_refused_untouched(source, "'0.bias' and 'm.0.bias' both become '0.bias'", prefix="m.")


def test_a_checkpoint_around_a_state_dict_names_the_entry_to_pass(tmp_path):
    torch.save({"epoch": 3, "state_dict": net(1).state_dict()}, tmp_path / "c.pt")
    assert_refused_untouched(tmp_path / "c.pt", r"c.pt is a checkpoint.*\['state_dict'\]")
    assert_refused_untouched({"epoch": 3, "0.bias": torch.zeros(3)}, "epoch hold no tensor")


def test_other_sources_are_refused(tmp_path):
    assert_refused_untouched(tmp_path / "no.pt", "no file .*no.pt", error=FileNotFoundError)
    assert_refused_untouched([1], "is a list", error=TypeError)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile",)


def test_a_file_that_would_run_code_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Hostile()}, "bad.pt")
    assert_refused_untouched("bad.pt", "Unsupported|[Ww]eights", error=pickle.UnpicklingError)
    assert not (tmp_path / "hostile").exists()


def test_a_lazy_target_takes_the_shapes_of_the_source():
    target = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    load_pretrained(target, net(1), strict=True)
    assert_equal(target, net(1))


def test_dtype_and_frozen_state_stay_the_targets():
    target = net(2).double()
    target[0].weight.requires_grad_(False)
    load_pretrained(target, net(1))
    assert target[0].weight.dtype is torch.float64
    assert not target[0].weight.requires_grad


def test_a_prefix_that_no_name_has_is_warned_about_with_the_closest():
    source = {f"backbone.{k}": v for k, v in net(1).state_dict().items()}
    with pytest.warns(UserWarning, match="bakbone") as caught:
        result = load_pretrained(net(2), source, prefix="bakbone.")
    [warning] = caught
    assert "prefix=...): 'bakbone.*' matches no name" in str(warning.message)
    assert "'backbone.0.weight'" in str(warning.message)
    assert result.loaded_keys == []
    assert warning.filename == __file__


def test_a_source_without_a_common_name_is_warned_about():
    target = net(2)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.warns(UserWarning, match="loaded nothing: the source has a.weight, the target 0.w"):
        load_pretrained(target, {"a.weight": torch.ones(1)})
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
