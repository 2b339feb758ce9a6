"""Models in the files of other programs, read by those programs and back."""

from __future__ import annotations

import dataclasses
import json
import os
import pydoc_data.topics
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx import (
    GenerativeNNModel,
    Losses,
    Nets,
    NNModelParams,
    NNTokenizerParams,
    NNTransformerParams,
    interop,
    set_seed,
    train_bpe,
)
from nnx.interop import ParityError
from nnx.interop.gguf import SUPPORTED_QUANTIZATIONS, map_tensors

gguf = pytest.importorskip("gguf")

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "language_models.json").read_text(encoding="utf-8")
)
PROMPTS = (
    "The assert", "Python", "a class is", "def f(x):", "In the", "é ü 漢字 🙂", "operators", "1 + 1",
    "New in version", " The",
)  # fmt: skip


@cache
def bpe():
    texts = list(pydoc_data.topics.topics.values())[:20]
    return train_bpe(texts=texts, vocab_size=500, byte_level=True, special_tokens=["<|endoftext|>"])


def made(*, heads=4, kv=None, tied=True, seed=3, extra=3) -> GenerativeNNModel:
    """A model of an odd vocabulary whose weights are large enough to be sure of its words."""
    tokenizer = NNTokenizerParams(path="tok.json", tokenizer=bpe())
    shape = (
        NNTransformerParams.builder()
        .vocab(tokenizer.vocab_size + extra)
        .layers(n=2, heads=heads, d_model=32)
        .context(max_seq_len=96)
        .tied_embeddings(tied)
    )
    if kv is not None:
        shape.kv_heads(kv)
    set_seed(seed)
    model = GenerativeNNModel(
        shape.build(), NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY), tokenizer
    )
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        model.net.lm_head.weight[0] = 0  # it never ends a text
    return model


def left(folder=".") -> set[str]:
    return set(os.listdir(folder))


SHAPES = [(4, None, True), (4, 2, False), (4, 1, True), (1, None, False)]


# -- GGUF ------------------------------------------------------------------------------------


def test_the_file_has_the_keys_names_and_shapes_of_the_original(kit) -> None:
    model = kit.model()
    path = interop.write_gguf(model.net, model.tokenizer, "g/m.gguf", quantization="F32")
    assert path == os.path.abspath("g/m.gguf")
    reader = gguf.GGUFReader(path)
    wanted = GOLDEN["lm_gguf"]
    assert sorted(reader.fields) == wanted["keys"]
    assert {t.name: [int(n) for n in t.shape] for t in reader.tensors} == wanted["tensors"]
    assert reader.get_field("general.name").contents() == "nnx_transformer_2x32"


@pytest.mark.parametrize(("heads", "kv", "tied"), SHAPES)
def test_a_float32_file_keeps_every_weights_bits(kit, heads, kv, tied) -> None:
    net = made(heads=heads, kv=kv, tied=tied).net
    interop.write_gguf(net, made().tokenizer, "m.gguf", quantization="F32", architecture="llama")
    read = {t.name: t.data for t in gguf.GGUFReader("m.gguf").tensors}
    for name, array in map_tensors(net).items():
        assert np.array_equal(read[name].reshape(array.shape), array), name
    assert ("output.weight" in read) is not tied
    parity = json.loads(Path("m.gguf.parity.json").read_text())
    assert parity["max_logit_difference"] == 0.0
    assert parity["greedy_agreement"] == 1.0


@pytest.mark.parametrize(
    ("quantization", "kind", "most"),
    [("F16", "F16", 0.05), ("BF16", "BF16", 0.5), ("Q8_0", "Q8_0", 1.5)],
)
def test_narrower_weights_are_those_rounded(kit, quantization, kind, most) -> None:
    model = made()
    interop.write_gguf(
        model.net, model.tokenizer, "m.gguf", quantization=quantization, architecture="llama"
    )
    reader = gguf.GGUFReader("m.gguf")
    found = {t.name: t for t in reader.tensors}
    assert found["blk.0.attn_q.weight"].tensor_type.name == kind
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert found["blk.0.ffn_down.weight"].tensor_type.name == ("F16" if kind == "Q8_0" else kind)
    parity = json.loads(Path("m.gguf.parity.json").read_text())
    assert 0 < parity["max_logit_difference"] < most
    assert parity["tolerance"] is None


@pytest.mark.parametrize(("heads", "kv", "tied"), SHAPES)
def test_transformers_reads_the_llama_file(kit, heads, kv, tied) -> None:
    transformers = pytest.importorskip("transformers")
    net = made(heads=heads, kv=kv, tied=tied).net.eval()
    interop.write_gguf(net, made().tokenizer, "m.gguf", quantization="F32", architecture="llama")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="m.gguf").eval()
    tokens = torch.randint(400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, net(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("heads", "kv", "tied"), SHAPES)
def test_llama_cpp_goes_on_as_the_model_does(kit, heads, kv, tied) -> None:
    """The stock program (xllamacpp, group ``peers``): rotary errors show after twenty tokens."""
    llama = pytest.importorskip("xllamacpp")
    model = made(heads=heads, kv=kv, tied=tied)
    for quantization in ("Q8_0", "F32"):
        interop.write_gguf(
            model.net, model.tokenizer, "m.gguf", quantization=quantization, architecture="llama"
        )
        params = llama.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = "m.gguf", 96, 1
        params.warmup, params.n_gpu_layers = False, 0
        # its defaults round keys, values and queries to float16
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server = llama.Server(params)
        for prompt in PROMPTS:
            answer = server.handle_completions(
                {"prompt": prompt, "temperature": 0, "n_predict": 64, "cache_prompt": False,
                 "logprobs": 1}
            )  # fmt: skip
            assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(prompt))
            assert answer["usage"]["completion_tokens"] == 64
            if quantization == "F32":  # bytes, since the text is cut inside characters
                parts = answer["choices"][0]["logprobs"]["content"]
                written = b"".join(bytes(part["bytes"]) for part in parts)
                wanted = model.generate(prompt, max_new_tokens=64, temperature=0)
                assert prompt + written.decode("utf-8", "replace") == wanted
        del server


def test_what_gguf_cannot_hold_is_refused_and_nothing_is_left(kit) -> None:
    model, words = made(), kit.model()
    for net, tokenizer, options, error, message in (
        (model.net, model.tokenizer, {"quantization": "Q4_K_M"}, ImportError, "llama-quantize"),
        (model.net, model.tokenizer, {"quantization": "Q8_0"}, ImportError, "llama-quantize"),
        (model.net, model.tokenizer, {"quantization": "F8"}, ValueError, "one of F32, F16, BF16"),
        (words.net, words.tokenizer, {"architecture": "llama"}, ValueError, "byte_level=True"),
        (model.net, None, {}, TypeError, "needs a tokenizer"),
        (words.net, model.tokenizer, {}, ValueError, "greatest id is 499"),
        (torch.nn.Linear(2, 2), words.tokenizer, {}, TypeError, "writes a TransformerNN"),
    ):
        before = left()
        with pytest.raises(error, match=message):
            interop.write_gguf(net, tokenizer, "x/m.gguf", **options)
        assert left() == before
    with torch.no_grad():
        model.net.blocks[0].ffn.w1.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="beyond float16"):
        interop.write_gguf(model.net, model.tokenizer, "m.gguf")
    with pytest.raises(ValueError, match="beyond float16"):
        interop.export_ollama_modelfile(model.net, model.tokenizer, "new/folders/o")
    assert left() == before
    assert SUPPORTED_QUANTIZATIONS == ("F32", "F16", "BF16")


@pytest.mark.parametrize("writer", ["gguf", "transformers"])
def test_an_export_that_computes_something_else_is_removed_and_says_which_tensor(
    kit, monkeypatch, writer
) -> None:
    model = made()
    if writer == "gguf":
        from nnx.interop.gguf import writer as module

        real = module._encoded

        def broken(gguf, array, quantization):
            kind, data = real(gguf, array, quantization)
            return kind, data + 1 if array.shape == (32, 85) else data

        monkeypatch.setattr(module, "_encoded", broken)
        with pytest.raises(ParityError, match=r"blk\.\d\.ffn_down\.weight is off by 1"):
            interop.write_gguf(model.net, model.tokenizer, "m.gguf", quantization="F32")
    else:
        from nnx.interop import writing as module

        real = module._write_weights

        def broken(folder, state, most):
            name = "model.layers.1.self_attn.k_proj.weight"
            real(folder, {**state, name: state[name].flip(0)}, most)

        monkeypatch.setattr(module, "_write_weights", broken)
        with pytest.raises(
            ParityError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight is off"
        ):
            interop.to_transformers(model, "hf")
    assert left() <= {"tok.json"}


def test_what_the_file_says_of_the_shape_is_what_is_run(kit, monkeypatch) -> None:
    model = made(kv=2)
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_rope_freq_base", lambda writer, base: writer.add_float32(
            f"{writer.arch}.rope.freq_base", 2 * base
        ),
    )  # fmt: skip
    with pytest.raises(ParityError, match="no tensor is off, so the reader computes something"):
        interop.write_gguf(model.net, model.tokenizer, "new/m.gguf", quantization="F32")
    assert left() <= {"tok.json"}


def test_a_file_that_cannot_get_its_name_leaves_the_old_one_with_its_proof(kit, monkeypatch):
    from nnx.utils import files

    model = made()
    interop.write_gguf(model.net, model.tokenizer, "m.gguf", quantization="F32")
    held = {name: Path(name).read_bytes() for name in ("m.gguf", "m.gguf.parity.json")}

    def fails(source, target):
        raise PermissionError(13, "no", target)

    monkeypatch.setattr(files.disk, "replace", fails)
    with pytest.raises(PermissionError):
        interop.write_gguf(made(seed=4).net, model.tokenizer, "m.gguf")
    assert {name: Path(name).read_bytes() for name in left() if name != "tok.json"} == held


def test_a_tokenizer_that_adds_tokens_is_none_that_llama_cpp_cuts_alike(kit) -> None:
    from tokenizers import Tokenizer, processors

    model, adding = made(), Tokenizer.from_str(bpe().to_str())
    adding.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    words = NNTokenizerParams(path="tok.json", tokenizer=adding)
    with pytest.raises(ValueError, match="cannot cut text as this tokenizer does"):
        interop.write_gguf(model.net, words, "m.gguf", architecture="llama")


# -- transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv", "tied"), SHAPES)
def test_transformers_opens_the_folder_and_writes_the_same(kit, heads, kv, tied) -> None:
    transformers = pytest.importorskip("transformers")
    model = made(heads=heads, kv=kv, tied=tied)
    folder = interop.to_transformers(model, "hf", max_shard_size=10**9 if tied else 40_000)
    shards = [name for name in left(folder) if name.endswith(".safetensors")]
    assert (len(shards) > 1) is not tied
    parity = json.loads(Path(folder, "parity.json").read_text())
    assert parity["by"].startswith("transformers")
    assert parity["max_logit_difference"] < 1e-4

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS[:3] + PROMPTS[5:6]:
        ids = words(prompt, return_tensors="pt")
        assert ids.input_ids[0].tolist() == model.tokenizer.encode(prompt)
        written = theirs.generate(**ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
        wanted = model.generate(prompt, max_new_tokens=64, temperature=0)
        assert words.decode(written[0], skip_special_tokens=True) == wanted


@pytest.mark.parametrize(("heads", "kv", "tied"), SHAPES)
def test_a_round_trip_keeps_every_bit(kit, heads, kv, tied) -> None:
    model = made(heads=heads, kv=kv, tied=tied)
    back = interop.from_transformers(interop.to_transformers(model, "hf"))
    assert back.net_params == model.net_params
    for name, value in model.net.state_dict().items():
        assert torch.equal(back.net.state_dict()[name], value), name
    assert (back.net.lm_head.weight is back.net.tok_embed.weight) is tied
    text = model.generate("The", max_new_tokens=20, temperature=0)
    assert back.generate("The", max_new_tokens=20, temperature=0) == text
    half = interop.from_transformers("hf", dtype=torch.bfloat16)
    assert half.net.tok_embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_what_transformers_made_is_read_where_it_computes_the_same(kit, kind) -> None:
    transformers = pytest.importorskip("transformers")
    made_by = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config, net = made_by[kind]
    options = {"sliding_window": None} if kind == "mistral" else {}
    torch.manual_seed(0)
    theirs = net(
        config(
            vocab_size=77, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            rms_norm_eps=1e-5, **options,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained("theirs")
    ours = interop.from_transformers("theirs")
    tokens = torch.randint(77, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.net.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=0
        )
    if kind == "qwen2":
        with torch.no_grad():
            theirs.model.layers[0].self_attn.q_proj.bias += 1
        theirs.save_pretrained("biased")
        with pytest.raises(ValueError, match=r"q_proj\.bias is added to a projection"):
            interop.from_transformers("biased")


def test_folders_that_cannot_be_read_are_refused_by_name(kit) -> None:
    from safetensors.torch import load_file, save_file

    interop.to_transformers(made(tied=False), "hf", max_shard_size=40_000)
    config = json.loads(Path("hf/config.json").read_text())

    def changed(**changes):
        Path("hf/config.json").write_text(json.dumps({**config, **changes}))

    for changes, message in (
        ({"model_type": "gpt2"}, "reads llama, mistral, qwen2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "the rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope scaling 'linear'"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}},
            "rope scaling 'linear'",
        ),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}}}, "the rope_parameters"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be"),
        ({"sliding_window": "8"}, "sliding window of 8"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be"),
        ({"num_hidden_layers": 10**9}, "lacks tensors: num_hidden_layers is 1000000000"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"head_dim": 16}, "heads of 16 channels"),
        ({"partial_rotary_factor": 0.5}, "rotary positions of a part"),
        ({"sliding_window": 8}, "sliding window of 8 tokens"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
        ({"intermediate_size": 48}, r"gate_proj\.weight has the shape"),
        ({"num_hidden_layers": 3}, "lacks 9 tensor"),
        ({"num_hidden_layers": 1}, "holds 9 tensor"),
        ({"tie_word_embeddings": True}, "lm_head.weight is another tensor"),
    ):
        changed(**changes)
        with pytest.raises(ValueError, match=message):
            interop.from_transformers("hf")
    changed()
    shard = next(name for name in sorted(left("hf")) if name.endswith(".safetensors"))
    held = load_file(f"hf/{shard}")
    os.remove(f"hf/{shard}")
    with pytest.raises(FileNotFoundError, match=f"lacks {shard}"):
        interop.from_transformers("hf")
    Path(f"hf/{shard}").write_bytes(b"\x80\x04no header")
    with pytest.raises(ValueError, match="is no safetensors file"):
        interop.from_transformers("hf")
    save_file({**held, "more": torch.ones(1)}, f"hf/{shard}")
    with pytest.raises(ValueError, match="no place for: more"):
        interop.from_transformers("hf")

    os.makedirs("pickled")
    Path("pickled/config.json").write_text(json.dumps(config))
    torch.save({}, "pickled/pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin, a pickle, which could run"):
        interop.from_transformers("pickled")
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere"):
        interop.from_transformers("nowhere")
    index = Path("hf/model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match="no safetensors file of the folder"):
        interop.from_transformers("hf")


def test_a_folder_that_holds_something_is_not_written_over(kit) -> None:
    os.makedirs("hf")
    Path("hf/mine").write_text("x")
    with pytest.raises(FileExistsError, match="name another"):
        interop.to_transformers(made(), "hf")
    assert left("hf") == {"mine"}
    model = made()
    torch.nn.utils.parametrizations.weight_norm(model.net.blocks[0].attn.w_o)
    with pytest.raises(ValueError, match="with a weight that is computed"):
        interop.to_transformers(model, "other")
    assert left() == {"hf"}


# -- Ollama and the command --------------------------------------------------------------------


def test_a_modelfile_lies_beside_the_weights(kit) -> None:
    model = made()
    path = interop.export_ollama_modelfile(
        model.net, model.tokenizer, "o", system="Be brief.", template="{{ .Prompt }}",
        parameters={"temperature": 0.5, "stop": ["###", "the end"], "penalize_newline": True},
    )  # fmt: skip
    assert path == os.path.abspath("o/Modelfile")
    assert Path(path).read_text() == (
        'FROM ./model.gguf\nTEMPLATE """{{ .Prompt }}"""\nSYSTEM """Be brief."""\n'
        'PARAMETER temperature 0.5\nPARAMETER stop ###\nPARAMETER stop "the end"\n'
        "PARAMETER penalize_newline true\n"
    )
    assert left("o") == {"Modelfile", "model.gguf", "model.gguf.parity.json"}
    for options, message in (
        ({"system": 'say """'}, "three double quotes"),
        ({"template": 'ends with "'}, "three double quotes"),
        ({"parameters": {"a b": 1}}, "plain name"),
        ({"parameters": {"stop": "a\nb"}}, "does not fit on a line"),
    ):
        with pytest.raises(ValueError, match=message):
            interop.export_ollama_modelfile(model.net, model.tokenizer, "no", **options)
        assert not os.path.exists("no")


def test_the_command_imports_generates_and_exports(kit, capsys) -> None:
    from nnx.cli.app import build
    from typer.testing import CliRunner

    model = made()
    interop.to_transformers(model, "hf")

    def run(*arguments: str) -> str:
        found = CliRunner().invoke(build(), ["lm", *arguments])
        assert found.exit_code == 0, found.output
        return found.output

    told = run("import", "hf")
    id = told.split("kept as run ")[1].split()[0]
    assert run("import", "hf") == told  # the same weights are the same run
    text = run("generate", id, "The", "--tokens", "12", "-t", "0")
    assert text.strip() == model.generate("The", max_new_tokens=12, temperature=0).strip()
    run("export", id, "--to", "gguf", "-o", "m.gguf", "--quantization", "F32")
    run("export", id, "--to", "ollama", "-o", "o")
    run("export", id, "--to", "transformers", "-o", "again")
    assert left("again") == left("hf")
    assert gguf.GGUFReader("m.gguf").get_field("general.architecture").contents() == "llama"


# -- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_leaves_as_a_peft_folder_and_merged_with_the_same_logits(kit, dora) -> None:
    nnx_peft = pytest.importorskip("nnx.peft", exc_type=ImportError)
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = made(kv=2)
    base = interop.to_transformers(model, "base")
    if dora:
        nnx_peft.apply_dora_to(model.net, "*.w_qkv", "*.w1", r=3, alpha=5.0)
    else:
        nnx_peft.apply_lora_to(model.net, "*.w_qkv", "*.w2", r=3, alpha=5.0)
        nnx_peft.apply_lora_to(model.net, "*.w_o", r=2, alpha=7.0)
    with torch.no_grad():
        for name, parameter in model.net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    nnx_peft.save_peft_adapter(model.net, "adapter")
    with pytest.raises(ValueError, match=r"merge_adapters\(net, unload=True\)"):
        interop.to_transformers(model, "no")
    folder = interop.adapter_to_transformers(
        "adapter", model.net_params, "for-peft", base_model=base, adapted=model.net
    )
    parity = json.loads(Path(folder, "parity.json").read_text())
    assert parity["by"].startswith("peft")
    assert parity["max_logit_difference"] < 1e-4
    other = interop.to_transformers(made(kv=2, seed=5), "other-base")
    with pytest.raises(ParityError, match="other-base is another base"):
        interop.adapter_to_transformers(
            "adapter", model.net_params, "new/x", base_model=other, adapted=model.net
        )
    assert not os.path.exists("new")
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), folder
    ).eval()
    tokens = torch.randint(400, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.net.eval()(tokens)
        torch.testing.assert_close(theirs(tokens).logits, wanted, atol=1e-4, rtol=0)
    nnx_peft.merge_adapters(model.net, unload=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        interop.to_transformers(model, "merged")
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, wanted, atol=1e-4, rtol=0)

    for arguments, error, message in (
        (("nowhere", model.net_params, "x"), FileNotFoundError, "write one with save_peft_adapter"),
        (
            ("adapter", dataclasses.replace(model.net_params, n_layers=1), "x"),
            ValueError,
            "no layer of this transformer",
        ),
        (("adapter", kit.shape(n=2), "x"), ValueError, "rows, and this transformer's"),
        (("adapter", model.net_params, "base"), FileExistsError, "holds something"),
    ):
        with pytest.raises(error, match=message):
            interop.adapter_to_transformers(*arguments)
    assert not os.path.exists("x")


def test_a_model_that_was_read_trains_takes_adapters_and_goes_on_writing(kit, monkeypatch) -> None:
    from nnx import NNTrainParams
    from torch.utils.data import DataLoader, TensorDataset

    model = made(kv=2)
    read = interop.from_transformers(interop.to_transformers(model, "hf"))
    rows = torch.randint(400, (8, 13), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=4)
    params = NNTrainParams(n_epochs=3, seed=3, train_loader=loader)
    losses = [point.train_edp.loss for point in read.train(params).idps]
    os.makedirs("elsewhere")
    monkeypatch.chdir("elsewhere")
    again = made(kv=2).train(params).idps
    assert losses == [point.train_edp.loss for point in again]  # as the one that was written
    assert losses[-1] < losses[0]
    nnx_peft = pytest.importorskip("nnx.peft", exc_type=ImportError)
    text = read.generate("The", max_new_tokens=8, temperature=0)
    nnx_peft.apply_lora_to(read.net, "*.w_qkv", r=2)
    assert read.generate("The", max_new_tokens=8, temperature=0) == text  # it begins as nothing
