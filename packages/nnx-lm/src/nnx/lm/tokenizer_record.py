"""Which tokenizer a run was trained with: its path and the digest of what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from nnx.components import ComponentSpec
from nnx.enums import Checkpoints
from nnx.params import NNTokenizerParams
from nnx.store import NNCheckpoint

_NAME = "lm.tokenizer"


def tokenizer_digest(tokenizer: NNTokenizerParams) -> str:
    """``sha256:<hex>`` of everything that decides how the tokenizer reads and writes."""
    content = tokenizer.tokenizer.to_str(pretty=False)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


class TokenizerRecord:
    """A component that remembers the tokenizer and refuses to resume with another one."""

    def __init__(self, tokenizer: NNTokenizerParams) -> None:
        self.tokenizer = tokenizer

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(_NAME, required=False)

    def component_state(self) -> dict[str, Any]:
        return {**self.tokenizer.state(), "digest": tokenizer_digest(self.tokenizer)}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        problem = _difference(self.tokenizer, state.get("digest"))
        return [problem] if problem else []

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Nothing to take over: the tokenizers are the same."""


def recorded_tokenizer(
    run_id: str,
    checkpoint: Checkpoints,
    root: str | None = None,
    *,
    instead: NNTokenizerParams | None = None,
) -> NNTokenizerParams | None:
    """The tokenizer of a run's checkpoint; ``None`` when none was recorded.

    ``instead`` is taken in place of the recorded file. Raises ``ValueError`` for a
    tokenizer of another digest and ``FileNotFoundError`` for a file that is gone.
    """
    state = NNCheckpoint.load_training_state(run_id, checkpoint, root, map_location="meta")
    entry = ((state or {}).get("components") or {}).get(_NAME)
    if entry is None:
        return instead
    record = entry["state"]
    tokenizer = instead or NNTokenizerParams.from_state({"path": record["path"]})
    problem = _difference(tokenizer, record["digest"])
    if problem:
        raise ValueError(f"run {run_id}: {problem}")
    return tokenizer


def _difference(tokenizer: NNTokenizerParams, digest: Any) -> str | None:
    held = tokenizer_digest(tokenizer)
    if held == digest:
        return None
    return (
        f"the tokenizer {tokenizer.path!r} is not the one that the run was trained with "
        f"({held[:19]}, trained with {str(digest)[:19]}); its ids would mean other text. Put the "
        "original file back, or pass it as tokenizer="
    )
