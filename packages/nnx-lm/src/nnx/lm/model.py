"""A language model: a network with its tokenizer, which writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.enums import Checkpoints
from nnx.generation import LogitsChain, OrderedLogitsPipeline, RepetitionPenalty
from nnx.lm.decoding import Draft, decode
from nnx.lm.text import StopMatcher, TextStream
from nnx.lm.tokenizer_record import (
    TOKENIZER_FILE,
    TokenizerRecord,
    recorded_tokenizer,
    tokenizer_bytes,
    tokenizer_of,
)
from nnx.models import BatchAdapter
from nnx.nn_model import NNModel
from nnx.params import NNModelParams, NNParams, NNTokenizerParams
from nnx.prediction.batches import inference_context
from nnx.store import NNCheckpoint
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from typing_extensions import Self


class GenerativeNNModel(NNModel):
    """An ``NNModel`` that continues text.

    ``tokenizer`` may be set later; :meth:`generate` needs it. Every run records
    it, so that :meth:`from_run` finds the same one, and it travels with the model in a
    bundle and as ``tokenizer.json`` on the Hub.
    """

    artifact_names = (TOKENIZER_FILE,)

    def __init__(
        self,
        net_params: NNParams | None = None,
        params: NNModelParams | None = None,
        tokenizer: NNTokenizerParams | None = None,
        *,
        module: torch.nn.Module | None = None,
        batch_adapter: BatchAdapter | None = None,
    ) -> None:
        if tokenizer is not None:
            check.instance("GenerativeNNModel", "tokenizer", tokenizer, NNTokenizerParams)
            _check_vocabulary(net_params, tokenizer)
        super().__init__(net_params, params, module=module, batch_adapter=batch_adapter)
        self.tokenizer = tokenizer

    @property
    def components(self) -> tuple[Any, ...]:
        """The record of the tokenizer, which every checkpoint of the model carries."""
        return () if self.tokenizer is None else (TokenizerRecord(self.tokenizer),)

    @property
    def artifacts(self) -> Mapping[str, bytes]:
        """``tokenizer.json``, when there is a tokenizer."""
        return {} if self.tokenizer is None else {TOKENIZER_FILE: tokenizer_bytes(self.tokenizer)}

    @classmethod
    def arguments_of(cls, artifacts: Mapping[str, bytes]) -> dict[str, Any]:
        """The tokenizer of a ``tokenizer.json``; ``ValueError`` when it is none."""
        data = artifacts.get(TOKENIZER_FILE)
        return {} if data is None else {"tokenizer": tokenizer_of(data)}

    @classmethod
    def from_run(
        cls,
        run_id: str,
        checkpoint: Checkpoints = Checkpoints.LAST,
        *,
        root: str | None = None,
        tokenizer: NNTokenizerParams | None = None,
        **rebuild: Any,
    ) -> Self:
        """The model of a run on disk, with the tokenizer it was trained with.

        ``tokenizer`` replaces the recorded path, not the digest. ``rebuild`` is what
        ``from_checkpoint`` takes (``device``, ``precision``, ...). Raises
        ``FileNotFoundError`` for a run or checkpoint that is not there and
        ``ValueError`` for a tokenizer that changed.
        """
        point = NNCheckpoint.load(run_id, checkpoint, root)
        if point is None:
            raise FileNotFoundError(f"run {run_id!r} has no checkpoint {checkpoint.value!r}")
        found = recorded_tokenizer(run_id, checkpoint, root, instead=tokenizer)
        return cls.from_checkpoint(point, tokenizer=found, **rebuild)

    @property
    def context_limit(self) -> int:
        """How many tokens of text the network sees at once."""
        net: Any = self.net
        own = getattr(net, "effective_max_seq_len", None)
        if own is not None:
            return int(own)
        shape: Any = self.net_params or getattr(net, "params", None) or net.model.params
        return int(shape.max_seq_len)

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        use_cache: bool = True,
        logits_chain: LogitsChain | None = None,
        on_token: Callable[[int], None] | None = None,
        logits_pipeline: OrderedLogitsPipeline | None = None,
        min_p: float | None = None,
        num_return_sequences: int = 1,
        eos_ids: Sequence[int] | None = None,
        on_text: Callable[[str], None] | None = None,
        context: str = "slide",
    ) -> Any:
        """The prompt and its continuation, decoded together.

        A list of prompts gives a list, each what it would be alone;
        ``num_return_sequences`` above 1 gives so many per prompt, prompt after prompt.

        Args:
            max_new_tokens: the most tokens to add, >= 0.
            temperature: 0 is greedy (the most probable token).
            top_k, top_p, min_p: filters before drawing; ``None`` is none.
            repetition_penalty: above 1 makes tokens of prompt and text less likely.
            stop: end as soon as one of these is in the continuation's text (and keep it).
            seed: draws from a generator of its own, sequence ``i`` of a prompt from
                ``seed + i``; without it, from the global torch stream.
            use_cache: remember keys and values; ``False`` reads all again per token.
            logits_chain, logits_pipeline: replace the filters above, as they are.
            on_token, on_text: are told of each token and of each piece of text, whole
                characters only; for a single sequence.
            eos_ids: end before any of these tokens.
            context: where prompt and continuation exceed the network's context:
                ``"slide"`` goes on with the last tokens, ``"refuse"`` raises at once.

        Raises ``ValueError`` without a tokenizer, for an empty prompt, for a prompt
        that alone exceeds the context, and for options that do not go together.
        Modes and hooks of the network are left as they were.
        """
        tokenizer = self._require_tokenizer()
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        count = check.count("generate", "num_return_sequences", num_return_sequences)
        max_new = check.count("generate", "max_new_tokens", max_new_tokens, at_least=0)
        check.choice("generate", "context", context, ("slide", "refuse"))
        if (on_token or on_text) and len(prompts) * count != 1:
            raise ValueError(
                "generate streams one sequence: on_token and on_text take a single prompt with "
                f"num_return_sequences=1, not {len(prompts)} x {count}"
            )
        if logits_chain is not None and logits_pipeline is not None:
            raise ValueError("generate takes a logits_chain or a logits_pipeline, not both")
        stops = _stops(stop)
        encoded = [self._encode(tokenizer, text) for text in prompts]
        for ids in encoded:
            self._check_room(len(ids), max_new, refuse=context == "refuse")
        if logits_pipeline is not None:
            processors, greedy = logits_pipeline.processors(), False
        elif logits_chain is not None:
            processors, greedy = list(logits_chain.processors), False
        else:
            processors, greedy = _filters(temperature, top_k, top_p, min_p, repetition_penalty)
        ends = frozenset(check.integer("generate", "eos_ids", i) for i in eos_ids or ())
        writers = [
            _Writer(tokenizer, ids, stops, ends, on_token, on_text)
            for ids in encoded
            for _ in range(count)
        ]
        drafts = []
        for i, writer in enumerate(writers):
            generator = _generator(self.device, seed, i % count)
            drafts.append(Draft(list(writer.prompt), processors, greedy, generator, writer))
        with eval_mode(self.net), inference_context(self), torch.inference_mode():
            decode(
                self.net, drafts, max_new_tokens=max_new, limit=self.context_limit,
                use_cache=use_cache,
            )  # fmt: skip
        for writer in writers:
            writer.finish()
        texts = [tokenizer.decode(draft.ids) for draft in drafts]
        return texts[0] if isinstance(prompt, str) and count == 1 else texts

    def _require_tokenizer(self) -> NNTokenizerParams:
        if self.tokenizer is None:
            raise ValueError(
                "generate needs a tokenizer: GenerativeNNModel(..., tokenizer="
                "NNTokenizerParams.of(train_bpe(...), path)) or model.tokenizer = ..."
            )
        return self.tokenizer

    def _encode(self, tokenizer: NNTokenizerParams, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"a prompt is text, not {type(text).__name__}")
        ids = tokenizer.encode(text)
        if not ids:
            raise ValueError(
                f"the prompt {check.show(text)} has no tokens; begin with a token of its own, "
                "say the one that starts a text"
            )
        return ids

    def _check_room(self, tokens: int, new: int, *, refuse: bool) -> None:
        limit = self.context_limit
        if tokens <= limit and not (refuse and tokens + new > limit):
            return
        room = max(limit - tokens, 0)
        wanted = f" and max_new_tokens={new}" if tokens <= limit else ""
        raise ValueError(
            f"the prompt has {tokens} tokens{wanted}, and the model's context is {limit}: there is "
            f"room for {room} more. " + ("Shorten the prompt" if not room else "Ask for fewer")
            + (' or let the window slide with context="slide"' if tokens <= limit else "")
        )  # fmt: skip


class _Writer:
    """What happens with the tokens of one sequence as they come."""

    def __init__(
        self,
        tokenizer: NNTokenizerParams,
        prompt: list[int],
        stops: tuple[str, ...],
        ends: frozenset[int],
        on_token: Callable[[int], None] | None,
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.prompt = prompt
        self._ends, self._on_token, self._on_text = ends, on_token, on_text
        self._text = TextStream(tokenizer, prompt) if on_text else None
        self._searched = TextStream(tokenizer) if stops else None
        self._stop = StopMatcher(stops)
        self.done = False

    def accept(self, token: int) -> bool:
        """Whether the token belongs to the text; sets ``done`` when a stop string is complete."""
        if token in self._ends:
            return False
        if self._on_token is not None:
            self._on_token(token)
        if self._text is not None:
            self._tell(self._text.push(token))
        if self._searched is not None and self._stop.found(self._searched.push(token)):
            self.done = True
        return True

    def finish(self) -> None:
        if self._text is not None:
            self._tell(self._text.finish())

    def _tell(self, piece: str) -> None:
        if piece and self._on_text is not None:
            self._on_text(piece)


def _filters(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
) -> tuple[list[Any], bool]:
    """What ``generate``'s options do to logits, and whether the most probable token is taken."""
    builder = LogitsChain.builder().temperature(temperature)
    if repetition_penalty != 1.0:
        builder.repetition_penalty(repetition_penalty)
    if top_k is not None:
        builder.top_k(top_k)
    if top_p is not None:
        builder.top_p(top_p)
    if min_p is not None:
        builder.min_p(min_p)
    processors = builder.build().processors
    if temperature != 0:
        return list(processors), False
    # Filters never rule out the greatest logit.
    return [p for p in processors if isinstance(p, RepetitionPenalty)], True


def _generator(device: torch.device, seed: int | None, offset: int) -> torch.Generator | None:
    if seed is None:
        return None
    return torch.Generator(device).manual_seed(check.integer("generate", "seed", seed) + offset)


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        raise TypeError(f"generate.stop is a list of strings: stop=[{stop!r}]")
    return tuple(check.text("generate", "stop", text) for text in stop)


def _check_vocabulary(net_params: Any, tokenizer: NNTokenizerParams) -> None:
    size = getattr(net_params, "vocab_size", None)
    if size is not None and tokenizer.vocab_size > size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the network's vocab_size is "
            f"{size}: the ids beyond it have no embedding. Build the network with "
            f".vocab({tokenizer.vocab_size})"
        )
