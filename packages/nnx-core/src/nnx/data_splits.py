"""Splits that are planned once, kept as data, and replayed exactly.

A plan says which rows train, validate and test, by stable sample ids. It draws
nothing from any random stream: seeded order is the SHA-256 of the seed and the
id.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from nnx.data.split_manifest import (
    FORMAT,
    MEMBERS,
    STRATEGIES,
    SplitIndices,
    SplitManifest,
    source_identity,
)
from nnx.data.split_strategies import (
    SPLITS,
    by_class,
    by_group,
    by_time,
    fold_by_class,
    fold_by_group,
    fold_by_order,
    fold_starts,
    one_from_the_richest,
    ranked,
)
from nnx.data.split_values import (
    SampleId,
    SplitError,
    Times,
    as_integers,
    as_list,
    plain_values,
    sample_ids,
)
from nnx.utils import validation as check
from nnx.utils.identity import IdentityRef

__all__ = [
    "FORMAT",
    "SPLITS",
    "STRATEGIES",
    "SplitError",
    "SplitIndices",
    "SplitManifest",
    "plan_folds",
    "plan_split",
]

_DEFAULT_PROPORTIONS = (0.7, 0.15, 0.15)


def plan_split(
    ids: Iterable[Any] | None = None,
    *,
    strategy: str,
    groups: Iterable[Any] | None = None,
    times: Iterable[Any] | None = None,
    labels: Iterable[Any] | None = None,
    proportions: Iterable[float] | None = None,
    cutoffs: Iterable[Any] | None = None,
    gap: Any = None,
    seed: int | None = None,
    insufficient: str | None = None,
    source: IdentityRef | str | None = None,
) -> SplitManifest:
    """Decide which rows train, validate and test.

    ``strategy="group"`` keeps the rows of one of ``groups`` together;
    ``"stratified"`` keeps the shares of ``labels`` in every split. Both take
    ``proportions`` (train, validation, test; 0.7, 0.15, 0.15) and ``seed``
    (drawn from the operating system and recorded when ``None``).
    ``"chronological"`` takes ``times`` and ``cutoffs=(validation_start,
    test_start)``; either may be ``None``, a row on a cutoff starts the later
    split, and rows within ``gap`` before one are excluded
    (recorded as a number, of seconds when the times are dates or datetimes).

    ``insufficient="train"`` keeps classes with fewer rows than active splits in
    training; the default, ``"raise"``, refuses them. Without ``ids`` the plan
    holds row positions and needs a ``source``. A hand-made split is
    ``SplitManifest(strategy="explicit", train=..., ...)``.

    The result depends on ids, groups, times and labels, never on row order.
    Raises :class:`SplitError`.
    """
    columns = {"groups": groups, "times": times, "labels": labels}
    options = {
        "proportions": proportions, "cutoffs": cutoffs, "gap": gap, "seed": seed,
        "insufficient": insufficient,
    }  # fmt: skip
    column = _check_arguments(strategy, {**columns, **options})
    source = source_identity(source)
    if ids is None and source.kind == "unknown":
        raise SplitError("a plan without ids holds row positions and needs source=")
    if strategy == "chronological":
        moments = Times(times)
        members = _ids(ids, len(moments), column)
        codes, parameters = _chronological(moments, cutoffs, gap)
    else:
        kinds = (str, int, float, bool)
        values = plain_values(columns[column], column, kinds)  # type: ignore[arg-type]
        members = _ids(ids, len(values), column)
        shares, parameters = _shares(proportions)
        seed = secrets.randbits(63) if seed is None else _seed(seed)
        if strategy == "group":
            codes = by_group(values, shares, functools.partial(ranked, seed=seed, what="group"))
        else:
            codes, more = _stratified(values, shares, members, seed, insufficient)
            parameters |= more
    splits = _deal(members, codes)
    if not splits["train"]:
        raise SplitError("the training split would be empty; move the cutoffs or proportions")
    return SplitManifest(
        strategy=strategy,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        excluded=splits["excluded"],
        ids="position" if ids is None else "sample",
        source=source,
        parameters=parameters,
        seed=seed,
    )


def _stratified(
    values: Sequence[Any], shares: Any, members: Sequence[SampleId], seed: int, insufficient: Any
) -> tuple[Any, dict[str, Any]]:
    """The code of each row, and what the manifest says of small classes."""
    small = _small_classes(insufficient)
    codes, only_train = by_class(
        values, shares, ranked(members, seed, "sample"),
        small_classes_train=small == "train", give_least=one_from_the_richest,
    )  # fmt: skip
    return codes, {
        "insufficient": small,
        **({"train_only_classes": only_train} if only_train else {}),
    }


def plan_folds(
    ids: Iterable[Any] | None = None,
    *,
    k: int = 5,
    n_rows: int | None = None,
    labels: Iterable[Any] | None = None,
    groups: Iterable[Any] | None = None,
    times: Iterable[Any] | None = None,
    gap: Any = None,
    seed: int = 0,
    source: IdentityRef | str | None = None,
) -> tuple[SplitManifest, ...]:
    """Decide the ``k`` folds of a cross-validation: one manifest each, validating on its fold.

    Rows are dealt in seeded order; with ``labels`` every fold has its share of each class,
    with ``groups`` the rows of a group stay together. With ``times`` the rows are cut into
    ``k + 1`` periods: each of the later ones is validated by a model of all the rows before
    it, less those within ``gap``; what comes after is excluded. Without ``ids`` the plan holds
    row positions, takes ``n_rows`` where no column says how many there are, and needs a
    ``source``. Like :func:`plan_split`, no stream of random numbers is drawn from.
    Raises :class:`SplitError`.
    """
    columns = {"labels": labels, "groups": groups, "times": times}
    given = [name for name, column in columns.items() if column is not None]
    if len(given) > 1:
        raise SplitError(f"folds are made by one of labels, groups and times, not {given}")
    by = given[0] if given else "rows"
    try:
        k = check.count("plan_folds", "k", k, at_least=1 if by == "times" else 2)
    except ValueError as error:
        raise SplitError(str(error)) from None
    if gap is not None and by != "times":
        raise SplitError("gap= belongs to times=")
    source = source_identity(source)
    if ids is None and source.kind == "unknown":
        raise SplitError("a plan without ids holds row positions and needs source=")
    known = None if ids is None else as_list(ids, "ids")
    parameters: dict[str, Any] = {"by": by, "folds": k}
    if by == "times":
        moments = Times(times)
        members = _ids(known, len(moments), by)
        span = 0 if gap is None else moments.span(gap)
        parameters["gap"] = moments.seconds(span)
        found = _periods(moments, k, span)
    else:
        column = columns.get(by)
        values = None if column is None else plain_values(column, by, (str, int, float, bool))
        members = _ids(known, _row_count(known, n_rows) if values is None else len(values), by)
        found = _dealt(members, by, values, k, _seed(seed))
    manifests = []
    for fold, codes in enumerate(found):
        splits = _deal(members, codes)
        if not splits["train"]:
            raise SplitError(f"fold {fold} has no row to train on; choose a smaller gap")
        manifests.append(
            SplitManifest(
                strategy="explicit", train=splits["train"], validation=splits["validation"],
                test=(), excluded=splits["excluded"],
                ids="position" if ids is None else "sample", source=source, parameters={**parameters, "fold": fold},
                seed=None if by == "times" else seed,
            )
        )  # fmt: skip
    return tuple(manifests)


def _dealt(
    members: Sequence[SampleId], by: str, values: Sequence[Any] | None, k: int, seed: int
) -> list[Any]:
    """The codes of each fold: 0 train, 1 validation."""
    if by == "groups":
        assert values is not None
        folds = fold_by_group(values, functools.partial(ranked, seed=seed, what="group"), k)
    else:
        if len(members) < k:
            raise SplitError(f"{len(members)} row(s) cannot fill {k} folds; use fewer folds")
        order = ranked(members, seed, "sample")
        folds = fold_by_order(order, k) if values is None else fold_by_class(values, order, k)
    return [(folds == fold).astype(np.int8) for fold in range(k)]


def _periods(times: Times, k: int, gap: int | float) -> list[Any]:
    """The codes of each fold by time: what comes after its period is excluded."""
    starts = fold_starts(times, k)
    found = []
    for start, end in zip(starts, [*starts[1:], None]):
        codes = by_time(times, (start, None), gap)
        if end is not None:
            codes[~times.before(end)] = 3
        found.append(codes)
    return found


def _row_count(ids: Sequence[Any] | None, n_rows: int | None) -> int:
    if ids is not None:
        return len(ids)
    try:
        return check.count("plan_folds", "n_rows", n_rows)
    except ValueError:
        raise SplitError(
            "say how many rows there are: ids=, n_rows=, or a column of labels, groups or times"
        ) from None


_TAKES = {
    "group": ("groups", "proportions", "seed"),
    "stratified": ("labels", "proportions", "seed", "insufficient"),
    "chronological": ("times", "cutoffs", "gap"),
}


def _check_arguments(strategy: str, given: Mapping[str, Any]) -> str:
    """The name of the column that ``strategy`` needs; arguments of others are refused."""
    if strategy == "explicit":
        raise SplitError(
            'an explicit split is not planned: SplitManifest(strategy="explicit", train=..., '
            "validation=..., test=...)"
        )
    if strategy not in _TAKES:
        raise SplitError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    takes = _TAKES[strategy]
    wrong = [name for name, value in given.items() if value is not None and name not in takes]
    if wrong:
        raise SplitError(f"a {strategy} split takes {', '.join(takes)}, not {', '.join(wrong)}")
    needed = [name for name in (takes[0], *({"cutoffs"} & set(takes))) if given[name] is None]
    if needed:
        raise SplitError(f"a {strategy} split needs {' and '.join(needed)}")
    return takes[0]


def _ids(ids: Iterable[Any] | None, n_rows: int, column: str) -> list[SampleId]:
    members: list[SampleId] = [*range(n_rows)] if ids is None else sample_ids(ids)
    if len(members) != n_rows:
        raise SplitError(f"ids has {len(members)} rows but {column} has {n_rows}")
    if not members:
        raise SplitError("there are no rows to split")
    return members


def _shares(proportions: Iterable[float] | None) -> tuple[list[Fraction], dict[str, Any]]:
    """Exact shares that sum to one, and what the plan records of them."""
    values = list(
        _DEFAULT_PROPORTIONS if proportions is None else as_list(proportions, "proportions")
    )
    try:
        values = [check.real("plan_split", "proportions", v, at_least=0) for v in values]
    except ValueError as error:
        raise SplitError(str(error)) from None
    if len(values) != 3 or abs(sum(values) - 1) > 1e-6 or not values[0]:
        raise SplitError(
            f"proportions must be three numbers (train, validation, test) that sum to 1, "
            f"train above 0, not {values}"
        )
    shares = [Fraction(repr(value)) for value in values]
    total = sum(shares)
    return [share / total for share in shares], {"proportions": values}


def _seed(seed: Any) -> int:
    try:
        return check.integer("plan_split", "seed", seed)
    except ValueError as error:
        raise SplitError(str(error)) from None


def _small_classes(insufficient: str | None) -> str:
    if insufficient not in (None, "raise", "train"):
        raise SplitError(f'insufficient must be "raise" or "train", not {insufficient!r}')
    return insufficient or "raise"


def _chronological(times: Times, cutoffs: Any, gap: Any) -> tuple[Any, dict[str, Any]]:
    starts = as_list(cutoffs, "cutoffs")
    if len(starts) != 2 or starts == [None, None]:
        raise SplitError(
            f"cutoffs must be (validation_start, test_start), at most one of them None, "
            f"not {cutoffs!r}"
        )
    points = [
        None if start is None else times.point(start, f"cutoffs[{i}]")
        for i, start in enumerate(starts)
    ]
    if None not in points and points[0] > points[1]:  # type: ignore[operator]
        raise SplitError(f"validation_start {starts[0]} comes after test_start {starts[1]}")
    span = 0 if gap is None else times.span(gap)
    parameters: dict[str, Any] = {
        "cutoffs": [None if point is None else times.text(point) for point in points],
        "gap": times.seconds(span),
    }
    return by_time(times, points, span), parameters


def _deal(members: Sequence[SampleId], codes: Any) -> dict[str, tuple[SampleId, ...]]:
    """The members of each code, sorted."""
    ids = as_integers(members)
    if ids is not None:  # far quicker than sorting Python integers
        return {n: tuple(np.sort(ids[codes == c]).tolist()) for c, n in enumerate(MEMBERS)}
    return {
        name: tuple(sorted(members[row] for row in (codes == code).nonzero()[0].tolist()))
        for code, name in enumerate(MEMBERS)
    }
