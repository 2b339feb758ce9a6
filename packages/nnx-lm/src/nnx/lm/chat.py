"""Conversations: written out by a template, trained on the assistant's turns alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nnx.params import NNTokenizerParams
from nnx.plugins.siblings import install_line
from nnx.utils import validation as check
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from nnx.lm.model import GenerativeNNModel

Message = Mapping[str, Any]

PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""What :data:`PLAIN_TEMPLATE` wants of a tokenizer: ``train_bpe(special_tokens=[...])``."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A Jinja template that writes out ``messages``, in the manner of transformers.

    It is given ``messages`` (mappings of ``role`` and ``content``) and
    ``add_generation_prompt``, and runs in a sandbox: it can neither reach into objects
    nor change them. ``end_of_turn`` is the token that ends a turn; the assistant's is
    trained, and generation stops at it. ``bos``, a token, begins every conversation,
    once, also where the template writes it.
    """

    template: str = PLAIN_TEMPLATE
    end_of_turn: str = "<|end|>"
    bos: str | None = None

    def __post_init__(self) -> None:
        check.text("ChatTemplate", "template", self.template)
        check.text("ChatTemplate", "end_of_turn", self.end_of_turn)

    @cached_property
    def _compiled(self) -> Any:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            line = install_line("nnx-lm", "chat")
            raise ImportError(f"a chat template needs Jinja: {line}") from error

        def refuse(message: str) -> None:
            raise ValueError(f"the chat template refuses the messages: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.template)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of ``messages``, and of the beginning of the assistant's next turn."""
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=[dict(m) for m in checked_messages(messages)],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos or "",
                eos_token=self.end_of_turn,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template failed: {error}") from error
        return text.removeprefix(self.bos) if self.bos else text

    def encode(
        self, messages: Sequence[Message], tokenizer: NNTokenizerParams
    ) -> tuple[list[int], list[bool]]:
        """The token ids of a conversation, and which of them the assistant wrote.

        The end of each of its turns is its own. Raises ``ValueError`` for a template
        that writes a turn in another way once more turns follow, or that does not end
        the assistant's turns with ``end_of_turn``.
        """
        ids = self._prefix(tokenizer)
        mask, written = [False] * len(ids), ""
        for i, message in enumerate(checked_messages(messages)):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = self.render(messages[: i + 1])
            turn, rest = self._turn(after.removeprefix(before), i)
            if not (before.startswith(written) and after.startswith(before)):
                raise ValueError(
                    f"the chat template writes messages before turn {i} in another way when the "
                    "turn follows, so the assistant's tokens cannot be told; use a template that "
                    "only appends"
                )
            for text, own in ((before[len(written) :], False), (turn, True)):
                new = _plain_ids(tokenizer, text)
                ids += new
                mask += [own] * len(new)
            written = after[: len(after) - len(rest)]
        tail = _plain_ids(tokenizer, self.render(messages).removeprefix(written))
        return ids + tail, mask + [False] * len(tail)

    def end_id(self, tokenizer: NNTokenizerParams) -> int:
        """The id of ``end_of_turn``; ``ValueError`` where the tokenizer has no such token."""
        return self._token_id(tokenizer, self.end_of_turn)

    def _prefix(self, tokenizer: NNTokenizerParams) -> list[int]:
        self.end_id(tokenizer)
        return [] if self.bos is None else [self._token_id(tokenizer, self.bos)]

    def _turn(self, text: str, index: int) -> tuple[str, str]:
        """The assistant's turn, its end included, and what the template adds behind it."""
        head, end, rest = text.rpartition(self.end_of_turn)
        if not end:
            raise ValueError(
                f"the chat template does not end the assistant's turn {index} with "
                f"{self.end_of_turn!r}, so a model could not learn to stop"
            )
        return head + end, rest

    @staticmethod
    def _token_id(tokenizer: NNTokenizerParams, token: str) -> int:
        live: Any = tokenizer.tokenizer
        found = live.token_to_id(token)
        if found is None:
            raise ValueError(
                f"the tokenizer {tokenizer.path!r} has no token {token!r}; train it with "
                f"special_tokens=[{token!r}, ...]"
            )
        return int(found)


class ChatDataset(Dataset[dict[str, torch.Tensor]]):
    """``{"messages": [...]}`` rows as token ids with a loss on the assistant's tokens alone.

    Load it with ``collate_fn=dataset.collate``: ``input_ids`` and ``loss_mask`` (B, T),
    padded on the right, for ``CausalLMTask(vocab_size=...)``.

    Rows are cut to ``max_tokens``. Raises ``ValueError`` that names the row for one in
    which the assistant says nothing, or nothing that is left after the cut.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: NNTokenizerParams,
        template: ChatTemplate | None = None,
        *,
        max_tokens: int = 1024,
    ) -> None:
        template = template or ChatTemplate()
        most = check.count("ChatDataset", "max_tokens", max_tokens)
        self.rows: list[tuple[list[int], list[bool]]] = []
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping) or "messages" not in row:
                raise ValueError(f"row {i} has no messages: {check.show(row)}")
            try:
                ids, mask = template.encode(row["messages"], tokenizer)
            except (ValueError, TypeError) as error:
                raise type(error)(f"row {i}: {error}") from error
            if not any(mask[1:most]):
                why = f"nothing within {most} tokens" if any(mask) else "nothing"
                raise ValueError(f"row {i}: the assistant says {why}, so there is nothing to learn")
            self.rows.append((ids[:most], mask[:most]))
        if not self.rows:
            raise ValueError("ChatDataset has no rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = self.rows[index]
        return {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}

    @staticmethod
    def collate(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """One batch of rows, each padded on the right; padding is never a target."""
        return {
            name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
            for name in ("input_ids", "loss_mask")
        }


def read_chats(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a broken line is a ``ValueError`` that names it."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from error
    return rows


def reply(
    model: GenerativeNNModel,
    messages: Sequence[Message],
    template: ChatTemplate | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> str:
    """What the model says after ``messages``; ``options`` are those of ``generate``."""
    template = template or ChatTemplate()
    tokenizer = model._require_tokenizer()
    pieces: list[str] = []

    def tell(piece: str) -> None:
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)

    prompt = template.render(messages, add_generation_prompt=True)
    if template.bos and tokenizer.encode("") != [template._token_id(tokenizer, template.bos)]:
        prompt = template.bos + prompt  # unless the tokenizer begins every text with it
    model.generate(prompt, eos_ids=[template.end_id(tokenizer)], on_text=tell, **options)
    return "".join(pieces)


def checked_messages(messages: Any) -> Sequence[Message]:
    """A list of mappings with ``role`` and ``content``."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages are a list of mappings, not {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"message {i} has no role and content: {check.show(message)}")
    return messages


def _plain_ids(tokenizer: NNTokenizerParams, text: str) -> list[int]:
    """Ids without the tokens that a tokenizer adds around a text of its own accord."""
    live: Any = tokenizer.tokenizer
    return list(live.encode(text, add_special_tokens=False).ids) if text else []
