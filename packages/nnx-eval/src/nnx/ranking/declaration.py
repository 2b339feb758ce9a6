"""What is ranked: the declaration that loaders, objective and evaluation agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from nnx.params import MetricSpec
from nnx.ranking.losses import WEIGHTINGS
from nnx.ranking.metrics import METRICS, Id, RankingError, check_grades, check_k, checked_ids
from nnx.utils import validation as check

KIND = "ranking"
CANDIDATE_SETS = ("sampled", "exhaustive")
DEFAULT_METRICS = ("mrr", "recall", "ndcg")
_KEYS = ("features", "query_ids", "candidate_ids", "relevance", "mask")
# Later fields; a task that does not use them is stored as before.
_OMITTED = ("metrics", "grouped")


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a :class:`RankingTask` declares; objective and evaluation ask for no more."""

    k: tuple[int, ...] = (10,)
    max_relevance: int = 1
    relevance_threshold: int = 1
    weighting: str = "query"
    candidate_sets: str = "sampled"
    max_buffered: int = 1_000_000
    group_size: int | None = None
    version: int = 1
    metrics: tuple[str, ...] = DEFAULT_METRICS
    grouped: bool = False

    def __post_init__(self) -> None:
        cutoffs = self.k
        if isinstance(cutoffs, (str, Mapping)) or not isinstance(cutoffs, Iterable):
            raise RankingError(f"RankingTask.k must be a sequence of integers, not {cutoffs!r}")
        cutoffs = tuple(check_k(k) for k in cutoffs)
        if not cutoffs or len(set(cutoffs)) != len(cutoffs):
            raise RankingError(f"RankingTask.k must name one cutoff or more, each once: {cutoffs}")
        object.__setattr__(self, "k", cutoffs)
        try:
            highest = check.count("RankingTask", "max_relevance", self.max_relevance)
            check.count(
                "RankingTask", "relevance_threshold", self.relevance_threshold, at_most=highest
            )
            check.choice("RankingTask", "weighting", self.weighting, WEIGHTINGS)
            check.choice("RankingTask", "candidate_sets", self.candidate_sets, CANDIDATE_SETS)
            check.count("RankingTask", "max_buffered", self.max_buffered)
            if self.group_size is not None:
                check.count("RankingTask", "group_size", self.group_size, at_least=max(cutoffs))
            check.count("RankingTask", "version", self.version)
            check.flag("RankingTask", "grouped", self.grouped)
            given: Any = self.metrics
            names = tuple(given)
            for name in names:
                check.choice("RankingTask", "metrics", name, tuple(METRICS))
        except ValueError as error:
            raise RankingError(str(error)) from None
        if not names or len(set(names)) != len(names) or isinstance(given, str):
            raise RankingError(
                f"RankingTask.metrics must be names, each once, not {self.metrics!r}"
            )
        object.__setattr__(self, "metrics", names)

    def state(self) -> dict[str, Any]:
        """What the task is, as JSON-like data."""
        state: dict[str, Any] = {"kind": KIND}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OMITTED and value == field.default:
                continue
            state[field.name] = list(value) if isinstance(value, tuple) else value
        return state

    def metric_names(self) -> list[str]:
        """The names of the figures, such as ``"ndcg_at_10"``."""
        return [f"{name}_at_{k}" for k in self.k for name in self.metrics]

    def metric_specs(self) -> list[Any]:
        """The figures of :meth:`eval_step`, for ``NNTrainParams(metrics=...)`` and monitors."""
        return [
            MetricSpec(f"ranking.{name}", 1, config={"k": k}, name=f"{name}_at_{k}")
            for k in self.k
            for name in self.metrics
        ]

    def split(
        self, batch: Any
    ) -> tuple[Any, list[Id], list[Id], torch.Tensor, torch.Tensor | None]:
        """A checked batch: features, query ids, candidate ids, grades ``(N,)``, mask ``(N,)``.

        Raises :class:`RankingError` for lengths that differ, mixed ids, a candidate that a
        query has twice, grades out of range, and a mask that is no mask.
        """
        features, queries, candidates, relevance, mask = _parts(batch)
        query_ids = checked_ids(queries, "query_ids")
        candidate_ids = checked_ids(candidates, "candidate_ids")
        count = len(query_ids)
        if len(candidate_ids) != count:
            raise RankingError(
                f"there are {count} query_ids but {len(candidate_ids)} candidate_ids"
            )
        if isinstance(features, (torch.Tensor, np.ndarray)) and len(features) != count:
            raise RankingError(f"there are {len(features)} rows of features but {count} query_ids")
        grades = check_grades(relevance, count, at_most=self.max_relevance)
        valid = None if mask is None else _mask(mask, count)
        kept = None if valid is None else valid.numpy()
        seen: set[tuple[Id, Id]] = set()
        for i, pair in enumerate(zip(query_ids, candidate_ids)):
            if kept is not None and not kept[i]:
                continue
            if pair in seen:
                raise RankingError(f"query {pair[0]!r} has the candidate {pair[1]!r} twice")
            seen.add(pair)
        return features, query_ids, candidate_ids, torch.from_numpy(grades), valid

    def scores(self, model: Any, features: Any, n: int) -> torch.Tensor:
        """The scorer's output for ``n`` rows of features, ``(n,)``."""
        if isinstance(features, np.ndarray):
            features = torch.from_numpy(features)
        move = getattr(features, "to", None)
        output = model.net(move(model.device) if callable(move) else features)
        if isinstance(output, torch.Tensor) and tuple(output.shape) == (n, 1):
            output = output[:, 0]
        if not isinstance(output, torch.Tensor) or tuple(output.shape) != (n,):
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output)
            raise RankingError(f"the scorer must give one score per row, ({n},), not {shape}")
        return output


def _parts(batch: Any) -> tuple[Any, Any, Any, Any, Any]:
    if isinstance(batch, Mapping):
        missing = [name for name in _KEYS[:4] if name not in batch]
        if missing:
            raise RankingError(f"the batch has no {', '.join(missing)}")
        if unknown := sorted(str(name) for name in batch if name not in _KEYS):
            raise RankingError(f"a ranking batch has no {', '.join(unknown)}")
        return tuple(batch.get(name) for name in _KEYS)  # type: ignore[return-value]
    if not isinstance(batch, (tuple, list)) or len(batch) not in (4, 5):
        raise RankingError(
            "a ranking batch is (features, query_ids, candidate_ids, relevance[, mask]) or a "
            f"mapping with those keys, not {check.show(batch)}"
        )
    features, queries, candidates, relevance, *rest = batch
    return features, queries, candidates, relevance, rest[0] if rest else None


def _mask(mask: Any, count: int) -> torch.Tensor:
    values = torch.as_tensor(mask).detach().cpu()
    if tuple(values.shape) != (count,):
        raise RankingError(f"mask must have shape ({count},), not {tuple(values.shape)}")
    if values.dtype != torch.bool:
        if not bool(((values == 0) | (values == 1)).all()):
            raise RankingError("mask must hold True and False, or 1 and 0")
        values = values.bool()
    return values
