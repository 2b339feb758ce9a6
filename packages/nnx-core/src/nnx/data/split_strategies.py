"""How rows are dealt to training, validation and test. No strategy draws a random number.

Every function returns one code per row: 0 train, 1 validation, 2 test, 3 excluded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from nnx.data.split_values import SplitError, Times, as_integers

SPLITS = ("train", "validation", "test")
Codes = np.ndarray[Any, np.dtype[np.int8]]
Order = np.ndarray[Any, np.dtype[np.intp]]
_TAGS = {str: "s", int: "i", float: "f", bool: "b"}


def ranked(keys: Sequence[Any], seed: int, what: str) -> Order:
    """The positions of ``keys`` in seeded order; ``what`` is "sample" or "group".

    A key's rank is the SHA-256 of the seed, ``what`` and the key, and depends on
    nothing else, so it is the same in every process and with every version of
    every library.
    """
    return hashed_order(keys, f"nnx.split.rank\0{seed}\0{what}\0")


def hashed_order(keys: Sequence[Any], prefix: str, mark: str = "") -> Order:
    """The positions of ``keys`` sorted by the SHA-256 of ``prefix``, their type and themselves."""
    if not len(keys):
        return np.empty(0, dtype=np.intp)
    start = f"{prefix}{_TAGS[type(keys[0])]}{mark}"
    sha256 = hashlib.sha256
    digests = b"".join(
        [sha256(f"{start}{key}".encode("utf-8", "surrogatepass")).digest() for key in keys]
    )
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 4).astype(np.uint64)
    order = np.argsort(words[:, 0], kind="stable")
    first = words[order, 0]
    if (first[1:] == first[:-1]).any():  # equal in 64 bits: compare all 256
        order = np.lexsort(words.T[::-1])
    return order


def by_group(
    groups: Sequence[Any], shares: Sequence[Fraction], order_of: Callable[[Sequence[Any]], Order]
) -> Codes:
    """Each group goes whole to the split that lacks most of its number of rows."""
    names, codes = _encode(groups)
    sizes = np.bincount(codes, minlength=len(names)).tolist()
    active = [s for s in range(3) if shares[s]]
    if len(names) < len(active):
        raise SplitError(
            f"{len(names)} group(s) cannot fill {len(active)} splits; every active split "
            f"needs a group of its own. Set a proportion to 0 or use fewer splits"
        )
    order = order_of(names).tolist()
    unit = math.lcm(*(share.denominator for share in shares))
    room = [int(share * unit) * len(groups) for share in shares]  # rows times `unit`, exact
    chosen: list[int] = [0] * len(names)
    for group in order:
        split = max(active, key=lambda s: (room[s], -s))
        chosen[group] = split
        room[split] -= sizes[group] * unit
    _fill_empty(chosen, order, sizes, active)
    return np.asarray(chosen, dtype=np.int8)[codes]


def _fill_empty(chosen: list[int], order: list[int], sizes: list[int], active: list[int]) -> None:
    """An active split without a group takes the smallest one of the split with most groups."""
    for split in active:
        if split in chosen:
            continue
        donor = max(active, key=lambda s: (chosen.count(s), -s))
        moved = min((g for g in order if chosen[g] == donor), key=lambda g: sizes[g])
        chosen[moved] = split


def by_class(
    labels: Sequence[Any],
    shares: Sequence[Fraction],
    order: Order,
    *,
    small_classes_train: bool,
    give_least: Callable[[list[int], Sequence[Fraction], list[int]], None],
) -> tuple[Codes, list[Any]]:
    """Every class in every active split, in its share; also the classes that only train.

    Within a class the rows, in ``order``, are cut by the largest remainder; the
    rounding is carried to the next class, so the totals follow the shares too.
    Only then does ``give_least`` see to it that no split is without a row.
    """
    names, codes = _encode(labels)
    sizes = np.bincount(codes, minlength=len(names)).tolist()
    active = [s for s in range(3) if shares[s]]
    small = [c for c in sorted(range(len(names)), key=names.__getitem__) if sizes[c] < len(active)]
    if small and not small_classes_train:
        listed = ", ".join(f"{names[c]!r} ({sizes[c]})" for c in small[:5])
        listed += f" and {len(small) - 5} more" if len(small) > 5 else ""
        raise SplitError(
            f"these classes have fewer rows than the {len(active)} active splits: {listed}; "
            f'merge or drop them, or pass insufficient="train" to keep them in training'
        )
    order = order[np.argsort(codes[order], kind="stable")]  # class by class, seeded inside
    starts = np.concatenate(([0], np.cumsum(sizes))).tolist()
    result: Codes = np.zeros(len(codes), dtype=np.int8)
    carry = [Fraction(0)] * 3
    for c in sorted(set(range(len(names))) - set(small), key=names.__getitem__):
        wish = [
            sizes[c] * share + rest if share else Fraction(0) for share, rest in zip(shares, carry)
        ]
        counts = _largest_remainder(sizes[c], wish, active)
        carry = [max(-ONE, min(ONE, want - count)) for want, count in zip(wish, counts)]
        give_least(counts, wish, active)
        train, validation, _ = counts
        start, stop = starts[c], starts[c + 1]
        result[order[start + train : start + train + validation]] = 1
        result[order[start + train + validation : stop]] = 2
    return result, [names[c] for c in small]


ONE = Fraction(1)


def _largest_remainder(size: int, wish: Sequence[Fraction], active: Sequence[int]) -> list[int]:
    counts = [max(0, math.floor(value)) for value in wish]
    while sum(counts) != size:
        step = 1 if sum(counts) < size else -1
        open_splits = [s for s in active if step > 0 or counts[s] > 0]
        split = max(open_splits, key=lambda s: (step * (wish[s] - counts[s]), -s))
        counts[split] += step
    return counts


def one_from_the_richest(counts: list[int], wish: Sequence[Fraction], active: list[int]) -> None:
    """A split without a row takes one from the split that exceeds its wish most."""
    for split in active:
        if counts[split] == 0:
            givers = [s for s in active if counts[s] > 1]
            counts[max(givers, key=lambda s: (counts[s] - wish[s], -s))] -= 1
            counts[split] = 1


def by_time(times: Times, cutoffs: Sequence[int | float | None], gap: int | float) -> Codes:
    """Rows from a cutoff on start the later split; rows within ``gap`` before it are left out."""
    result: Codes = np.zeros(len(times), dtype=np.int8)
    for split, cutoff in zip((1, 2), cutoffs):
        if cutoff is not None:
            result[~times.before(cutoff)] = split
    for cutoff in cutoffs:
        if cutoff is not None and gap:
            result[times.before(cutoff) & ~times.before(cutoff - gap)] = 3
    return result


def fold_by_order(order: Order, k: int) -> Order:
    """The fold of each row: rows are dealt in turn, so that sizes differ by one at most."""
    folds = np.empty(len(order), dtype=np.intp)
    folds[order] = np.arange(len(order)) % k
    return folds


def fold_by_class(labels: Sequence[Any], order: Order, k: int) -> Order:
    """Dealt class by class: the folds' sizes differ by one at most, and their rows of a class too."""
    names, codes = _encode(labels)
    sizes = np.bincount(codes, minlength=len(names)).tolist()
    small = [f"{names[c]!r} ({size})" for c, size in enumerate(sizes) if size < k]
    if small:
        raise SplitError(
            f"these classes have fewer rows than the {k} folds: {', '.join(small[:5])}; merge or "
            "drop them, or use fewer folds"
        )
    return fold_by_order(order[np.argsort(codes[order], kind="stable")], k)


def fold_by_group(
    groups: Sequence[Any], order_of: Callable[[Sequence[Any]], Order], k: int
) -> Order:
    """Whole groups, the largest first, each to the fold with the fewest rows."""
    names, codes = _encode(groups)
    if len(names) < k:
        raise SplitError(f"{len(names)} group(s) cannot fill {k} folds; use fewer folds")
    sizes = np.bincount(codes, minlength=len(names)).tolist()
    rows, chosen = [0] * k, [0] * len(names)
    for group in sorted(order_of(names).tolist(), key=lambda group: -sizes[group]):
        fold = min(range(k), key=rows.__getitem__)
        chosen[group] = fold
        rows[fold] += sizes[group]
    return np.asarray(chosen, dtype=np.intp)[codes]


def fold_starts(times: Times, k: int) -> list[int | float]:
    """Where each of ``k`` later periods begins, the first period before them only trains.

    Periods are of about equal numbers of rows, and rows of one time are never parted.
    """
    points = times.sorted()
    starts: list[int | float] = []
    for i in range(1, k + 1):
        start = points[i * len(points) // (k + 1)]
        if start > (starts[-1] if starts else points[0]):
            starts.append(start)
    if len(starts) < k:
        raise SplitError(
            f"the rows have too few distinct times for {k} folds after a first period; use fewer"
        )
    return starts


def _encode(values: Sequence[Any]) -> tuple[list[Any], np.ndarray[Any, np.dtype[np.intp]]]:
    """The distinct values, sorted, and each row's position among them."""
    integers = as_integers(values)
    if integers is not None:
        distinct, positions = np.unique(integers, return_inverse=True)
        return distinct.tolist(), positions.reshape(-1)
    names = sorted(set(values))
    codes = {name: code for code, name in enumerate(names)}
    return names, np.fromiter((codes[v] for v in values), dtype=np.intp, count=len(values))
