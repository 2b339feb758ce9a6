"""A PEFT adapter of a transformer, for the model that transformers opens."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from nnx.interop.names import HEAD, LAYER, QKV, halves
from nnx.interop.parity import TOLERANCE, Parity, compare
from nnx.lm.transformer import TransformerNN
from nnx.params import NNTransformerParams
from nnx.seeding import isolated_rng
from nnx.utils import files as fs
from nnx.utils.folders import new_folders, remove_tree_quietly
from nnx.utils.strict import parse_json, read_regular
from torch import nn

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LIMIT = 1 << 24


def adapter_to_transformers(
    adapter: str | os.PathLike[str],
    params: NNTransformerParams,
    folder: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    adapted: nn.Module | None = None,
) -> str:
    """Rewrite a PEFT folder of a ``TransformerNN`` for its exported model; the new folder.

    ``adapter`` is what ``nnx.peft.save_peft_adapter(model.net, ...)`` wrote for a network of
    ``params``: LoRA or DoRA on its layers. The fused query, key and value layer becomes three,
    which share its input matrix. ``PeftModel.from_pretrained(base, folder)`` then computes what
    the adapted network does, where ``base`` is the folder that ``to_transformers`` wrote of the
    base; ``base_model`` is noted as its name.

    With ``adapted``, the network that carries the adapter, and ``base_model`` the folder itself,
    PEFT (which must be installed) runs what was written and its logits are compared with the
    network's: ``parity.json`` says how close they are.

    Raises ``FileNotFoundError`` for a folder without an adapter, ``FileExistsError`` for a
    ``folder`` that holds something, ``ValueError`` for an adapter of another network, and
    :class:`ParityError` where float32 logits are off by more than 1e-4. Then nothing is left.
    """
    from safetensors.torch import load_file, save

    source, target = os.fspath(adapter), os.path.abspath(os.fspath(folder))
    for name in (_CONFIG, _WEIGHTS):
        if not os.path.isfile(os.path.join(source, name)):
            raise FileNotFoundError(f"{source} has no {name}: write one with save_peft_adapter")
    if os.path.isdir(target) and os.listdir(target):
        raise FileExistsError(f"{target} holds something; name another folder, or remove it")
    where = os.path.join(source, _CONFIG)
    config = parse_json(read_regular(where, limit=_LIMIT), where)
    rows = _Rows(params, source)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in load_file(os.path.join(source, _WEIGHTS)).items():
        path, kind = _split(key, source)
        for new, part in rows.of(path, kind, value).items():
            tensors[f"{_PREFIX}{new}.{kind}"] = part.contiguous().clone()
    paths = dict.fromkeys(
        _split(key, source)[0] for key in load_file(os.path.join(source, _WEIGHTS))
    )
    config = {
        **config,
        "base_model_name_or_path": base_model,
        "task_type": "CAUSAL_LM",
        "target_modules": [new for path in paths for new in rows.names(path)],
        **{
            name: {
                f"^{re.escape(new)}": value
                for pattern, value in (config.get(name) or {}).items()
                for new in rows.names(_plain(pattern))
            }
            for name in ("rank_pattern", "alpha_pattern")
        },
    }
    if config.get("modules_to_save"):
        raise ValueError(
            f"{source} holds whole modules ({', '.join(config['modules_to_save'][:3])}), which have "
            "no names in the exported model; merge the adapter and export the model instead"
        )
    with new_folders(os.path.dirname(target)):
        staged = fs.temporary_name(target)
        os.mkdir(staged)
        try:
            with fs.atomic_write(os.path.join(staged, _WEIGHTS), "wb") as stream:
                stream.write(save(tensors, metadata={"format": "pt"}))
            with fs.atomic_write(os.path.join(staged, _CONFIG)) as stream:
                stream.write(json.dumps(config, indent=2, sort_keys=True) + "\n")
            if adapted is not None:
                parity = _check(adapted, base_model, staged)
                with fs.atomic_write(os.path.join(staged, "parity.json")) as stream:
                    stream.write(parity.to_json())
            if os.path.isdir(target):
                os.rmdir(target)
            fs.disk.replace(staged, target)
        except BaseException:
            remove_tree_quietly(staged)
            raise
    return target


def _check(adapted: nn.Module, base_model: str | None, folder: str) -> Parity:
    """PEFT's logits of the base with the written adapter, beside the adapted network's."""
    if not isinstance(adapted, TransformerNN):
        raise TypeError(f"adapted is the TransformerNN itself, not {type(adapted).__name__}")
    if base_model is None or not os.path.isdir(base_model):
        raise ValueError(
            "to compare the adapter, name the base by its folder: base_model=to_transformers(...)"
        )
    try:
        peft: Any = importlib.import_module("peft")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"comparing an adapter needs {error.name}: install peft and transformers, or leave "
            "out adapted="
        ) from None
    with isolated_rng():
        base = transformers.AutoModelForCausalLM.from_pretrained(base_model, local_files_only=True)
        theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    exact = all(p.dtype == torch.float32 for p in adapted.parameters())
    return compare(
        adapted, lambda tokens: theirs(input_ids=tokens).logits, by=f"peft {peft.__version__}",
        tolerance=TOLERANCE if exact else None,
        off=lambda: f"{base_model} is another base, or the adapter is another one's",
    )  # fmt: skip


class _Rows:
    """Which layers of the exported model a layer becomes, and which of its rows each gets."""

    def __init__(self, params: NNTransformerParams, source: str) -> None:
        assert params.n_heads is not None
        self._width = params.d_model // params.n_heads
        self._sizes = [n * self._width for n in (params.n_heads, params.kv_heads, params.kv_heads)]
        self._layers, self._source = params.n_layers, source

    def names(self, path: str) -> list[str]:
        if path in HEAD:
            return [HEAD[path]]
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
        if found is not None and int(found[1]) < self._layers:
            prefix = f"model.layers.{found[1]}."
            if found[2] == "attn.w_qkv":
                return [prefix + name.removesuffix(".weight") for name in QKV]
            if f"{found[2]}.weight" in LAYER:
                return [prefix + LAYER[f"{found[2]}.weight"].removesuffix(".weight")]
        raise ValueError(f"{self._source} adapts {path!r}, no layer of this transformer")

    def of(self, path: str, kind: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        names = self.names(path)
        if len(names) == 1 or kind == "lora_A.weight":
            return dict.fromkeys(names, value)
        if value.shape[0] != sum(self._sizes):
            raise ValueError(
                f"{self._source}: {path}.{kind} has {value.shape[0]} rows, and this transformer's "
                f"layer {sum(self._sizes)}"
            )
        q, k, v = value.split(self._sizes)
        return dict(zip(names, (halves(q, self._width), halves(k, self._width), v)))


def _split(key: str, source: str) -> tuple[str, str]:
    """A tensor's layer, and what it is of it."""
    found = re.fullmatch(
        r"base_model\.model\.(.+)\.(lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector)",
        key,
    )
    if found is None:
        raise ValueError(f"{source} holds {key!r}, no tensor of a LoRA adapter; merge it instead")
    return found[1], found[2]


def _plain(pattern: Any) -> str:
    return re.sub(r"\\(.)", r"\1", str(pattern).removeprefix("^"))
