"""Exports and imports of a language model beside writing and reading its bytes, and llama.cpp."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import Row, interleaved, turns


def _model(large: bool) -> Any:
    import pydoc_data.topics

    import torch
    from nnx import (
        GenerativeNNModel,
        Losses,
        Nets,
        NNModelParams,
        NNTokenizerParams,
        NNTransformerParams,
        set_seed,
        train_bpe,
    )

    texts = list(pydoc_data.topics.topics.values())[:20]
    trained = train_bpe(texts=texts, vocab_size=1000, byte_level=True, special_tokens=["<eos>"])
    n, width, heads = (12, 832, 13) if large else (6, 256, 4)
    shape = NNTransformerParams.builder().vocab(1000).layers(n=n, heads=heads, d_model=width)
    set_seed(0)
    model = GenerativeNNModel(
        shape.context(max_seq_len=512).build(),
        NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
        NNTokenizerParams(path="tokenizer.json", tokenizer=trained),
    )
    if not large:
        with torch.no_grad():
            model.net.lm_head.weight[0] = 0  # it never ends a text
    return model


def bench_files() -> Iterator[Row]:
    """A model of 100 M parameters: both formats out, one back in, beside its plain bytes."""
    import torch
    from nnx import interop
    from safetensors.torch import load_file, save_file

    model = _model(large=True)
    count = sum(p.numel() for p in model.net.parameters())
    state = {k: v for k, v in model.net.state_dict().items() if k != "lm_head.weight"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def bytes_out() -> None:
            save_file(state, place / "bytes")
            with open(place / "bytes", "rb") as stream:
                os.fsync(stream.fileno())

        def transformers_out() -> None:
            shutil.rmtree(place / "hf", ignore_errors=True)
            interop.to_transformers(model, place / "hf")

        def gguf_out() -> None:
            interop.write_gguf(
                model.net, model.tokenizer, place / "m.gguf", quantization="F32",
                architecture="llama",
            )  # fmt: skip

        def back() -> None:
            interop.from_transformers(place / "hf")

        def bytes_in() -> None:
            {k: v.clone() for k, v in load_file(place / "bytes").items()}

        times = turns([transformers_out, gguf_out, bytes_out, back, bytes_in], repeats=3)
        a, b, c, d, e = (sorted(part)[len(part) // 2] for part in times)
        for name, ours, other, against in (
            ("to_transformers", a, c, "save_file, flushed"),
            ("write_gguf F32", b, c, "save_file, flushed"),
            ("from_transformers", d, e, "load_file"),
        ):
            yield Row(
                f"{name}, {count / 1e6:.0f} M", ours, other, "s", against, "<= 1.5x",
                ours <= 1.5 * other,
            )  # fmt: skip
        for name in ("to_transformers", "write_gguf", "from_transformers"):
            child = subprocess.run(
                [sys.executable, __file__, name, folder], capture_output=True, text=True, check=True
            )
            mebibytes, size = float(child.stdout.split()[-1]), count * 4 / 2**20
            yield Row(
                f"memory of {name}, {count / 1e6:.0f} M", mebibytes, size, "MiB", "the weights",
                "<= 1.3x", mebibytes <= 1.3 * size,
            )  # fmt: skip
    torch.set_num_threads(1)


def bench_generation() -> Iterator[Row]:
    """256 greedy tokens of one float32 file, one thread, beside llama.cpp (to look at)."""
    if importlib.util.find_spec("xllamacpp") is None:
        return
    import torch
    import xllamacpp as llama
    from nnx import interop

    torch.set_num_threads(1)
    model = _model(large=False)
    with tempfile.TemporaryDirectory() as folder:
        path = interop.write_gguf(
            model.net, model.tokenizer, Path(folder, "m.gguf"), quantization="F32",
            architecture="llama",
        )  # fmt: skip
        params = llama.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 512, 1
        params.warmup, params.n_gpu_layers, params.cpuparams.n_threads = False, 0, 1
        server = llama.Server(params)

        def theirs() -> None:
            server.handle_completions(
                {"prompt": "The", "temperature": 0, "n_predict": 256, "cache_prompt": False}
            )

        def ours() -> None:
            model.generate("The", max_new_tokens=256, temperature=0)

        a, b, spread = interleaved(ours, theirs, repeats=3)
        yield Row("256 greedy tokens, 5 M", 1e3 * a, 1e3 * b, "ms", "llama.cpp", "", None, spread)


if __name__ == "__main__":
    from nnx import interop

    what, folder = sys.argv[1:]
    model = None if what == "from_transformers" else _model(large=True)
    import torch

    with torch.inference_mode():
        if model is not None:
            model.net(torch.zeros(1, 4, dtype=torch.long))
    base = 0.0 if model is None else sum(p.numel() for p in model.net.parameters()) * 4 / 2**20
    import threading

    peak, done = [0.0], threading.Event()

    def watch() -> None:
        """Own memory alone: what is mapped from a file is the system's cache."""
        while not done.wait(0.002):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            (held,) = (line for line in lines if line.startswith("RssAnon:"))
            peak[0] = max(peak[0], int(held.split()[1]) / 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threading.Event().wait(0.1)
    before = peak[0] - base
    if what == "to_transformers":
        interop.to_transformers(model, Path(folder, "memory"))
    elif what == "write_gguf":
        interop.write_gguf(
            model.net, model.tokenizer, Path(folder, "memory.gguf"), quantization="F32",
            architecture="llama",
        )  # fmt: skip
    else:
        interop.from_transformers(Path(folder, "hf"))
    done.set()
    watcher.join()
    print(peak[0] - before)
