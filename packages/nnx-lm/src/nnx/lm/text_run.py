"""From text files to a trained language model: what ``nnx lm train`` does, for scripts too."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx.callbacks import Callback
from nnx.components import ComponentSpec
from nnx.enums import Checkpoints, Losses, Nets
from nnx.lm.chat import SPECIAL_TOKENS
from nnx.lm.corpus import StrPath, TokenFile, text_files, write_tokens
from nnx.lm.model import GenerativeNNModel
from nnx.lm.packing import PackedLoader, PackedTokens
from nnx.lm.tokenizer import train_bpe
from nnx.lm_tasks import CausalLMTask
from nnx.params import (
    NNModelParams,
    NNOptimParams,
    NNSchedulerParams,
    NNTokenizerParams,
    NNTrainParams,
    NNTransformerParams,
)
from nnx.seeding import isolated_rng
from nnx.store import NNCheckpoint, NNRun

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE, CORPUS_FILE = "tokenizer.json", "corpus.tokens"
_UPDATES = 1000  # of a training whose epochs are not given
_POINT_EVERY = 100  # updates that a killed process may lose

__all__ = ["END_OF_TEXT", "TextTraining", "resume_text", "train_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTraining:
    """How to train a language model on text.

    ``width`` is the model's, ``context`` the tokens of a window, ``batch_size`` the
    windows of an update. ``epochs`` ``None`` is about 1,000 updates. ``documents`` are
    whole files or lines; ``separate`` keeps attention inside each. The last
    ``validation`` share of the windows is held out.
    """

    vocab_size: int = 2048
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    context: int = 128
    batch_size: int = 16
    epochs: int | None = None
    learning_rate: float = 2e-3
    seed: int = 0
    documents: str = "file"
    separate: bool = True
    validation: float = 0.05

    def state(self) -> dict[str, Any]:
        """The settings as plain data, without those at their default."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }


def train_text(
    files: Iterable[StrPath],
    folder: StrPath = "lm",
    settings: TextTraining | None = None,
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[GenerativeNNModel, NNRun]:
    """Train a tokenizer and a model on text files and folders.

    ``folder`` gets ``tokenizer.json`` and ``corpus.tokens``; a tokenizer that lies there
    is used, so that several models can share one. ``report`` is told what happens.

    Raises ``ValueError`` or ``OSError`` for what cannot be read or trained, before a run
    is reserved, and ``FileExistsError`` for a run that exists (unless ``overwrite``).
    """
    settings = settings or TextTraining()
    paths = text_files(files)
    tokenizer = _tokenizer(paths, folder, settings, report)
    end = _end_id(tokenizer)
    tokens = write_tokens(
        paths, tokenizer, os.path.join(folder, CORPUS_FILE), documents=settings.documents,
        eos_id=end,
    )  # fmt: skip
    report(
        f"{len(paths)} files, {tokens.n_bytes:,} bytes, {len(tokens):,} tokens of a vocabulary of "
        f"{tokenizer.vocab_size:,} ({tokens.bytes_per_token:.2f} bytes each)"
    )
    model = _build(tokenizer, settings)
    report(f"{sum(p.numel() for p in model.net.parameters()):,} parameters")
    return model, _fit(model, tokens, settings, report, overwrite_existing=overwrite)


def resume_text(
    run_id: str, *, report: Callable[[str], None] = print
) -> tuple[GenerativeNNModel, NNRun]:
    """Continue a run of :func:`train_text` to the end of its plan, exactly where it stood.

    Raises ``ValueError`` for another kind of run, and for a corpus or tokenizer that
    changed.
    """
    state = NNCheckpoint.load_training_state(run_id, Checkpoints.LAST, map_location="meta")
    entry = ((state or {}).get("components") or {}).get("lm.text")
    if entry is None:
        raise ValueError(
            f"run {run_id} has no point of a training on text to go on from; only runs of "
            "`nnx lm train` (nnx.lm.train_text) can be resumed here"
        )
    saved = entry["state"]
    settings = TextTraining(**saved["settings"])
    model = GenerativeNNModel.from_run(run_id)
    tokens = TokenFile.open(saved["corpus"], model.tokenizer)
    planned = NNRun.load(run_id).train.n_epochs
    settings = dataclasses.replace(settings, epochs=planned)
    options = {"resume_from_run_id": run_id, "resume_epochs": "planned"}
    return model, _fit(model, tokens, settings, report, **options)


def _tokenizer(
    paths: list[Any], folder: StrPath, settings: TextTraining, report: Callable[[str], None]
) -> NNTokenizerParams:
    path = os.path.join(folder, TOKENIZER_FILE)
    if os.path.exists(path):
        report(f"using the tokenizer {path}")
        return NNTokenizerParams.from_state({"path": path})
    report(f"training a tokenizer of {settings.vocab_size:,} tokens")
    trained = train_bpe(
        [str(p) for p in paths],
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_TEXT, *SPECIAL_TOKENS],
        byte_level=True,
    )
    return NNTokenizerParams.of(trained, path)


def _end_id(tokenizer: NNTokenizerParams) -> int:
    live: Any = tokenizer.tokenizer
    found = live.token_to_id(END_OF_TEXT)
    if found is None:
        raise ValueError(
            f"the tokenizer {tokenizer.path!r} has no token {END_OF_TEXT!r} to end texts with; "
            "train one with it among its special_tokens, or use another folder"
        )
    return int(found)


def _build(tokenizer: NNTokenizerParams, settings: TextTraining) -> GenerativeNNModel:
    shape = (
        NNTransformerParams.builder()
        .vocab(tokenizer.vocab_size)
        .layers(n=settings.layers, heads=settings.heads, d_model=settings.width)
        .context(max_seq_len=settings.context)
    )
    if settings.kv_heads is not None:
        shape.kv_heads(settings.kv_heads)
    params = NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY)
    with isolated_rng(settings.seed):
        return GenerativeNNModel(shape.build(), params, tokenizer)


def _fit(
    model: GenerativeNNModel,
    tokens: TokenFile,
    settings: TextTraining,
    report: Callable[[str], None],
    **options: Any,
) -> NNRun:
    assert model.tokenizer is not None
    packed = PackedTokens(tokens, settings.context, separate=settings.separate)
    train, held_out = packed.split(settings.validation)
    loader = PackedLoader(train, settings.batch_size, seed=settings.seed, workers=1)
    validation: Any = PackedLoader(held_out, settings.batch_size, validation=True)
    separate = "" if settings.separate else ":runs on"
    # Runs are compared on the same windows, however many a batch holds.
    windows = f"windows {held_out.first} to {held_out.last}"
    validation.data_id = f"{tokens.digest}:{settings.context}{separate}, {windows}"
    updates = len(loader)
    epochs = settings.epochs or max(1, round(_UPDATES / updates))
    task = CausalLMTask(
        vocab_size=model.tokenizer.vocab_size, alignment="pre_shifted", tokenizer=tokens.tokenizer
    )
    schedule = NNSchedulerParams.builder().linear_warmup_decay(
        warmup_steps=max(1, min(100, epochs * updates // 10)), total_steps=epochs * updates,
        min_lr=0.0, factor=0.5, patience=1, cooldown=0, threshold=0.0,
    )  # fmt: skip
    optimizer = NNOptimParams.builder().adamw(
        max_lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    params = NNTrainParams(
        n_epochs=epochs,
        seed=settings.seed,
        train_loader=loader,
        val_loader=validation,
        optim=optimizer.grad_clip(1.0).build(),
        scheduler=schedule.clock("optimizer_update").build(),
        data_id=f"{tokens.digest}:{settings.context}x{settings.batch_size}{separate}",
        checkpoint_every=_POINT_EVERY,
        **options,
    )
    return model.train(
        params,
        objective=task.objective(),
        eval_step_fn=task.eval_step(),
        callbacks=[_Progress(tokens, len(train) * settings.context, epochs, report)],
        components=[_TextRecord(tokens.path, settings)],
    )


class _Progress(Callback):
    """Says after every epoch how good the model is and how fast it learns."""

    def __init__(
        self, tokens: TokenFile, per_epoch: int, epochs: int, report: Callable[[str], None]
    ) -> None:
        self._bytes, self._tokens = tokens.bytes_per_token, per_epoch
        self._epochs, self._report = epochs, report
        self._began = 0.0

    def on_train_begin(self, ctx: Any) -> None:
        self._report(
            f"run {ctx.run.id}; if it is interrupted: nnx lm train --resume {ctx.run.id[:8]}"
        )

    def on_epoch_begin(self, ctx: Any) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, ctx: Any) -> None:
        seconds = time.perf_counter() - self._began
        found = ctx.idp.val_edp
        self._report(
            f"epoch {ctx.epoch + 1}/{self._epochs}  train loss {ctx.idp.train_edp.loss:.3f}  "
            f"loss {found.loss:.3f}  perplexity {found.metrics['perplexity']:.1f}  "
            f"bits/byte {found.loss / math.log(2) / self._bytes:.3f}  "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )


class _TextRecord:
    """What a resume needs: where the corpus is, and how it is cut."""

    def __init__(self, corpus: str, settings: TextTraining) -> None:
        self._state = {"corpus": corpus, "settings": settings.state()}

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("lm.text", required=False)

    def component_state(self) -> dict[str, Any]:
        return self._state

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Nothing to take over: the state was read to build the run."""
