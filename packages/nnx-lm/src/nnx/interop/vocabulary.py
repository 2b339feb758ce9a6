"""What a tokenizer says about itself: tokens, merges, roles, and how text is cut before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nnx.lm.chat import PLAIN_TEMPLATE, SPECIAL_TOKENS
from nnx.utils import validation as check

ROLES = {
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]"),
    "eos": ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "[EOS]"),
    "pad": ("<pad>", "<|pad|>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
"""Tokens that are commonly called so; the first that a tokenizer has is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as other programs' files spell it.

    ``tokens`` are by id, with a name of their own for ids of the network that no token has;
    ``special`` are the ids of control tokens, ``unused`` those without a token. ``roles`` maps
    "bos", "eos", "pad" and "unk" to ids where there is one. ``byte_level`` is whether text is
    cut and spelled as GPT-2 does, from whose bytes everything can be written.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    special: frozenset[int]
    unused: frozenset[int]
    roles: dict[str, int]
    byte_level: bool
    chat_template: str | None

    @staticmethod
    def of(tokenizer: Any, size: int, what: str) -> Vocabulary:
        """Read ``tokenizer`` (anything with ``.tokenizer``, or itself), padded to ``size`` ids.

        Raises ``ValueError`` for a tokenizer with more tokens than the network has rows.
        """
        live = getattr(tokenizer, "tokenizer", tokenizer)
        vocab: dict[str, int] = live.get_vocab()
        if not vocab or max(vocab.values()) >= size:
            raise ValueError(
                f"{what}: the tokenizer's greatest id is {max(vocab.values(), default=-1)} and "
                f"the network has {size} rows; export a model with the tokenizer it was built for"
            )
        by_id = {id: token for token, id in vocab.items()}
        document = json.loads(live.to_str()) if hasattr(live, "to_str") else {}
        model = document.get("model") or {}
        merges = model.get("merges") or []
        added = document.get("added_tokens") or []
        return Vocabulary(
            tokens=tuple(by_id.get(i, f"[UNUSED_{i}]") for i in range(size)),
            merges=tuple(m if isinstance(m, str) else " ".join(m) for m in merges),
            special=frozenset(t["id"] for t in added if t.get("special")),
            unused=frozenset(range(size)) - by_id.keys(),
            roles={
                role: next(vocab[name] for name in names if name in vocab)
                for role, names in ROLES.items()
                if any(name in vocab for name in names)
            },
            byte_level=_is_gpt2(document),
            chat_template=PLAIN_TEMPLATE if all(t in vocab for t in SPECIAL_TOKENS) else None,
        )

    def token(self, role: str) -> str | None:
        """The token of a role, by name."""
        return None if role not in self.roles else self.tokens[self.roles[role]]


def _is_gpt2(document: Any) -> bool:
    before, after = document.get("pre_tokenizer") or {}, document.get("post_processor") or {}
    model = document.get("model") or {}
    return (
        document.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("ignore_merges")
        and after.get("type", "ByteLevel") == "ByteLevel"  # others may add tokens
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space")
        and before.get("use_regex", True) is True
    )


def check_tokenizer(tokenizer: Any, what: str) -> Any:
    """A tokenizer, or the refusal of what is none."""
    live = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(getattr(live, "get_vocab", None)):
        raise TypeError(
            f"{what} needs a tokenizer (NNTokenizerParams), not {check.show(tokenizer)}"
        )
    return tokenizer
