"""Figures of ranked candidates: of one query, and of many queries at once.

Candidates are ranked by score, the highest first, and at equal scores by their id, the
smallest first. With ``rel_r`` the grade at rank ``r`` (from 1):

- MRR@k: ``1 / r`` of the first relevant candidate in the top ``k``, else 0;
- recall@k, precision@k: relevant candidates in the top ``k``, over all relevant ones, over ``k``;
- hit rate@k: 1 when the top ``k`` holds a relevant candidate;
- MAP@k: the mean over the relevant candidates of the precision at their rank, those below
  rank ``k`` counting 0;
- NDCG@k: ``Σ (2^rel_r - 1) / log2(r + 1)`` over that of the ideal order (Järvelin & Kekäläinen,
  2002, with the gain of Burges et al., 2005);
- ERR@k: ``Σ 1/r · R_r · Π_{i<r} (1 - R_i)`` with ``R = (2^rel - 1) / 2^max`` (Chapelle et al., 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nnx.errors import NNxError

Id = int | str


class RankingError(ValueError, NNxError):
    """Candidates, grades or scores that cannot be ranked."""


def rank(scores: Sequence[float], candidate_ids: Sequence[Id]) -> list[int]:
    """The positions of the candidates, the best first.

    Raises :class:`RankingError` for scores that are not finite, unequal lengths, ids of
    mixed types and an id that is there twice.
    """
    ids = checked_ids(candidate_ids, "candidate_ids")
    values = _scores(scores, len(ids))
    if len(set(ids)) != len(ids):
        raise RankingError(f"candidate_ids names {_repeated(ids)!r} twice")
    return [int(i) for i in np.lexsort((id_ranks(ids), -values))]


def mrr_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    threshold: int = 1,
) -> float:
    """The reciprocal rank of the first candidate of grade ``threshold`` in the top ``k``."""
    return _one("mrr", relevance, scores, candidate_ids, k, threshold)


def recall_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    threshold: int = 1,
) -> float:
    """The share of the relevant candidates that the top ``k`` holds."""
    return _one("recall", relevance, scores, candidate_ids, k, threshold)


def ndcg_at_k(
    relevance: Sequence[int], scores: Sequence[float], candidate_ids: Sequence[Id], k: int
) -> float:
    """The discounted gain of the top ``k``, over that of the ideal order."""
    return _one("ndcg", relevance, scores, candidate_ids, k, 1)


def average_precision_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    threshold: int = 1,
) -> float:
    """The mean precision at the ranks of the relevant candidates; the term of MAP."""
    return _one("map", relevance, scores, candidate_ids, k, threshold)


def precision_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    threshold: int = 1,
) -> float:
    """The share of the top ``k`` that is relevant."""
    return _one("precision", relevance, scores, candidate_ids, k, threshold)


def hit_rate_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    threshold: int = 1,
) -> float:
    """1.0 when the top ``k`` holds a relevant candidate, else 0.0."""
    return _one("hit_rate", relevance, scores, candidate_ids, k, threshold)


def err_at_k(
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    *,
    max_relevance: int = 1,
) -> float:
    """The expected reciprocal rank at which a reader stops; grades go up to ``max_relevance``."""
    return _one("err", relevance, scores, candidate_ids, k, 1, max_relevance)


@dataclass(frozen=True, slots=True)
class RankedQueries:
    """The rows of many queries, each query's together and in ranked order.

    ``relevance`` ``(N,)``, ``starts`` ``(Q,)`` where each query begins, ``sizes`` ``(Q,)``,
    ``ranks`` ``(N,)`` from 1 within the query.
    """

    relevance: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    ranks: np.ndarray
    threshold: int
    max_relevance: int

    @staticmethod
    def of(
        queries: np.ndarray,
        relevance: np.ndarray,
        scores: np.ndarray,
        id_rank: np.ndarray,
        *,
        threshold: int,
        max_relevance: int,
    ) -> RankedQueries:
        """``queries`` ``(N,)`` numbers the query of each row, ``id_rank`` orders equal scores."""
        order, starts, sizes = _ranked_order(queries, scores, id_rank)
        return RankedQueries(
            relevance[order], starts, sizes, _places(starts, sizes), threshold, max_relevance
        )

    @property
    def relevant(self) -> np.ndarray:
        """Whether each row counts as relevant, ``(N,)``."""
        return self.relevance >= self.threshold

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of ``values`` over each query's rows, ``(Q,)``."""
        return np.add.reduceat(values, self.starts)


def mrr(ranked: RankedQueries, k: int) -> np.ndarray:
    hits = np.where(ranked.relevant & (ranked.ranks <= k), ranked.ranks, np.inf)
    return 1.0 / np.minimum.reduceat(hits, ranked.starts)


def recall(ranked: RankedQueries, k: int) -> np.ndarray:
    relevant = ranked.relevant
    return _over(ranked.sum(relevant & (ranked.ranks <= k)), ranked.sum(relevant))


def precision(ranked: RankedQueries, k: int) -> np.ndarray:
    return ranked.sum(ranked.relevant & (ranked.ranks <= k)) / k


def hit_rate(ranked: RankedQueries, k: int) -> np.ndarray:
    found = ranked.sum(ranked.relevant & (ranked.ranks <= k)) > 0
    return found.astype(np.float64)


def average_precision(ranked: RankedQueries, k: int) -> np.ndarray:
    relevant = ranked.relevant
    so_far = np.cumsum(relevant)
    before = np.repeat(so_far[ranked.starts] - relevant[ranked.starts], ranked.sizes)
    terms = np.where(relevant & (ranked.ranks <= k), (so_far - before) / ranked.ranks, 0.0)
    return _over(ranked.sum(terms), ranked.sum(relevant))


def ndcg(ranked: RankedQueries, k: int) -> np.ndarray:
    discount = np.where(ranked.ranks <= k, 1.0 / np.log2(ranked.ranks + 1.0), 0.0)
    found = ranked.sum((np.exp2(ranked.relevance) - 1.0) * discount)
    sums = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(2.0, k + 2)))])
    ideal, above = np.zeros(len(ranked.sizes)), np.zeros(len(ranked.sizes), dtype=np.int64)
    for grade in range(int(ranked.relevance.max(initial=0)), 0, -1):  # the best grades come first
        upto = above + ranked.sum((ranked.relevance == grade).astype(np.int64))
        ideal += (2.0**grade - 1.0) * (sums[np.minimum(upto, k)] - sums[np.minimum(above, k)])
        above = upto
    return _over(found, ideal)


def err(ranked: RankedQueries, k: int) -> np.ndarray:
    chance = (np.exp2(ranked.relevance) - 1.0) / 2.0**ranked.max_relevance
    total = np.zeros(len(ranked.sizes))
    going_on = np.ones(len(ranked.sizes))
    for place in range(min(k, int(ranked.sizes.max(initial=0)))):
        there = ranked.sizes > place
        here = chance[ranked.starts[there] + place]
        total[there] += going_on[there] * here / (place + 1)
        going_on[there] *= 1.0 - here
    return total


METRICS: dict[str, Callable[[RankedQueries, int], np.ndarray]] = {
    "mrr": mrr, "recall": recall, "ndcg": ndcg, "map": average_precision, "err": err,
    "precision": precision, "hit_rate": hit_rate,
}  # fmt: skip


def checked_ids(ids: Any, name: str) -> list[Id]:
    """Ids as a list of plain integers or of strings; one kind only."""
    if isinstance(ids, str) or not hasattr(ids, "__len__"):
        raise RankingError(f"{name} must be a sequence of integers or strings, not {ids!r}")
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    kinds = {type(value) for value in found}
    if not kinds <= {int, str}:  # numbers of NumPy and torch among them
        found = [value.item() if hasattr(value, "item") else value for value in found]
        kinds = {type(value) for value in found}
    if not kinds <= {int} and not kinds <= {str}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise RankingError(f"{name} must all be integers or all be strings, not {names}")
    return found


def id_ranks(ids: Sequence[Id]) -> np.ndarray:
    """Numbers in the order of the ids, equal for equal ids, ``(N,)`` int64."""
    numbers = _integers(ids)
    if numbers is not None:
        return numbers
    places = {value: place for place, value in enumerate(sorted(set(ids)))}
    return np.fromiter(map(places.__getitem__, ids), dtype=np.int64, count=len(ids))


def numbered(ids: Sequence[Id]) -> np.ndarray:
    """Numbers from 0 in the order in which ids first appear, ``(N,)`` int64."""
    numbers = _integers(ids)
    if numbers is not None:
        starts, sizes = _runs(numbers)
        if len(set(numbers[starts].tolist())) == len(starts):  # each id's rows are together
            return np.repeat(np.arange(len(starts)), sizes)
    places = {value: place for place, value in enumerate(dict.fromkeys(ids))}
    return np.fromiter(map(places.__getitem__, ids), dtype=np.int64, count=len(ids))


def _integers(ids: Sequence[Id]) -> np.ndarray | None:
    """Checked ids as int64; ``None`` for strings and for integers that are larger."""
    if len(ids) and type(ids[0]) is not int:
        return None
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        return None


def check_k(k: Any) -> int:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise RankingError(f"k must be an integer >= 1, not {k!r}")
    return int(k)


def check_grades(relevance: Any, count: int, *, at_most: int | None = None) -> np.ndarray:
    """Grades ``(count,)`` as int64; refuses fractions, negative ones and those above ``at_most``."""
    if hasattr(relevance, "detach"):
        relevance = relevance.detach().cpu().numpy()
    grades = np.asarray(relevance)
    if grades.ndim != 1 or len(grades) != count:
        raise RankingError(f"relevance must have shape ({count},), not {grades.shape}")
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    whole = grades.astype(np.int64) if grades.dtype.kind in "iufb" else None
    if whole is None or not bool((whole == grades).all()):
        raise RankingError("relevance must be integer grades")
    low, high = int(whole.min()), int(whole.max())
    if low < 0 or (at_most is not None and high > at_most):
        upper = "" if at_most is None else f" to {at_most}"
        raise RankingError(
            f"relevance has grade {low if low < 0 else high}; grades go from 0{upper}"
        )
    return whole


def _one(
    name: str,
    relevance: Sequence[int],
    scores: Sequence[float],
    candidate_ids: Sequence[Id],
    k: int,
    threshold: int,
    max_relevance: int | None = None,
) -> float:
    order = rank(scores, candidate_ids)
    grades = check_grades(relevance, len(order), at_most=max_relevance)[order]
    k = check_k(k)
    if k > len(order):
        raise RankingError(f"k={k} is more than the {len(order)} candidates of the query")
    if not bool((grades >= threshold).any()):
        raise RankingError("the query has no relevant candidate, so it has no value")
    starts, sizes = np.zeros(1, dtype=np.int64), np.array([len(order)])
    ranked = RankedQueries(
        grades, starts, sizes, _places(starts, sizes), threshold, max_relevance or 1
    )
    return float(METRICS[name](ranked, k)[0])


def _scores(scores: Any, count: int) -> np.ndarray:
    if hasattr(scores, "detach"):
        scores = scores.detach().cpu().double().numpy()
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (count,):
        raise RankingError(f"there are {count} candidates but scores of shape {values.shape}")
    if not bool(np.isfinite(values).all()):
        raise RankingError("scores must be finite")
    return values


def _ranked_order(
    queries: np.ndarray, scores: np.ndarray, id_rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows by query and rank, where each query begins, and its size."""
    together = np.argsort(queries, kind="stable") if (np.diff(queries) < 0).any() else None
    ordered = queries if together is None else queries[together]
    starts, sizes = _runs(ordered)
    longest = int(sizes.max(initial=0))
    if len(sizes) * longest <= 4 * len(queries):  # a table of queries sorts faster than one list
        inside = np.arange(longest) < sizes[:, None]
        table = np.full(inside.shape, np.inf)
        table[inside] = -(scores if together is None else scores[together])
        places = np.argsort(table, axis=1)
        table = np.take_along_axis(table, places, axis=1)
        if not ((table[:, 1:] == table[:, :-1]) & inside[:, 1:]).any():  # no ties to break by id
            order = (places + starts[:, None])[inside]
            return order if together is None else together[order], starts, sizes
    return np.lexsort((id_rank, -scores, queries)), starts, sizes


def _runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal values begins, and its length."""
    new = np.empty(len(ordered), dtype=bool)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    return starts, np.diff(np.append(starts, len(ordered)))


def _places(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Ranks from 1 within each run."""
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes) + 1


def _over(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return numerator / np.maximum(denominator, np.finfo(np.float64).tiny)


def _repeated(ids: Sequence[Id]) -> Id:
    seen: set[Id] = set()
    for value in ids:
        if value in seen:
            return value
        seen.add(value)
    raise AssertionError("no id is repeated")
