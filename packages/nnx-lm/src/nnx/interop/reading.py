"""``from_transformers``: a folder of Hugging Face transformers as a model that trains."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nnx.enums import Losses, Nets
from nnx.interop.names import INDEX, LAYER, QKV, WEIGHTS, hf_state, pairs
from nnx.lm.tokenizer_record import TOKENIZER_FILE, tokenizer_of
from nnx.lm.transformer import TransformerNN
from nnx.params import NNModelParams, NNTransformerParams
from nnx.plugins.siblings import install_line
from nnx.utils import validation as check
from nnx.utils.strict import parse_json, read_regular

if TYPE_CHECKING:
    from nnx.lm.model import GenerativeNNModel

_KNOWN = ("llama", "mistral", "qwen2")
_JSON_LIMIT = 1 << 26


def from_transformers(
    folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> GenerativeNNModel:
    """The model of a transformers folder, which trains, takes adapters and goes on writing.

    ``folder`` is a folder, or the id ``"owner/name"`` of a Hub repository where no such folder
    is there: only that is downloaded, at ``revision``. Llama's architecture is read, Mistral's
    and Qwen2's where they compute the same, and safetensors alone. ``dtype`` casts the weights;
    ``None`` keeps that of the files.

    Raises ``FileNotFoundError`` for what is not there, and ``ValueError`` that names what the
    transformer has no place for, a shard that is missing, and a tensor that is missing, left
    over or of another shape.
    """
    from nnx.engine.unbuilt import giving_weights
    from nnx.lm.model import GenerativeNNModel
    from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
    from nnx.store import NNCheckpoint

    path = _local(folder, revision)
    config = _read_json(os.path.join(path, "config.json"))
    params = params_of(config, os.path.join(path, "config.json"))
    tokenizer = None
    file = os.path.join(path, TOKENIZER_FILE)
    if os.path.isfile(file):
        tokenizer = tokenizer_of(read_regular(file, limit=1 << 28), file)
    state = _net_state(dict(tensors_of(path)), params, path)
    if dtype is not None:
        state = {name: value.to(dtype) for name, value in state.items()}
    checkpoint = NNCheckpoint(
        net_params=params, net_state=state,
        model_params=NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
        idp=NNIterationDataPoint(
            lr=0.0, iter_idx=0, epoch_idx=0, batch_idx=0, train_edp=NNEvaluationDataPoint(loss=0.0)
        ),
    )  # fmt: skip
    kept = state["tok_embed.weight"].dtype
    with giving_weights():
        model = GenerativeNNModel.from_checkpoint(checkpoint, tokenizer=tokenizer)
    model.net.to(kept)
    return model


def params_of(config: Mapping[str, Any], where: str) -> NNTransformerParams:
    """The shape that a ``config.json`` describes; refuses by name what is computed otherwise."""
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise ValueError(
            f"{where} is of model_type {kind!r}; from_transformers reads {', '.join(_KNOWN)}"
        )

    def refuse(what: str) -> None:
        raise ValueError(f"{where}: {what}, which NNx's transformer does not compute")

    def number(name: str) -> int:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{where}: {name} must be a positive integer, not {value!r}")
        return value

    width, heads, context = (
        number("hidden_size"), number("num_attention_heads"), number("max_position_embeddings"),
    )  # fmt: skip
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        said = config.get(name) or {}
        if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
            refuse(f"the {name} {check.show(said)}")
        scaling = said.get("rope_type", said.get("type", "default"))
        if scaling != "default":
            refuse(f"the rope scaling {scaling!r}")
        rope |= said
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse(f"the activation {config['hidden_act']!r}")
    if (config.get("head_dim") or width // heads) * heads != width:
        refuse(f"heads of {config['head_dim']} channels for {heads} heads of {width}")
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        refuse("rotary positions of a part of each head")
    if config.get("pretraining_tp", 1) != 1:
        refuse("the split products of pretraining_tp")
    window = config.get("sliding_window")
    if kind == "qwen2" and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (type(window) is not int or window < context):
        refuse(f"attention to a sliding window of {window} tokens")

    def real(name: str, value: Any) -> float:
        return float(check.real(where, name, value))

    shape: dict[str, Any] = {
        "vocab_size": number("vocab_size"), "n_layers": number("num_hidden_layers"),
        "d_model": width, "max_seq_len": context, "ffn_dim": number("intermediate_size"),
        "rope_base": real(
            "rope_theta", rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        ),
        "tie_embeddings": check.flag(
            where, "tie_word_embeddings", config.get("tie_word_embeddings") or False
        ),
        "attn_dropout": real("attention_dropout", config.get("attention_dropout") or 0.0),
        "norm_eps": real("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
    }  # fmt: skip
    shared = config.get("num_key_value_heads") or heads
    return _params(shape, heads, None if shared == heads else shared)


def _params(shape: dict[str, Any], heads: int, shared: int | None) -> NNTransformerParams:
    """Without what is the default, so that a model that was exported comes back as it was."""
    implied = 2 * 4 * shape["d_model"] // 3
    if shape["ffn_dim"] == implied:
        shape["ffn_dim"] = None
    base = (
        NNTransformerParams.builder()
        .vocab(shape.pop("vocab_size"))
        .layers(n=shape.pop("n_layers"), heads=heads, d_model=shape.pop("d_model"))
        .context(max_seq_len=shape.pop("max_seq_len"), rope_base=shape.pop("rope_base"))
        .build()
    )
    return dataclasses.replace(base, n_kv_heads=shared, **shape)


def _net_state(
    found: dict[str, torch.Tensor], params: NNTransformerParams, path: str
) -> dict[str, torch.Tensor]:
    assert params.n_heads is not None
    if params.n_layers > len(found):  # before so many layers are made
        raise ValueError(
            f"{path} lacks tensors: num_hidden_layers is {params.n_layers} and it holds {len(found)}"
        )
    with torch.device("meta"):
        empty = TransformerNN(params)
    wanted = {name: tuple(value.shape) for name, value in hf_state(empty).items()}
    for name in [name for name in found if re.search(r"\.rotary_emb\.inv_freq$", name)]:
        del found[name]
    if params.tie_embeddings and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        if not torch.equal(head, found.get("model.embed_tokens.weight", torch.empty(0))):
            raise ValueError(
                f"{path}: tie_word_embeddings is set, and lm_head.weight is another tensor than "
                "the embedding"
            )
    for name in [name for name in found if name.endswith(".bias")]:
        if found.pop(name).count_nonzero():
            raise ValueError(
                f"{path}: {name} is added to a projection, which NNx's transformer does not compute"
            )
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{path} lacks {len(missing)} tensor(s): {', '.join(missing[:3])}")
    if extra := [name for name in found if name not in wanted]:
        raise ValueError(
            f"{path} holds {len(extra)} tensor(s) that the architecture has no place for: "
            f"{', '.join(extra[:3])}"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise ValueError(
                f"{path}: {name} has the shape {tuple(found[name].shape)}, and the config means "
                f"{shape}"
            )
        if not found[name].is_floating_point():
            raise ValueError(f"{path}: {name} is {found[name].dtype}, no floating-point weight")
    width = params.d_model // params.n_heads
    embedding = found.pop("model.embed_tokens.weight")
    state = {"tok_embed.weight": embedding}
    for i in range(params.n_layers):
        q, k, v = (found.pop(f"model.layers.{i}.{name}") for name in QKV)
        state[f"blocks.{i}.attn.w_qkv.weight"] = torch.cat((pairs(q, width), pairs(k, width), v))
        for own, name in LAYER.items():
            state[f"blocks.{i}.{own}"] = found.pop(f"model.layers.{i}.{name}")
    state["norm_out.weight"] = found.pop("model.norm.weight")
    state["lm_head.weight"] = embedding if params.tie_embeddings else found.pop("lm_head.weight")
    return state


def tensors_of(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder's safetensors, shard by shard."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = os.path.join(path, INDEX)
    names = [WEIGHTS]
    if os.path.isfile(index):
        where = _read_json(index).get("weight_map")
        if not isinstance(where, Mapping) or not all(isinstance(v, str) for v in where.values()):
            raise ValueError(f"{index} has no weight_map of tensors to files")
        names = sorted(set(where.values()))
    for name in names:
        file = os.path.join(path, name)
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, no safetensors file of the folder")
        if not os.path.isfile(file):
            raise FileNotFoundError(_missing(path, name))
        try:
            yield from load_file(file).items()
        except SafetensorError as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None


def _missing(path: str, name: str) -> str:
    pickled = sorted(n for n in os.listdir(path) if n.endswith((".bin", ".pt", ".pth")))
    if pickled:
        return (
            f"{path} has its weights in {pickled[0]}, a pickle, which could run code and is not "
            "read; let transformers save it again as safetensors"
        )
    return f"{path} lacks {name}, a file of its weights"


def _read_json(path: str) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{os.path.dirname(path)} has no {os.path.basename(path)}")
    found = parse_json(read_regular(path, limit=_JSON_LIMIT), path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return found


def _local(folder: str | os.PathLike[str], revision: str | None) -> str:
    """The folder itself, or where the files of a Hub repository were downloaded to."""
    path = os.fspath(folder)
    if os.path.isdir(path):
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise FileNotFoundError(f"there is no folder {path}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"there is no folder {path}; to download the repository of that name: "
            f"{install_line('nnx-lm', 'hub')}"
        ) from None
    return str(
        snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"])
    )
