"""Which tokenizer a run was trained with: its path, its digest, and the tokenizer itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from nnx.components import ComponentSpec
from nnx.enums import Checkpoints
from nnx.params import NNTokenizerParams
from nnx.store import NNCheckpoint

_NAME = "lm.tokenizer"
TOKENIZER_FILE = "tokenizer.json"


def tokenizer_digest(tokenizer: NNTokenizerParams) -> str:
    """``sha256:<hex>`` of everything that decides how the tokenizer reads and writes."""
    return f"sha256:{hashlib.sha256(tokenizer_bytes(tokenizer)).hexdigest()}"


def tokenizer_bytes(tokenizer: NNTokenizerParams) -> bytes:
    """The tokenizer as a file of the ``tokenizers`` library."""
    content: str = tokenizer.tokenizer.to_str(pretty=False)
    return content.encode("utf-8")


def tokenizer_of(data: bytes, path: str = TOKENIZER_FILE) -> NNTokenizerParams:
    """The tokenizer of :func:`tokenizer_bytes`; ``ValueError`` for what is none."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} is no tokenizer of the tokenizers library: {error}") from error
    return NNTokenizerParams(path=path, tokenizer=found)


class TokenizerRecord:
    """A component that remembers the tokenizer and refuses to resume with another one."""

    def __init__(self, tokenizer: NNTokenizerParams) -> None:
        self.tokenizer = tokenizer

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(_NAME, required=False)

    def component_state(self) -> dict[str, Any]:
        data = tokenizer_bytes(self.tokenizer)
        return {
            **self.tokenizer.state(),
            "digest": tokenizer_digest(self.tokenizer),
            "artifacts": {TOKENIZER_FILE: torch.frombuffer(bytearray(data), dtype=torch.uint8)},
        }

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

    ``instead`` is taken in place of the recorded file. A file that is gone is replaced by
    what the checkpoint holds of it. Raises ``ValueError`` for a tokenizer of another
    digest and ``FileNotFoundError`` where the checkpoint does not hold one.
    """
    record = _record(run_id, checkpoint, root, "meta")
    if record is None:
        return instead
    tokenizer, path = instead, record["path"]
    if tokenizer is None and "artifacts" in record and not os.path.isfile(path):
        whole: Any = _record(run_id, checkpoint, root, "cpu")
        tokenizer = tokenizer_of(bytes(whole["artifacts"][TOKENIZER_FILE].numpy()), path)
    tokenizer = tokenizer or NNTokenizerParams.from_state({"path": path})
    problem = _difference(tokenizer, record["digest"])
    if problem:
        raise ValueError(f"run {run_id}: {problem}")
    return tokenizer


def _record(run_id: str, checkpoint: Checkpoints, root: str | None, place: str) -> Any:
    state = NNCheckpoint.load_training_state(run_id, checkpoint, root, map_location=place)
    entry = ((state or {}).get("components") or {}).get(_NAME)
    return None if entry is None else entry["state"]


def _difference(tokenizer: NNTokenizerParams, digest: Any) -> str | None:
    held = tokenizer_digest(tokenizer)
    if held == digest:
        return None
    return (
        f"the tokenizer {tokenizer.path!r} is not the one that the run was trained with "
        f"({held[:19]}, trained with {str(digest)[:19]}); its ids would mean other text. Put the "
        "original file back, or pass it as tokenizer="
    )
