"""Language models beside transformers: a training step, the loss's memory, writing, packing.

One thread and the process's own time, so that a busy machine stretches neither side.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, beside, interleaved, turns
from nnx import (
    Callback,
    GenerativeNNModel,
    Losses,
    Nets,
    NNModelParams,
    NNOptimParams,
    NNTokenizerParams,
    NNTrainParams,
    NNTransformerParams,
    TransformerNN,
    train_bpe,
)
from nnx.lm import write_tokens
from nnx.lm_tasks import CausalLMTask

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 4, 4, 256, 2048, 512
BATCH, LENGTH, STEPS = 8, 256, 3
TOKENS = 256
WORDS = [
    "the",
    "run",
    "store",
    "keeps",
    "every",
    "epoch",
    "on",
    "disk",
    "and",
    "a",
    "killed",
    "training",
    "goes",
    "on",
    "where",
    "it",
    "was",
]


def shape() -> NNTransformerParams:
    builder = NNTransformerParams.builder().vocab(VOCAB).context(max_seq_len=CONTEXT)
    return builder.layers(n=LAYERS, heads=HEADS, d_model=WIDTH).build()


def params() -> NNModelParams:
    return NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY)


def llama() -> Any:
    """A network of the same sizes in transformers."""
    import transformers

    p = shape()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=p.ffn_width,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, rms_norm_eps=p.norm_eps,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Epoch(Callback):
    """The time between an epoch's beginning and its end: the steps, without the commit."""

    def on_epoch_begin(self, ctx: Any) -> None:
        self.start = time.process_time()

    def on_epoch_end(self, ctx: Any) -> None:
        self.seconds = time.process_time() - self.start


def bench_training_step() -> Iterator[Row]:
    data = batches()
    torch.manual_seed(0)
    model = GenerativeNNModel(shape(), params())
    task = CausalLMTask(vocab_size=VOCAB)
    fits = iter(range(1000))
    clock = _Epoch()

    def ours() -> float:
        fit = NNTrainParams(
            n_epochs=1, train_loader=data, seed=next(fits), save_phase_checkpoints=False,
            optim=NNOptimParams.builder().adamw(max_lr=1e-4).build(),
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            model.train(fit, objective=task.objective(), callbacks=[clock])
        return clock.seconds

    def loop(net: torch.nn.Module, logits_of: Any) -> Any:
        def run() -> float:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
            net.train()
            start = time.process_time()
            for ids in data:
                logits = logits_of(net(ids[:, :-1]))
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
            return time.process_time() - start

        return run

    own = loop(TransformerNN(shape()), lambda logits: logits)
    theirs = loop(llama(), lambda output: output.logits)
    with one_thread(), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        times = turns([ours, own, theirs], repeats=5, warmup=1, clock=None)

    for i, against, most in (
        (1, "the loop by hand over our own module", 1.05),
        (2, "the loop by hand over transformers' Llama", 1.0),
    ):
        a, b, spread = beside(times[0], times[i])
        yield Row(
            f"training step, {LAYERS}x{WIDTH}, {BATCH} x {LENGTH} tokens",
            a * 1e3 / STEPS, b * 1e3 / STEPS, against=against, target=f"<= {most}x",
            met=a <= most * b, spread=spread,
        )  # fmt: skip


_LOSS = """
import sys, torch, torch.nn.functional as F
sys.path.insert(0, {folder!r})
from measure import peak_mebibytes
from nnx.lm import linear_cross_entropy
torch.manual_seed(0)
hidden = torch.randn(2048, 256, requires_grad=True)
weight = torch.randn(32000, 256, requires_grad=True)
targets = torch.randint(0, 32000, (2048,))
linear_cross_entropy(hidden[:8], weight[:64], targets[:8] % 64).backward()
before = peak_mebibytes()
if {chunked}:
    loss = linear_cross_entropy(hidden, weight, targets)
else:
    loss = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
loss.backward()
print(peak_mebibytes() - before)
"""


def bench_loss_memory() -> Iterator[Row]:
    folder = str(Path(__file__).parent)

    def peak(chunked: bool) -> float:
        code = _LOSS.format(folder=folder, chunked=chunked)
        return float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )

    a, b = peak(True), peak(False)
    yield Row(
        "peak memory of the loss, 2,048 tokens, vocabulary of 32,000", a, b, unit="MiB",
        against="cross_entropy of all logits", target="<= 0.4x", met=a <= 0.4 * b,
    )  # fmt: skip


def writer(folder: str) -> GenerativeNNModel:
    words = [" ".join(WORDS[i % len(WORDS) :] + WORDS) for i in range(99)]
    tokenizer = NNTokenizerParams.of(
        train_bpe(texts=words, vocab_size=400, byte_level=True), os.path.join(folder, "t.json")
    )
    torch.manual_seed(0)
    return GenerativeNNModel(shape(), params(), tokenizer)


def floor(net: TransformerNN) -> Any:
    """The matrix products of a token alone: no norm, no attention, no residual."""
    weights = [
        w.detach()
        for block in net.blocks
        for w in (block.attn.w_qkv.weight, block.attn.w_o.weight, block.ffn.w1.weight,
                  block.ffn.w3.weight, block.ffn.w2.weight)
    ] + [net.lm_head.weight.detach()]  # fmt: skip
    inputs = {w.shape[1]: torch.randn(1, w.shape[1]) for w in weights}

    def run() -> None:
        for _ in range(TOKENS):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return run


def bench_writing() -> Iterator[Row]:
    theirs = llama().eval()
    theirs.generation_config.eos_token_id = None
    with one_thread(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = writer(folder)
        prompt = " ".join(WORDS)
        ids = torch.tensor([model.tokenizer.encode(prompt)])
        calls = [
            lambda: model.generate(prompt, max_new_tokens=TOKENS, temperature=0),
            lambda: theirs.generate(
                ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            ),
            floor(model.net),
        ]  # fmt: skip
        ours, other, least = turns(calls, repeats=5, warmup=1, clock=time.process_time)

        for times, against, target in (
            (other, "transformers.generate with its cache", ">= 2x"),
            (least, "the matrix products alone", ""),
        ):
            a, b, spread = beside(ours, times)
            yield Row(
                f"greedy, {TOKENS} tokens, 3.7M parameters", TOKENS / a, TOKENS / b,
                unit="tokens/s", against=against, target=target,
                met=a * 2 <= b if target else None, spread=spread,
            )  # fmt: skip
        prompts = [" ".join(WORDS[: 1 + i]) for i in range(16)]
        options: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0}
        a, b, spread = interleaved(
            lambda: model.generate(prompts, **options),
            lambda: [model.generate(prompt, **options) for prompt in prompts],
            repeats=5, clock=time.process_time,
        )  # fmt: skip
        yield Row(
            "16 prompts of different lengths, 64 tokens each", 16 * 64 / a, 16 * 64 / b,
            unit="tokens/s", against="one at a time", target=">= 5x", met=a * 5 <= b,
            spread=spread,
        )  # fmt: skip


def bench_packing() -> Iterator[Row]:
    text = (" ".join(WORDS) + "\n") * 40_000
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = writer(folder).tokenizer
        assert tokenizer is not None
        source = Path(folder) / "text.txt"
        source.write_text(text, encoding="utf-8")
        pieces = text.splitlines(keepends=True)
        pieces = ["".join(pieces[i : i + 800]) for i in range(0, len(pieces), 800)]
        names = iter(range(1000))
        live: Any = tokenizer.tokenizer
        a, b, spread = interleaved(
            lambda: write_tokens([source], tokenizer, f"{folder}/{next(names)}.tokens"),
            lambda: live.encode_batch_fast(pieces, add_special_tokens=False),
            repeats=5, clock=time.process_time,
        )  # fmt: skip
        size = len(text) / 2**20
        yield Row(
            "text to a token file", size / a, size / b, unit="MiB/s",
            against="tokenizers.encode_batch_fast", target=">= 0.8x", met=a * 0.8 <= b,
            spread=spread,
        )  # fmt: skip
