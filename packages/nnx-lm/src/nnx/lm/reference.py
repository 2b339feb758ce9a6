"""What a reference model thinks of preference pairs, computed once and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from nnx.lm.dpo import sequence_log_probs
from nnx.lm.preferences import NNPreferenceDataset, paired_rows
from nnx.lm.tokenizer_record import tokenizer_digest
from nnx.params import NNTokenizerParams
from nnx.precision import inference_precision
from nnx.utils import validation as check
from nnx.utils.files import atomic_write
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from nnx.nn_model import NNModel

_FORMAT = "nnx.lm.reference/1"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceLogProbs:
    """Log-probabilities (N,) of every chosen and rejected response under a reference model.

    ``weights``, ``tokenizer`` and ``data`` are the digests of what they were computed
    from. With them, preference tuning needs no second model in memory.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    weights: str
    tokenizer: str
    data: str

    @staticmethod
    def compute(
        model: NNModel, dataset: NNPreferenceDataset, *, batch_size: int = 16
    ) -> ReferenceLogProbs:
        """Score every pair of ``dataset`` with ``model``, without dropout and gradients."""
        size = check.count("ReferenceLogProbs.compute", "batch_size", batch_size)
        rows = dataset.sequences()
        scores: dict[str, list[torch.Tensor]] = {"chosen": [], "rejected": []}
        precision = inference_precision(model.params, model.device)
        with eval_mode(model.net), torch.no_grad(), precision.autocast():
            for start in range(0, len(rows), size):
                prompts, chosen, rejected = zip(*rows[start : start + size])
                for kind, responses in (("chosen", chosen), ("rejected", rejected)):
                    pair = (t.to(model.device) for t in paired_rows(prompts, responses))
                    scores[kind].append(sequence_log_probs(model.net, *pair).cpu())
        return ReferenceLogProbs(
            **{kind: torch.cat(parts) for kind, parts in scores.items()},
            weights=weights_digest(model.net),
            tokenizer=_tokenizer_digest(dataset),
            data=data_digest(dataset),
        )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a safetensors file: the old file or the whole new one; return ``path``."""
        from safetensors.torch import save

        about = {k: getattr(self, k) for k in ("weights", "tokenizer", "data")}
        tensors = {"chosen": self.chosen, "rejected": self.rejected}
        with atomic_write(path, "wb") as stream:
            stream.write(save(tensors, metadata={"format": _FORMAT, **about}))
        return os.fspath(path)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        *,
        model: NNModel | None = None,
        dataset: NNPreferenceDataset | None = None,
    ) -> ReferenceLogProbs:
        """Read a file of :meth:`save`, and refuse one of another ``model`` or ``dataset``."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise ValueError(
                        f"{path} holds no reference log-probabilities of NNx "
                        f"(its format is {about.get('format')!r})"
                    )
                found = ReferenceLogProbs(
                    chosen=file.get_tensor("chosen"), rejected=file.get_tensor("rejected"),
                    **{k: about[k] for k in ("weights", "tokenizer", "data")},
                )  # fmt: skip
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        if model is not None:
            _compare(
                f"{path}: the weights of the reference", found.weights, weights_digest(model.net)
            )
        if dataset is not None:
            found.check_data(dataset)
        return found

    @staticmethod
    def cached(
        path: str | os.PathLike[str], model: NNModel, dataset: NNPreferenceDataset
    ) -> ReferenceLogProbs:
        """The stored values, computed and stored first where the file is not there yet.

        A file of another model, tokenizer or data is refused, never replaced.
        """
        if os.path.exists(path):
            return ReferenceLogProbs.load(path, model=model, dataset=dataset)
        found = ReferenceLogProbs.compute(model, dataset)
        found.save(path)
        return found

    def check_data(self, dataset: NNPreferenceDataset) -> None:
        """Raise ``ValueError`` unless ``dataset`` has the pairs and tokenizer of these values."""
        _compare("the tokenizer", self.tokenizer, _tokenizer_digest(dataset))
        _compare("the preference pairs", self.data, data_digest(dataset))


def weights_digest(net: torch.nn.Module) -> str:
    """``sha256:<hex>`` of names, shapes, dtypes and values of everything ``net`` saves."""
    digest = hashlib.sha256()
    state: Mapping[str, Any] = net.state_dict()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            digest.update(json.dumps([name, list(plain.shape), str(plain.dtype)]).encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def data_digest(dataset: NNPreferenceDataset) -> str:
    """``sha256:<hex>`` of the token ids of every pair, in order."""
    return f"sha256:{hashlib.sha256(json.dumps(dataset.sequences()).encode()).hexdigest()}"


def _tokenizer_digest(dataset: NNPreferenceDataset) -> str:
    tokenizer = dataset.tokenizer
    return tokenizer_digest(tokenizer) if isinstance(tokenizer, NNTokenizerParams) else "unknown"


def _compare(what: str, stored: str, held: str) -> None:
    if stored != held:
        raise ValueError(
            f"{what} changed since the reference log-probabilities were computed "
            f"({stored[:19]} then, {held[:19]} now). Compute them again: "
            "ReferenceLogProbs.compute(model, dataset).save(path)"
        )
