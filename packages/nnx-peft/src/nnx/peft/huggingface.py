"""LoRA adapters as Hugging Face PEFT writes and reads them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nnx.peft.dora import DoRALinear
from nnx.peft.lora import lora_wrapper
from nnx.peft.lora_embedding import LoRAEmbedding
from nnx.peft.low_rank import DEFAULT, LoRALayer, LowRank
from nnx.peft.ownership import (
    keys_below,
    mark_travelling,
    note_statistics,
    travelling,
    warn_loss,
)
from nnx.peft.placement import Slot, examine, meta_copy, slots, wrap
from nnx.seeding import isolated_rng
from nnx.utils.files import atomic_write
from nnx.utils.modules import describe_unmatched, module_paths, require_module
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS = (nn.Linear, nn.Conv2d, nn.Embedding)
_MAGNITUDE = "lora_magnitude_vector"
_SAVE = "save_peft_adapter"


def save_peft_adapter(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter: str = DEFAULT,
    base_model: str | None = None,
) -> str:
    """Write an adapter so that ``peft.PeftModel.from_pretrained`` loads it onto the base.

    ``directory`` gets ``adapter_config.json`` and ``adapter_model.safetensors``
    with the tensors of every LoRA (Linear, Conv2d, Embedding) or DoRA layer
    that has ``adapter``, and the modules that ``modules_to_save`` named.
    ``base_model`` is noted as the base's name. Ranks and scales may differ
    between layers; PEFT keeps one dropout, so the largest is written. Returns
    ``directory``.

    Raises ``ValueError`` before anything is written when no layer has the
    adapter, when LoRA and DoRA layers are mixed, or for a dilated or specially
    padded convolution, which PEFT computes differently. What trains and is not in
    the files is warned about.
    """
    saved = dict.fromkeys(path for path, _ in travelling(require_module(_SAVE, module)))
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, LoRALayer) and adapter in layer.adapter_names()
    }
    _check_exportable(layers, adapter)
    tensors = {}
    for path, layer in layers.items():
        low = layer.adapter(adapter)
        for key, value in _export_tensors(layer, low).items():
            tensors[f"{_PREFIX}{path}.{key}"] = value.detach().cpu().contiguous()
    whole = keys_below(module, saved)
    for key, value in module.state_dict().items():
        if key in whole:
            tensors[f"{_PREFIX}{key}"] = value.detach().cpu().clone()
    held = {
        f"{path}.{name}"
        for path, layer in layers.items()
        for name, p in layer.named_parameters()
        if any(p is own for own in layer.owned_parameters(adapter))
    }
    way_out = "Adapt with freeze_base=True, or name their modules in modules_to_save"
    warn_loss(module, whole | held, way_out=way_out)
    config = _export_config(module, layers, adapter, base_model)
    config["modules_to_save"] = _exactly_saved(module, list(saved))
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with atomic_write(target / WEIGHTS_FILE, "wb") as stream:
        stream.write(save(tensors, metadata={"format": "pt"}))
    with atomic_write(target / CONFIG_FILE) as stream:
        json.dump(config, stream, indent=2, sort_keys=True)
    return str(directory)


def load_peft_adapter(module: nn.Module, directory: str | os.PathLike[str]) -> int:
    """Wrap ``module``'s layers as a PEFT LoRA checkpoint says and load it; return how many.

    The layers, their ranks and the tensors come from the weights file, scales
    from the configuration. DoRA on Linears is read too, and so are modules that
    were saved whole (``modules_to_save``), which train and travel here as well.
    ``module`` is the plain base: layers that are wrapped already are refused.

    Raises ``ValueError``, and changes nothing, for a configuration that asks
    for more than that (another method, trained biases, ...), a layer that
    ``module`` does not have, or a tensor of another shape.
    """
    config, tensors = _read(Path(directory))
    _check_config(config)
    saved = _saved_modules(module, config.get("modules_to_save") or ())
    tensors, whole = _split_off(tensors, saved)
    parts = _group(tensors)
    chosen, problems = examine(module, list(parts), kinds=_KINDS)
    plans: dict[int, _Plan] = {}
    for slot in chosen:
        path = next(path for path in slot.paths if path in parts)
        plan = _Plan(slot, parts[path], *_hyperparameters(config, path, parts[path]))
        problems += [(path, problem) for problem in plan.problems()]
        plans[id(slot.module)] = plan
    problems += _whole_problems(module, saved, whole)
    if problems:
        raise ValueError(
            f"the adapter in {os.fspath(directory)!r} does not fit this module:\n"
            + "\n".join(f"- {target!r}: {problem}" for target, problem in problems)
        )
    with isolated_rng():
        count = wrap(chosen, lambda layer: plans[id(layer)].build(layer))
    note_statistics(module)
    mark_travelling(saved.values())
    module.load_state_dict(whole, strict=False)
    return count


def _check_exportable(layers: Mapping[str, LoRALayer], adapter: str) -> None:
    if not layers:
        raise ValueError(f"no LoRA layer has an adapter called {adapter!r}; nothing was written")
    if "" in layers:
        raise ValueError("the module is itself an adapted layer, which PEFT has no name for")
    if len({isinstance(layer, DoRALinear) for layer in layers.values()}) > 1:
        raise ValueError("PEFT keeps LoRA and DoRA in separate adapters; this module mixes them")
    for path, layer in layers.items():
        base = layer.base
        if isinstance(base, nn.Conv2d) and (
            base.dilation != (1, 1) or base.padding_mode != "zeros" or isinstance(base.padding, str)
        ):
            raise ValueError(
                f"{path!r} is a convolution with dilation={base.dilation}, padding={base.padding!r}"
                f" and padding_mode={base.padding_mode!r}; PEFT's LoRA would compute it without"
            )


def _export_tensors(layer: LoRALayer, low: LowRank) -> dict[str, torch.Tensor]:
    if isinstance(layer, LoRAEmbedding):
        return {"lora_embedding_A": low.lora_A, "lora_embedding_B": low.lora_B}
    tensors: dict[str, torch.Tensor] = {"lora_A.weight": low.lora_A, "lora_B.weight": low.lora_B}
    if isinstance(layer, DoRALinear):
        tensors[_MAGNITUDE] = layer.magnitude
    return tensors


def _export_config(
    module: nn.Module, layers: Mapping[str, LoRALayer], adapter: str, base_model: str | None
) -> dict[str, Any]:
    lows = {path: layer.adapter(adapter) for path, layer in layers.items()}
    rslora = all(low.rslora for low in lows.values())
    # One flag for all: a mixture is written as plain alpha / r with the alpha that scales alike.
    alphas = {p: low.alpha if rslora else low.scaling * low.r for p, low in lows.items()}
    ranks = {path: low.r for path, low in lows.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": max(low.dropout for low in lows.values()),
        "rank_pattern": {_exactly(p): value for p, value in ranks.items() if value != r},
        "alpha_pattern": {_exactly(p): value for p, value in alphas.items() if value != alpha},
        "use_rslora": rslora,
        "use_dora": any(isinstance(layer, DoRALinear) for layer in layers.values()),
        "target_modules": _targets(module, list(layers)),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _exactly(path: str) -> str:
    return f"^{re.escape(path)}"


def _targets(module: nn.Module, paths: list[str]) -> list[str] | str:
    """A list of names, or a pattern where PEFT's matching by suffix would select more."""
    present = [path for slot in slots(module) for path in slot.paths]
    for path in present:
        if path not in paths and any(path.endswith(f".{target}") for target in paths):
            return "|".join(map(re.escape, paths))
    return paths


def _exactly_saved(module: nn.Module, paths: list[str]) -> list[str] | None:
    """The names as PEFT will match them: by suffix, so each must be the suffix of one only."""
    for path, _ in module_paths(module):
        if path not in paths and path.endswith(tuple(paths)) and paths:
            raise ValueError(
                f"PEFT finds modules to save by the end of their names, and {path!r} ends like "
                f"one of {paths}; it would be replaced too. Give the module another name"
            )
    return paths or None


# Settings that do not change what a trained adapter computes on its base.
_IGNORED = frozenset(
    ["alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"]
)  # fmt: skip
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Other initializations change the base's weights, which this file does not hold.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"the adapter is {config.get('peft_type')!r}, and only LORA can be read")
    unfit = {
        key: value
        for key, value in config.items()
        if key not in _IGNORED
        and (value not in _REQUIRED[key] if key in _REQUIRED else bool(value))
    }
    if unfit:
        shown = ", ".join(f"{key}={value!r}" for key, value in unfit.items())
        raise ValueError(f"the adapter's configuration asks for what NNx does not compute: {shown}")


def _read(directory: Path) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing: not a PEFT adapter directory")
    with open(directory / CONFIG_FILE, encoding="utf-8") as stream:
        config = json.load(stream)
    if not isinstance(config, dict):
        raise ValueError(f"{directory / CONFIG_FILE} holds no JSON object")
    try:
        return config, load_file(directory / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} is no safetensors file: {error}") from error


def _saved_modules(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that PEFT's suffixes name, by path."""
    found = {
        path: part for path, part in module_paths(module) if path and path.endswith(tuple(names))
    }
    # A part of one that is saved already comes with it.
    outer = {p: m for p, m in found.items() if not any(p.startswith(f"{o}.") for o in found)}
    missing = [name for name in names if not any(path.endswith(name) for path in outer)]
    if missing:
        unmatched = describe_unmatched(missing, [p for p, _ in module_paths(module) if p], "module")
        raise ValueError(f"the adapter's modules_to_save: {unmatched}")
    return outer


def _split_off(
    tensors: Mapping[str, torch.Tensor], saved: Mapping[str, nn.Module]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The adapters' tensors as they are, and those of whole modules by our names."""
    rest, whole = {}, {}
    for key, value in tensors.items():
        name = key.removeprefix(_PREFIX)
        if name.startswith(tuple(f"{path}." for path in saved)):
            whole[name] = value
        else:
            rest[key] = value
    return rest, whole


def _whole_problems(
    module: nn.Module, saved: Mapping[str, nn.Module], whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    here = module.state_dict()
    for key in sorted(keys_below(module, saved) | whole.keys()):
        if key not in whole:
            yield key, "it is saved whole, and the file does not hold it"
        elif key not in here:
            yield key, "the module has no such tensor"
        elif here[key].shape != whole[key].shape:
            found, wanted = tuple(whole[key].shape), tuple(here[key].shape)
            yield key, f"the file's shape is {found}, the module's {wanted}"


_KEY = re.compile(
    r"(?P<path>.+)\.(?:(?P<plain>lora_[AB])\.weight|lora_embedding_(?P<table>[AB])"
    rf"|(?P<magnitude>{_MAGNITUDE})(?:\.weight)?)"
)


def _group(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors by layer, under our own names for them."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        match = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"the adapter file holds {key!r}, which is no part of a LoRA layer")
        name = match["plain"] or (f"lora_{match['table']}" if match["table"] else "magnitude")
        parts.setdefault(match["path"], {})[name] = value
    if not parts:
        raise ValueError("the adapter file is empty")
    return parts


def _hyperparameters(
    config: Mapping[str, Any], path: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[float, float, bool, bool]:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    flags = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    return float(alpha), float(config.get("lora_dropout", 0.0)), *flags


@dataclass
class _Plan:
    """How one layer will be wrapped."""

    slot: Slot
    tensors: Mapping[str, torch.Tensor]
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    r: int = field(init=False, default=0)

    def problems(self) -> list[str]:
        layer = self.slot.module
        names = {"lora_A", "lora_B"} | ({"magnitude"} if self.dora else set())
        if set(self.tensors) != names:
            return [f"the file holds {sorted(self.tensors)}, expected {sorted(names)}"]
        if self.dora and not isinstance(layer, nn.Linear):
            return [f"DoRA is read for Linear layers, not for a {type(layer).__name__}"]
        self.r = self.tensors["lora_A"].shape[0]
        try:
            skeleton = self._wrapper()(meta_copy(layer), **self._options())
        except ValueError as error:
            return [str(error)]
        wanted = {name: tuple(skeleton.get_parameter(name).shape) for name in sorted(names)}
        found = {name: tuple(self.tensors[name].shape) for name in sorted(names)}
        return [] if found == wanted else [f"the file's shapes are {found}, the layer's {wanted}"]

    @torch.no_grad()
    def build(self, layer: nn.Module) -> nn.Module:
        wrapper = self._wrapper()(layer, **self._options())
        for name, value in self.tensors.items():
            wrapper.get_parameter(name).copy_(value)
        return wrapper

    def _wrapper(self) -> Any:
        return DoRALinear if self.dora else lora_wrapper(self.slot.module)

    def _options(self) -> dict[str, Any]:
        if self.dora:  # DoRALinear scales by alpha / r only
            alpha = self.alpha * (self.r**0.5 if self.rslora else 1.0)
            return {"r": self.r, "alpha": alpha, "dropout": self.dropout}
        dropout = 0.0 if isinstance(self.slot.module, nn.Embedding) else self.dropout
        return {"r": self.r, "alpha": self.alpha, "dropout": dropout, "rslora": self.rslora}
