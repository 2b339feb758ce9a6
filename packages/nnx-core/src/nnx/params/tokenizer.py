"""A tokenizer and the file that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnx.params.base import check_keys
from nnx.plugins.siblings import install_line
from nnx.utils import validation as check
from nnx.utils.files import atomic_write


@dataclass(frozen=True, kw_only=True, slots=True)
class NNTokenizerParams:
    """A live ``tokenizers.Tokenizer`` beside its path, which is all that is stored.

    The path is kept as given, usually relative to the working directory, so
    that a run can move to another machine with its files.
    """

    path: str
    tokenizer: Any = field(repr=False)

    def __post_init__(self) -> None:
        check.text("NNTokenizerParams", "path", self.path)

    @staticmethod
    def of(tokenizer: Any, path: str) -> NNTokenizerParams:
        """Write ``tokenizer`` to ``path`` and describe it."""
        params = NNTokenizerParams(path=str(path), tokenizer=tokenizer)
        content = tokenizer.to_str(pretty=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as stream:
            stream.write(content)
        return params

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ``ids``."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def state(self) -> dict[str, Any]:
        return {"path": self.path}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NNTokenizerParams:
        """Load the tokenizer from the stored path."""
        check_keys("NNTokenizerParams", state, ("path",))
        path = check.text("NNTokenizerParams", "path", state.get("path"))
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                f"reading the tokenizer {path!r} needs the tokenizers library: "
                f"{install_line('nnx-lm')}"
            ) from error
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"the tokenizer file {path!r} does not exist (relative to {Path.cwd()})"
            )
        return NNTokenizerParams(path=path, tokenizer=Tokenizer.from_file(path))
