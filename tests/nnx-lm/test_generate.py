"""Writing text: every argument, many prompts at once, and what is refused."""

from __future__ import annotations

import pytest
import torch
from nnx import (
    GenerativeNNModel,
    LogitsChain,
    Losses,
    Nets,
    NNModelParams,
    NNTokenizerParams,
    OrderedLogitsPipeline,
    train_bpe,
)
from nnx.generation import LogitsStage
from nnx.lm import TextStream

PROMPTS = ["the cat sat on", "a", "to be or not to be that is the question", "rain in spain"]


def written(model, prompt="the cat", **options):
    tokens = []
    model.generate(prompt, on_token=tokens.append, **options)
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.3, "seed": 3, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2},
        {"seed": 7, "min_p": 0.05},
    ],
)
def test_prompts_of_any_lengths_in_one_batch_are_each_what_it_is_alone(kit, options):
    model = kit.model()
    options = {"max_new_tokens": 60, **options}  # beyond the context of 48
    together = model.generate(PROMPTS, **options)
    assert together == [model.generate(p, **options) for p in PROMPTS]
    assert together == [model.generate(p, use_cache=False, **options) for p in PROMPTS]


def test_several_sequences_of_a_prompt_follow_one_another(kit):
    model = kit.model()
    one = [model.generate("the cat", seed=5 + i, max_new_tokens=12) for i in range(3)]
    assert model.generate("the cat", seed=5, max_new_tokens=12, num_return_sequences=3) == one
    assert len(set(one)) == 3
    both = model.generate(PROMPTS[:2], seed=5, max_new_tokens=12, num_return_sequences=2)
    assert both[2:] == model.generate(PROMPTS[1], seed=5, max_new_tokens=12, num_return_sequences=2)


def test_equal_seeds_write_equal_text_and_leave_the_global_stream_alone(kit):
    model = kit.model()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert model.generate("the", seed=1) == model.generate("the", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    first = model.generate("the", max_new_tokens=8)
    torch.manual_seed(0)
    assert model.generate("the", max_new_tokens=8) == first


def test_filters_chain_and_pipeline_say_the_same(kit):
    model = kit.model()
    by_arguments = written(model, seed=2, temperature=0.7, top_k=5, repetition_penalty=1.3)
    chain = LogitsChain.builder().temperature(0.7).top_k(5).repetition_penalty(1.3).build()
    pipeline = OrderedLogitsPipeline.of(
        LogitsStage.repetition_penalty(1.3), LogitsStage.top_k(5), LogitsStage.temperature(0.7)
    )
    assert written(model, seed=2, logits_chain=chain) == by_arguments
    assert written(model, seed=2, logits_pipeline=pipeline) == by_arguments
    greedy = LogitsChain.builder().temperature(0).build()
    assert written(model, logits_chain=greedy) == written(model, temperature=0)


def test_a_custom_processor_sees_prompt_and_text_and_forbids_a_token(kit):
    model, histories = kit.model(), []
    first = written(model, temperature=0)[0]

    def forbid(logits, history):
        histories.append(list(history))
        return logits.index_fill(-1, torch.tensor([first]), float("-inf"))

    chain = LogitsChain.builder().custom(forbid).temperature(0).build()
    chain.processors.reverse()
    tokens = written(model, logits_chain=LogitsChain([forbid]), seed=0, max_new_tokens=5)
    assert first not in tokens
    prompt = model.tokenizer.encode("the cat")
    assert histories == [prompt + tokens[:i] for i in range(5)]


def test_it_stops_at_a_string_that_spans_tokens_and_keeps_it(kit):
    model = kit.model(byte_level=True)
    spelled = model.tokenizer.encode("dog ran over the hill")
    start = len(model.tokenizer.encode("the cat"))
    spell = LogitsChain([_Spell(spelled, start)])
    options = {"logits_chain": spell, "max_new_tokens": len(spelled)}
    assert model.generate("the cat", **options).endswith("dog ran over the hill")
    short = model.generate("the cat", stop=["nowhere", "an ov"], **options)
    assert short in ("the catdog ran ov", "the catdog ran ove", "the catdog ran over")
    # The prompt itself is not searched, nor what spans it and the text.
    assert model.generate("the cat", stop=["the cat", "tdog"], **options).endswith("hill")


class _Spell:
    """Forces these tokens, one after the other, after a prompt of ``start`` tokens."""

    def __init__(self, tokens, start):
        self.tokens, self.start = tokens, start

    def __call__(self, logits, history):
        forced = self.tokens[len(history) - self.start]
        return torch.full_like(logits, float("-inf")).index_fill(-1, torch.tensor([forced]), 0.0)


def test_it_ends_before_an_end_token(kit):
    model = kit.model()
    tokens = written(model, temperature=0, max_new_tokens=30)
    end = tokens[5]
    wanted = tokens[: tokens.index(end)]
    assert written(model, temperature=0, max_new_tokens=30, eos_ids=[999, end]) == wanted
    text = model.generate("the cat", temperature=0, max_new_tokens=30, eos_ids=[end])
    assert text == model.tokenizer.decode(model.tokenizer.encode("the cat") + wanted)


@pytest.mark.parametrize("byte_level", [True, False])
@pytest.mark.parametrize("stop", [None, ["o"]])
def test_streamed_pieces_are_the_continuation(kit, byte_level, stop):
    model, pieces = kit.model(byte_level=byte_level), []
    options = {"seed": 4, "max_new_tokens": 40, "stop": stop, "temperature": 1.5}
    text = model.generate("the cat", on_text=pieces.append, **options)
    assert "".join(pieces) == text[len("the cat") :]
    assert all(pieces)


def test_a_stream_never_gives_half_a_character(tmp_path):
    text = "naïve ☃ snow 👩‍🚀 漢字 and plain; " * 6
    trained = train_bpe(texts=["plain text"], vocab_size=300, byte_level=True)
    tokenizer = NNTokenizerParams.of(trained, str(tmp_path / "t.json"))
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # several tokens for one character
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text
    assert not stream.finish()
    assert not any("\ufffd" in piece for piece in pieces)
    cut = TextStream(tokenizer)
    kept = "".join(cut.push(token) for token in ids[:-7])
    assert text.startswith(kept)
    assert kept + cut.finish() == tokenizer.decode(ids[:-7])


# The context ---------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_with_its_numbers(kit):
    model = kit.model()
    long = " ".join(["the cat"] * 40)
    length = len(model.tokenizer.encode(long))
    with pytest.raises(
        ValueError, match=rf"prompt has {length} tokens, .* context is 48: there is room for 0"
    ):
        model.generate(long)
    with pytest.raises(
        ValueError, match=r"prompt has 2 tokens and max_new_tokens=47, .* is 48: .* room for 46"
    ):
        model.generate("the cat", max_new_tokens=47, context="refuse")
    assert model.generate("the cat", max_new_tokens=46, context="refuse", seed=0)


def test_the_window_slides_over_long_texts(kit):
    model = kit.model(context=16)
    tokens = written(model, temperature=0, max_new_tokens=40)
    ids = model.tokenizer.encode("the cat")
    with torch.no_grad():
        for _ in range(40):  # by hand: the last 16 tokens, read anew
            ids.append(int(model.net(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    assert tokens == ids[2:]


# What generation leaves and refuses --------------------------------------------------------


def test_modes_are_given_back_also_on_errors(kit):
    model = kit.model(drop=0.2)
    model.net.train()
    model.net.blocks[0].eval()
    modes = [m.training for m in model.net.modules()]
    model.generate("the", max_new_tokens=3, temperature=0)

    def fail(token):
        raise KeyError(token)

    with pytest.raises(KeyError):
        model.generate("the", on_token=fail)
    assert [m.training for m in model.net.modules()] == modes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_p": 1.5}, ValueError, "top_p"),
        ({"min_p": -1}, ValueError, "min_p"),
        ({"repetition_penalty": 0}, ValueError, "penalty"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences"),
        ({"stop": "end"}, TypeError, r"stop=\['end'\]"),
        ({"stop": [""]}, ValueError, "stop"),
        ({"context": "wrap"}, ValueError, "slide, refuse"),
        ({"on_text": print, "num_return_sequences": 2}, ValueError, "single prompt"),
        (
            {"logits_chain": LogitsChain(), "logits_pipeline": OrderedLogitsPipeline()},
            ValueError,
            "not both",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(kit, options, error, message):
    with pytest.raises(error, match=message):
        kit.model().generate("the cat", **options)


def test_a_prompt_must_be_text_with_tokens(kit):
    model = kit.model()
    with pytest.raises(ValueError, match="has no tokens"):
        model.generate("")
    with pytest.raises(TypeError, match="a prompt is text"):
        model.generate([3])
    assert model.generate([]) == []
    assert model.generate("the cat", max_new_tokens=0) == "the cat"
    model.tokenizer = None
    with pytest.raises(ValueError, match="needs a tokenizer"):
        model.generate("the")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(kit):
    params = NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY)
    with pytest.raises(ValueError, match=r"tokenizer has 76 tokens .* vocab_size is 40"):
        GenerativeNNModel(kit.shape(40), params, kit.tokenizer())


# Adapted networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("tuner", ["PrefixTuner", "PromptTuner"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_tuned_transformers_write_with_and_without_a_cache(kit, tuner, kv_heads):
    peft = pytest.importorskip("nnx.peft", exc_type=ImportError)
    model = kit.model(heads=4, kv_heads=kv_heads)
    before = model.generate("the cat", temperature=0, max_new_tokens=20)
    size = {"n_prefix": 6} if tuner == "PrefixTuner" else {"n_prompt_tokens": 6}
    tuned = getattr(peft, tuner)(model.net, **size)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.normal_(std=2.0)
    model.net = tuned
    assert model.context_limit == (48 if tuner == "PrefixTuner" else 42)
    cached = model.generate(PROMPTS, temperature=0, max_new_tokens=60)
    assert cached == model.generate(PROMPTS, temperature=0, max_new_tokens=60, use_cache=False)
    assert model.generate("the cat", temperature=0, max_new_tokens=20) != before


def test_adapters_keep_tied_embeddings_and_write(kit):
    peft = pytest.importorskip("nnx.peft", exc_type=ImportError)
    model = kit.model()
    before = model.generate("the cat", temperature=0, max_new_tokens=20)
    assert peft.apply_lora_to(model.net, "*.w_qkv", "*.w2") == 4
    assert model.net.lm_head.weight is model.net.tok_embed.weight
    assert model.generate("the cat", temperature=0, max_new_tokens=20) == before
