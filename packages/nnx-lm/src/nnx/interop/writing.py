"""``to_transformers``: a new folder of Hugging Face transformers."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from nnx.interop.names import INDEX, WEIGHTS, hf_state
from nnx.interop.parity import TOLERANCE, Parity, compare, first_difference
from nnx.interop.plain import plain_transformer
from nnx.interop.reading import from_transformers, tensors_of
from nnx.interop.vocabulary import Vocabulary, check_tokenizer
from nnx.lm.tokenizer_record import TOKENIZER_FILE, tokenizer_bytes
from nnx.lm.transformer import TransformerNN
from nnx.utils import files as fs
from nnx.utils import validation as check
from nnx.utils.folders import flush_file, new_folders, remove_tree_quietly

if TYPE_CHECKING:
    from nnx.lm.model import GenerativeNNModel


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
    with new_folders(os.path.dirname(target)):
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
        _save(shards[0], os.path.join(folder, WEIGHTS))
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _save(shard, os.path.join(folder, name))
        where |= dict.fromkeys(shard, name)
    total = sum(value.numel() * value.element_size() for value in state.values())
    _write_json(
        os.path.join(folder, INDEX), {"metadata": {"total_size": total}, "weight_map": where}
    )


def _save(shard: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    save_file(shard, path, metadata={"format": "pt"})
    flush_file(path)


def _check(net: TransformerNN, folder: str) -> Parity:
    exact = net.tok_embed.weight.dtype == torch.float32
    by, written = _reader(folder)

    def off() -> str:
        read = dict(tensors_of(folder))
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
