"""The ``nnx lm`` commands. Typer annotations alone: torch comes when one of them runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from nnx.cli.options import Quiet, RunId, RunsFolder, use_quiet, use_runs

lm = typer.Typer(
    help="Train a language model on text, let it write, and talk with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Temperature = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0: always the most probable token.")
]
TopP = Annotated[float, typer.Option("--top-p", min=0, max=1, help="Draw from this share.")]
MaxTokens = Annotated[int, typer.Option("--tokens", "-n", min=0, help="The most tokens to add.")]
Point = Annotated[str, typer.Option("--checkpoint", help="'best' on held-out text, or 'last'.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Draw the same text again.")]


@lm.command()
def train(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILES...", help="Text files and folders.")
    ] = None,
    folder: Annotated[
        str, typer.Option("--folder", help="Where tokenizer and corpus are kept.")
    ] = "lm",
    vocab_size: Annotated[int, typer.Option(min=256, help="Tokens of the tokenizer.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the transformer.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key and value heads, shared by groups.")
    ] = None,
    width: Annotated[int, typer.Option(min=2, help="Width of the model.")] = 128,
    context: Annotated[int, typer.Option(min=2, help="Tokens that it sees at once.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows per update.")] = 16,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the text (default: about 1,000 updates).")
    ] = None,
    lr: Annotated[float, typer.Option(help="Greatest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and order.")] = 0,
    documents: Annotated[str, typer.Option(help="What a document is: 'file', or 'line'.")] = "file",
    validation: Annotated[float, typer.Option(help="The share that is held out.")] = 0.05,
    runs_on: Annotated[
        bool, typer.Option("--runs-on", help="Let attention cross the ends of documents.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue this run instead.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an equal run.")] = False,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Train a tokenizer and a model on plain text.

    Every epoch shows loss, perplexity, bits per byte and tokens per second.
    Example: nnx lm train docs --layers 4 --width 192
    """
    from nnx.lm.text_run import TextTraining, resume_text, train_text
    from nnx.store.pointer import resolve_run_id

    use_runs(runs)
    use_quiet(quiet)
    if resume is not None:
        if files:
            raise typer.BadParameter("a resumed run knows its text: give FILES or --resume")
        _, run = resume_text(resolve_run_id(resume))
    else:
        if not files:
            raise typer.BadParameter("name text files or folders, or a run to --resume")
        settings = TextTraining(
            vocab_size=vocab_size, layers=layers, heads=heads, kv_heads=kv_heads, width=width,
            context=context, batch_size=batch, epochs=epochs, learning_rate=lr, seed=seed,
            documents=documents, separate=not runs_on, validation=validation,
        )  # fmt: skip
        _, run = train_text(files, folder, settings, overwrite=overwrite)
    print(f'let it write: nnx lm generate {run.id[:8]} "The "')


@lm.command()
def generate(
    run: RunId,
    prompt: Annotated[str, typer.Argument(help="How the text begins.")],
    tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End where this text appears.")
    ] = None,
    checkpoint: Point = "best",
    runs: RunsFolder = None,
) -> None:
    """Continue a text with a trained model, as it is written.

    Example: nnx lm generate best "The run store" --tokens 100
    """
    from nnx.lm.text_run import END_OF_TEXT

    model = _model(run, runs, checkpoint)
    end = model.tokenizer.tokenizer.token_to_id(END_OF_TEXT)
    _tell(prompt)
    model.generate(
        prompt, max_new_tokens=tokens, temperature=temperature, top_p=top_p, seed=seed,
        stop=stop, eos_ids=None if end is None else [end], on_text=_tell,
    )  # fmt: skip
    print()


@lm.command()
def chat(
    run: RunId,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = None,
    checkpoint: Point = "best",
    runs: RunsFolder = None,
) -> None:
    """Talk with a model that learned from conversations; an empty line ends it.

    Example: nnx lm chat best --system "Be brief."
    """
    from nnx.lm.chat import ChatTemplate, reply

    model = _model(run, runs, checkpoint)
    ChatTemplate().end_id(model.tokenizer)  # refuse before the first question
    messages = [{"role": "system", "content": system}] if system else []
    while text := _ask():
        messages.append({"role": "user", "content": text})
        answer = reply(
            model, messages, on_text=_tell, max_new_tokens=tokens, temperature=temperature,
            top_p=top_p, seed=seed,
        )  # fmt: skip
        print()
        messages.append({"role": "assistant", "content": answer})


@lm.command()
def export(
    run: RunId,
    to: Annotated[str, typer.Option("--to", help="transformers, gguf (llama.cpp) or ollama.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder, or the .gguf file.")],
    quantization: Annotated[
        str, typer.Option(help="Of gguf and ollama: F32, F16, BF16 or Q8_0.")
    ] = "F16",
    architecture: Annotated[
        str, typer.Option(help="Of gguf and ollama: llama, or nnx_transformer.")
    ] = "llama",
    checkpoint: Point = "best",
    runs: RunsFolder = None,
) -> None:
    """Write a language model for other programs, and compare what they read with it.

    Example: nnx lm export best --to gguf -o model.gguf
    """
    from nnx import interop
    from nnx.utils import validation as check

    check.choice("nnx lm export", "--to", to, ("transformers", "gguf", "ollama"))
    model = _model(run, runs, checkpoint)
    options: dict[str, Any] = {"architecture": architecture, "quantization": quantization}
    if to == "transformers":
        written = interop.to_transformers(model, output)
    elif to == "gguf":
        written = interop.write_gguf(model.net, model.tokenizer, output, **options)
    else:
        written = interop.export_ollama_modelfile(model.net, model.tokenizer, output, **options)
    print(f"written: {written}")


@lm.command("import")
def import_(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Of transformers, or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Of a Hub repository.")] = None,
    runs: RunsFolder = None,
) -> None:
    """Keep a model of transformers as a run, which writes and is exported like any other.

    Llama's architecture, and Mistral's and Qwen2's where they compute the same; safetensors
    alone, and no code. Example: nnx lm import ./SmolLM-135M
    """
    from nnx.interop import from_transformers
    from nnx.interop.imported import keep_as_run

    use_runs(runs)
    run = keep_as_run(from_transformers(folder, revision=revision))
    print(f'kept as run {run.id}\nlet it write: nnx lm generate {run.id[:8]} "The "')


def _model(run: str, runs: str | None, checkpoint: str):  # type: ignore[no-untyped-def]
    from nnx.enums import Checkpoints
    from nnx.lm.model import GenerativeNNModel
    from nnx.store.pointer import resolve_run_id
    from nnx.utils import validation as check

    use_runs(runs)
    id = resolve_run_id(run)
    known = [point.value for point in Checkpoints]
    point = Checkpoints(check.choice("nnx lm", "checkpoint", checkpoint, known))
    model = GenerativeNNModel.from_run(id, point)
    if model.tokenizer is None:
        raise ValueError(
            f"run {id} recorded no tokenizer: it is no language model, or was trained without one"
        )
    return model


def _ask() -> str:
    """One line from the person; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def _tell(piece: str) -> None:
    print(piece, end="", flush=True)
