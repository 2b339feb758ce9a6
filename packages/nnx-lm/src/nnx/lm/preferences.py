"""Pairs of a chosen and a rejected response to a prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from nnx.data.base import (
    BatchSizes,
    NNDatasetBase,
    checked_batch_sizes,
    checked_proportions,
    random_parts,
)
from nnx.utils import validation as check
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

if TYPE_CHECKING:
    from typing_extensions import Self

_OWNER = "NNPreferenceDataset"


class Reference(Protocol):
    """What the pairs' batches take from a :class:`nnx.lm.ReferenceLogProbs`."""

    @property
    def chosen(self) -> torch.Tensor: ...
    @property
    def rejected(self) -> torch.Tensor: ...
    def check_data(self, dataset: Any) -> None: ...


@dataclass
class NNPreferenceDataset(NNDatasetBase):
    """Parallel lists of prompts, chosen and rejected responses as loaders for DPO.

    A batch is ``(prompt_ids, chosen_ids, rejected_ids)``, integers of shape
    (B, max_prompt_len) and (B, max_response_len): cut, then padded on the right with
    ``pad_token_id``. :meth:`with_reference` gives batches without padding between
    prompt and response, with the reference's log-probabilities.

    ``tokenizer`` is anything with ``encode(text) -> ids``. ``seed`` draws the split
    (``None``: from the global torch stream). ``batch_sizes`` are (train, val, test),
    ``None`` for a whole split.

    Raises ``ValueError`` for lists of different lengths, for no pair at all, and for a
    prompt or response without tokens, which could not be scored.
    """

    prompts: list[str]
    chosen: list[str]
    rejected: list[str]
    tokenizer: object
    max_prompt_len: int = 64
    max_response_len: int = 64
    pad_token_id: int = 0
    batch_sizes: BatchSizes = (None, None, None)
    val_proportion: float = 0.1
    test_proportion: float = 0.1
    name_override: str | None = None
    seed: int | None = None
    _parts: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.batch_sizes = checked_batch_sizes(_OWNER, self.batch_sizes)
        shares = checked_proportions(
            _OWNER, val_proportion=self.val_proportion, test_proportion=self.test_proportion
        )
        for name in ("max_prompt_len", "max_response_len"):
            setattr(self, name, check.count(_OWNER, name, getattr(self, name)))
        self.pad_token_id = check.count(_OWNER, "pad_token_id", self.pad_token_id, at_least=0)
        if self.seed is not None:
            self.seed = check.integer(_OWNER, "seed", self.seed)
        self._check_lists()
        self._prompts = self._ids("prompts", self.prompts, self.max_prompt_len)
        self._chosen = self._ids("chosen", self.chosen, self.max_response_len)
        self._rejected = self._ids("rejected", self.rejected, self.max_response_len)
        self.name = self.name_override or "preferences"
        self.input_dim = self.max_prompt_len + self.max_response_len
        self.output_dim = getattr(self.tokenizer, "vocab_size", 0)
        table = TensorDataset(
            self._padded(self._prompts, self.max_prompt_len),
            self._padded(self._chosen, self.max_response_len),
            self._padded(self._rejected, self.max_response_len),
        )
        self._parts = random_parts(table, shares, self.seed)
        self._publish(self._parts, self.batch_sizes)

    def __len__(self) -> int:
        return len(self.prompts)

    def sequences(self) -> list[tuple[list[int], list[int], list[int]]]:
        """The (cut) token ids of every prompt, chosen and rejected response, in order."""
        return list(zip(self._prompts, self._chosen, self._rejected))

    def with_reference(self, reference: Reference) -> Self:
        """The same pairs and splits, in batches for :class:`nnx.lm.DPOObjective`.

        A batch is a mapping of ``chosen_ids`` and ``rejected_ids`` (B, T), prompt and
        response in one row, ``chosen_mask`` and ``rejected_mask`` (B, T), which mark
        the response, and ``reference_chosen`` and ``reference_rejected`` (B,).

        Raises ``ValueError`` when ``reference`` was computed from other pairs or with
        another tokenizer.
        """
        reference.check_data(self)
        columns: dict[str, Any] = {}
        for kind, responses in (("chosen", self._chosen), ("rejected", self._rejected)):
            columns[f"{kind}_ids"], columns[f"{kind}_mask"] = paired_rows(self._prompts, responses)
            columns[f"reference_{kind}"] = getattr(reference, kind)
        table: Dataset[Any] = StackDataset(**columns)
        other = copy.copy(self)
        other._parts = [Subset(table, part.indices) for part in self._parts]
        other._publish(other._parts, self.batch_sizes)
        return other

    def _check_lists(self) -> None:
        lengths = {}
        for name in ("prompts", "chosen", "rejected"):
            texts: Any = getattr(self, name)
            if isinstance(texts, (str, bytes, Mapping)) or not isinstance(texts, Sequence):
                check.refuse(_OWNER, name, texts, "a list of strings")
            lengths[name] = len(texts)
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{_OWNER}: the lists differ in length: {lengths}")
        if not self.prompts:
            raise ValueError(f"{_OWNER}: there are no pairs")

    def _ids(self, name: str, texts: Sequence[str], most: int) -> list[list[int]]:
        encode: Any = getattr(self.tokenizer, "encode", None)
        if not callable(encode):
            check.refuse(_OWNER, "tokenizer", self.tokenizer, "an object with encode(text) -> ids")
        rows = []
        for i, text in enumerate(texts):
            ids = encode(text)
            ids = list(getattr(ids, "ids", ids))[:most]
            if not ids:
                raise ValueError(
                    f"{_OWNER}.{name}[{i}] is {check.show(text)}, which has no tokens: there is "
                    "nothing to score. Leave the pair out"
                )
            rows.append(ids)
        return rows

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        table = torch.full((len(rows), width), self.pad_token_id, dtype=torch.long)
        for i, ids in enumerate(rows):
            table[i, : len(ids)] = torch.tensor(ids)
        return table


def paired_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response in one row each, (N, T) padded with 0, and the response's mask."""
    width = max(len(p) + len(r) for p, r in zip(prompts, responses))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor([*prompt, *response])
        mask[i, len(prompt) : end] = True
    return ids, mask
