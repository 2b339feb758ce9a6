"""A transformer and its tokenizer as one GGUF file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nnx.interop.gguf.tensor_name_map import map_tensors, net_state
from nnx.interop.parity import TOLERANCE, Parity, ParityError, compare, first_difference
from nnx.interop.plain import plain_transformer
from nnx.interop.vocabulary import Vocabulary, check_tokenizer
from nnx.lm.layers import RoPE
from nnx.lm.transformer import TransformerNN
from nnx.params import NNTransformerParams
from nnx.plugins.siblings import install_line
from nnx.utils import files as fs
from nnx.utils import validation as check
from nnx.utils.folders import flush_file, new_folders

SUPPORTED_QUANTIZATIONS = ("F32", "F16", "BF16")
LLAMA_QUANTIZATIONS = (*SUPPORTED_QUANTIZATIONS, "Q8_0")
ARCHITECTURE = "nnx_transformer"
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
# What the program llama-quantize makes of an F16 file.
_ELSEWHERE = (
    "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ", "TQ",
)  # fmt: skip
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # types of tokens


def write_gguf(
    transformer_nn: TransformerNN,
    tokenizer: Any,
    out_path: str | os.PathLike[str],
    *,
    architecture: str = ARCHITECTURE,
    quantization: str = "F16",
    model_name: str | None = None,
) -> str:
    """Write a transformer and its tokenizer to one ``.gguf`` file; its absolute path.

    ``architecture="nnx_transformer"`` is NNx's own: complete, and read by no stock program.
    ``"llama"`` is what llama.cpp and everything built on it load; it takes byte-level
    tokenizers (``train_bpe(..., byte_level=True)``) alone, whose cutting of text llama.cpp
    knows as "gpt-2". ``quantization`` is "F32", "F16", "BF16", or "Q8_0" for "llama" (F16 for
    weights whose rows are no multiple of 32); norms stay float32.

    The file is read back, and its logits and weights compared with the network's:
    ``<out_path>.parity.json`` says how close they are, and a float32 file that is off by more
    than 1e-4 is removed.

    Raises ``ImportError`` without the ``gguf`` library and for a quantization that the program
    llama-quantize makes, ``ValueError`` for an unknown one and for what the format cannot hold,
    :class:`ParityError` for a file that computes something else. Then nothing is left.
    """
    net = plain_transformer(transformer_nn, "write_gguf")
    check.text("write_gguf", "architecture", architecture)
    _check_quantization(quantization, architecture)
    words = Vocabulary.of(
        check_tokenizer(tokenizer, "write_gguf"), net.params.vocab_size, "write_gguf"
    )
    if architecture == "llama" and not words.byte_level:
        raise ValueError(
            "write_gguf: llama.cpp cannot cut text as this tokenizer does; train one with "
            "train_bpe(..., byte_level=True), or keep architecture='nnx_transformer'"
        )
    if architecture == "llama" and not words.merges:
        raise ValueError(
            "write_gguf: llama.cpp reads no tokenizer without merges; train one with a greater "
            "vocab_size (a byte-level one has 256 tokens before its first merge)"
        )
    gguf = _library()
    target = os.path.abspath(os.fspath(out_path))
    if os.path.isdir(target):
        raise IsADirectoryError(f"write_gguf writes a file, and {target} is a folder")
    with new_folders(os.path.dirname(target)):
        staged = fs.temporary_name(target)
        try:
            with contextlib.closing(gguf.GGUFWriter(staged, architecture)) as writer:
                _describe(writer, net, words, architecture, quantization, model_name)
                for name, array in map_tensors(net).items():
                    kind, data = _encoded(gguf, array, quantization)
                    writer.add_tensor(name, data, raw_dtype=kind)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            parity = _check(gguf, net, staged, quantization)
            flush_file(staged)
            fs.disk.replace(staged, target)
        except BaseException:
            fs.remove_quietly(staged)
            raise
        with fs.atomic_write(f"{target}.parity.json") as stream:
            stream.write(parity.to_json())
    return target


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            f"write_gguf needs the gguf library: {install_line('nnx-lm', 'gguf')}"
        ) from None
    return gguf


def _check_quantization(quantization: Any, architecture: str) -> None:
    known = LLAMA_QUANTIZATIONS if architecture == "llama" else SUPPORTED_QUANTIZATIONS
    if quantization in known:
        return
    if isinstance(quantization, str) and quantization.upper().startswith(_ELSEWHERE):
        raise ImportError(
            f"write_gguf writes {', '.join(known)} for architecture={architecture!r}; "
            f"{quantization} is made of an F16 file by llama.cpp's own program: "
            f"llama-quantize model.gguf model-{quantization}.gguf {quantization}"
        )
    raise ValueError(f"quantization must be one of {', '.join(known)}, not {quantization!r}")


def _describe(
    writer: Any, net: TransformerNN, words: Vocabulary, architecture: str, quantization: str,
    name: str | None,
) -> None:  # fmt: skip
    """The metadata: shape, then vocabulary."""
    params = net.params
    assert params.n_heads is not None
    writer.add_name(name or f"nnx_transformer_{params.n_layers}x{params.d_model}")
    writer.add_file_type(_FILE_TYPES[quantization])
    writer.add_context_length(params.max_seq_len)
    writer.add_embedding_length(params.d_model)
    writer.add_block_count(params.n_layers)
    writer.add_feed_forward_length(params.ffn_width)
    writer.add_head_count(params.n_heads)
    writer.add_head_count_kv(params.kv_heads)
    writer.add_layer_norm_rms_eps(params.norm_eps)
    writer.add_rope_dimension_count(params.d_model // params.n_heads)
    writer.add_rope_freq_base(params.rope_base)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2" if words.byte_level else "default")
    writer.add_token_list(list(words.tokens))
    writer.add_token_types([_token_type(words, i) for i in range(len(words.tokens))])
    if words.merges:
        writer.add_token_merges(list(words.merges))
    for role, add in (
        ("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id), ("unk", writer.add_unk_token_id),
    ):  # fmt: skip
        if role in words.roles:
            add(words.roles[role])
    if architecture == "llama":
        writer.add_vocab_size(params.vocab_size)
        writer.add_add_bos_token(False)  # an NNx tokenizer adds nothing of its own accord
        if quantization == "Q8_0":
            writer.add_quantization_version(2)
        if words.chat_template is not None:
            writer.add_chat_template(words.chat_template)
            writer.add_eot_token_id(words.tokens.index("<|end|>"))


def _token_type(words: Vocabulary, id: int) -> int:
    if id in words.unused:
        return _UNUSED
    return _CONTROL if id in words.special else _NORMAL


def _encoded(gguf: Any, array: np.ndarray, quantization: str) -> tuple[Any, np.ndarray]:
    """A tensor's kind, and its numbers or bytes in that kind."""
    kinds = gguf.GGMLQuantizationType
    if array.ndim == 1 or quantization == "F32":
        return kinds.F32, array
    if quantization == "F16" or (quantization == "Q8_0" and array.shape[-1] % 32):
        return kinds.F16, _half(array)
    kind = kinds[quantization]
    return kind, gguf.quants.quantize(array, kind)


def _half(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError(
            "write_gguf: a weight is beyond float16's 65,504; write quantization='BF16' or 'F32'"
        )
    return half


def _check(gguf: Any, net: TransformerNN, path: str, quantization: str) -> Parity:
    """Read the file back: every weight is the source's as it was to be rounded."""
    reader = gguf.GGUFReader(path, mode="c")
    read = {t.name: _decoded(gguf, t) for t in reader.tensors}
    source = map_tensors(net)

    def pairs() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        half = {"F16": torch.float16, "BF16": torch.bfloat16}.get(quantization)
        for name, array in source.items():
            values = torch.from_numpy(array)
            rounded = values if half is None or values.ndim == 1 else values.to(half).float()
            yield name, rounded, torch.from_numpy(read[name])

    def most(name: str, values: torch.Tensor) -> float:
        exact = values.ndim == 1 or quantization != "Q8_0"
        return 0.0 if exact else float(values.abs().max()) / 127

    if missing := source.keys() ^ read.keys():
        raise ParityError(f"the written file lacks {', '.join(sorted(missing))}. Nothing was kept")
    off = first_difference(pairs(), most)
    if not off.startswith("no tensor"):
        raise ParityError(f"read back from the file, {off}. Nothing was kept")
    params = _described(reader, "output.weight" not in read)
    state = net_state(read, params.n_layers)

    def written(tokens: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            other = TransformerNN(params)
        other.rope = RoPE(other.rope.dim, params.max_seq_len, params.rope_base)
        other.load_state_dict(state, assign=True)
        return other.eval()(tokens.cpu())

    exact = quantization == "F32" and net.tok_embed.weight.dtype == torch.float32
    return compare(
        net, written, by=f"gguf {_version('gguf')}", tolerance=TOLERANCE if exact else None,
        off=lambda: off,
    )  # fmt: skip


def _described(reader: Any, tied: bool) -> NNTransformerParams:
    """The shape that a file's metadata say, which is all that another program knows."""
    owner = reader.get_field("general.architecture").contents()

    def said(key: str) -> Any:
        return reader.get_field(f"{owner}.{key}").contents()

    heads = said("attention.head_count")
    return (
        NNTransformerParams.builder()
        .vocab(len(reader.get_field("tokenizer.ggml.tokens").contents()))
        .layers(n=said("block_count"), heads=heads, d_model=said("embedding_length"))
        .kv_heads(said("attention.head_count_kv"))
        .ffn_dim(said("feed_forward_length"))
        .context(max_seq_len=said("context_length"), rope_base=said("rope.freq_base"))
        .norm_eps(said("attention.layer_norm_rms_epsilon"))
        .tied_embeddings(tied)
        .build()
    )


def _decoded(gguf: Any, tensor: Any) -> np.ndarray:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.array(values, dtype=np.float32, copy=None).reshape(
        [int(size) for size in reversed(tensor.shape)]
    )


def _version(distribution: str) -> str:
    from importlib_metadata import version

    return version(distribution)
