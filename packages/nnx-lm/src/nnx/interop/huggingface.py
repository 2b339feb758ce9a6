"""Folders of Hugging Face transformers, both ways: the transformer's mathematics is Llama's."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nnx.enums import Losses, Nets
from nnx.interop.parity import TOLERANCE, Parity, compare, first_difference
from nnx.interop.plain import plain_transformer
from nnx.interop.vocabulary import Vocabulary, check_tokenizer
from nnx.lm.tokenizer_record import TOKENIZER_FILE, tokenizer_bytes, tokenizer_of
from nnx.lm.transformer import TransformerNN
from nnx.params import NNModelParams, NNTransformerParams
from nnx.utils import files as fs
from nnx.utils import validation as check
from nnx.utils.folders import remove_tree_quietly
from nnx.utils.strict import parse_json, read_regular

if TYPE_CHECKING:
    from nnx.lm.model import GenerativeNNModel

_LAYER = {
    "attn.w_o.weight": "self_attn.o_proj.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
    "norm1.weight": "input_layernorm.weight",
    "norm2.weight": "post_attention_layernorm.weight",
}
_QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_KNOWN = ("llama", "mistral", "qwen2")
_JSON_LIMIT = 1 << 26


# -- out -----------------------------------------------------------------------------------


def to_transformers(
    model: GenerativeNNModel,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = 5_000_000_000,
) -> str:
    """Write a new folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` open; its path.

    It holds ``config.json`` (of Llama), ``model.safetensors`` in shards of at most
    ``max_shard_size`` bytes, ``generation_config.json``, the tokenizer's files where the model
    has one, and its chat template. No code is needed to load it.

    The folder is loaded again, by transformers where it is installed, and its logits compared
    with the model's: ``parity.json`` says how close they are.

    Raises ``FileExistsError`` for a folder that holds something, ``ValueError`` for weights
    that are adapted, quantized or prefixed, and :class:`ParityError` where float32 logits are
    off by more than 1e-4. Then nothing is left.
    """
    net = plain_transformer(model, "to_transformers")
    check.count("to_transformers", "max_shard_size", max_shard_size)
    tokenizer = getattr(model, "tokenizer", None)
    words = None
    if tokenizer is not None:
        tokenizer = check_tokenizer(tokenizer, "to_transformers")
        words = Vocabulary.of(tokenizer, net.params.vocab_size, "to_transformers")
    target = os.path.abspath(os.fspath(folder))
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise FileExistsError(
            f"to_transformers writes a new folder, and {target} is there; name another, or "
            "remove it"
        )
    os.makedirs(os.path.dirname(target), exist_ok=True)
    staged = fs.temporary_name(target)
    os.mkdir(staged)
    try:
        for name, document in _documents(net, words).items():
            _write_json(os.path.join(staged, name), document)
        if tokenizer is not None:
            with fs.atomic_write(os.path.join(staged, TOKENIZER_FILE), "wb") as stream:
                stream.write(tokenizer_bytes(tokenizer))
        if words is not None and words.chat_template is not None:
            with fs.atomic_write(os.path.join(staged, "chat_template.jinja")) as stream:
                stream.write(words.chat_template)
        _write_weights(staged, hf_state(net), max_shard_size)
        with fs.atomic_write(os.path.join(staged, "parity.json")) as stream:
            stream.write(_check(net, staged).to_json())
        if os.path.isdir(target):
            os.rmdir(target)
        fs.disk.replace(staged, target)
    except BaseException:
        remove_tree_quietly(staged)
        raise
    return target


def hf_state(net: TransformerNN) -> dict[str, torch.Tensor]:
    """The weights by transformers' names.

    transformers rotates channel ``i`` with ``i + C/2`` where this transformer rotates ``2i``
    with ``2i + 1``: the rows of queries and keys are put in that order.
    """
    state = {name: value.detach() for name, value in net.state_dict().items()}
    found = {"model.embed_tokens.weight": state["tok_embed.weight"]}
    for i, block in enumerate(net.blocks):
        attention: Any = block.attn
        heads, shared, width = attention.n_heads, attention.n_kv_heads, attention.head_dim
        fused = state[f"blocks.{i}.attn.w_qkv.weight"]
        q, k, v = fused.split((heads * width, shared * width, shared * width))
        parts = (_halves(q, width), _halves(k, width), v)
        found |= {f"model.layers.{i}.{name}": part for name, part in zip(_QKV, parts)}
        for own, name in _LAYER.items():
            found[f"model.layers.{i}.{name}"] = state[f"blocks.{i}.{own}"]
    found["model.norm.weight"] = state["norm_out.weight"]
    if not net.params.tie_embeddings:
        found["lm_head.weight"] = state["lm_head.weight"]
    return found


def _halves(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of neighbouring channel pairs as two halves of each head."""
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(rows.shape)


def _pairs(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The way back from :func:`_halves`."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).reshape(rows.shape)


def _documents(net: TransformerNN, words: Vocabulary | None) -> dict[str, Any]:
    params = net.params
    assert params.n_heads is not None
    roles = {} if words is None else words.roles
    ids = {f"{role}_token_id": roles.get(role) for role in ("bos", "eos", "pad")}
    dtype = str(net.tok_embed.weight.dtype).removeprefix("torch.")
    documents: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": params.vocab_size,
            "hidden_size": params.d_model,
            "intermediate_size": params.ffn_width,
            "num_hidden_layers": params.n_layers,
            "num_attention_heads": params.n_heads,
            "num_key_value_heads": params.kv_heads,
            "head_dim": params.d_model // params.n_heads,
            "hidden_act": "silu",
            "max_position_embeddings": params.max_seq_len,
            "rms_norm_eps": params.norm_eps,
            "rope_theta": params.rope_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": params.rope_base},
            "tie_word_embeddings": params.tie_embeddings,
            "attention_bias": False,
            "attention_dropout": params.attn_dropout,
            "mlp_bias": False,
            "torch_dtype": dtype,
            **ids,
        },
        "generation_config.json": {**ids, "do_sample": False},
    }
    if words is not None:
        named = {f"{role}_token": words.token(role) for role in ("bos", "eos", "pad", "unk")}
        documents["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": params.max_seq_len,
            "clean_up_tokenization_spaces": False,
            **{name: token for name, token in named.items() if token is not None},
        }
        if words.chat_template is not None:
            documents["tokenizer_config.json"]["eos_token"] = "<|end|>"
            documents["generation_config.json"]["eos_token_id"] = words.tokens.index("<|end|>")
    return documents


def _write_json(path: str, document: Any) -> None:
    with fs.atomic_write(path) as stream:
        stream.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _write_weights(folder: str, state: dict[str, torch.Tensor], most: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in state.items():
        bytes_ = value.numel() * value.element_size()
        if shards[-1] and size + bytes_ > most:
            shards.append({})
            size = 0
        shards[-1][name] = value.cpu().contiguous()
        size += bytes_
    if len(shards) == 1:
        save_file(shards[0], os.path.join(folder, _WEIGHTS), metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, os.path.join(folder, name), metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    total = sum(value.numel() * value.element_size() for value in state.values())
    _write_json(
        os.path.join(folder, _INDEX), {"metadata": {"total_size": total}, "weight_map": where}
    )


def _check(net: TransformerNN, folder: str) -> Parity:
    exact = net.tok_embed.weight.dtype == torch.float32
    by, written = _reader(folder)

    def off() -> str:
        read = dict(_tensors(folder))
        pairs = ((name, value.cpu(), read[name]) for name, value in hf_state(net).items())
        return first_difference(pairs, lambda name, value: 0.0)

    return compare(net, written, by=by, tolerance=TOLERANCE if exact else None, off=off)


def _reader(folder: str) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Who runs the written folder, and its logits of token ids."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        read = from_transformers(folder).net
        return "nnx", lambda tokens: read(tokens)
    from nnx.seeding import isolated_rng

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with isolated_rng():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, attn_implementation="sdpa"
            ).eval()
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
    return f"transformers {transformers.__version__}", lambda tokens: loaded(tokens).logits


# -- in ------------------------------------------------------------------------------------


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
    state = _net_state(dict(_tensors(path)), params, path)
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
    rope = dict(config.get("rope_parameters") or {}) or dict(config.get("rope_scaling") or {})
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        refuse(f"the rope scaling {scaling!r}")
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
    if window is not None and window < context:
        refuse(f"attention to a sliding window of {window} tokens")
    shape: dict[str, Any] = {
        "vocab_size": number("vocab_size"), "n_layers": number("num_hidden_layers"),
        "d_model": width, "max_seq_len": context, "ffn_dim": number("intermediate_size"),
        "rope_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attn_dropout": float(config.get("attention_dropout") or 0.0),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
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
        q, k, v = (found.pop(f"model.layers.{i}.{name}") for name in _QKV)
        state[f"blocks.{i}.attn.w_qkv.weight"] = torch.cat((_pairs(q, width), _pairs(k, width), v))
        for own, name in _LAYER.items():
            state[f"blocks.{i}.{own}"] = found.pop(f"model.layers.{i}.{name}")
    state["norm_out.weight"] = found.pop("model.norm.weight")
    state["lm_head.weight"] = embedding if params.tie_embeddings else found.pop("lm_head.weight")
    return state


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder's safetensors, shard by shard."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = os.path.join(path, _INDEX)
    names = [_WEIGHTS]
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
            f"there is no folder {path}; to download the repository of that name, install "
            "huggingface_hub"
        ) from None
    return str(
        snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"])
    )
