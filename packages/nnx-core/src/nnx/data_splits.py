"""Splits that are planned once, kept as data, and replayed exactly.

A plan says which rows train, validate and test, by stable sample ids. It draws
nothing from any random stream: seeded order is the SHA-256 of the seed and the
id.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from nnx.data.split_strategies import SPLITS, by_class, by_group, by_time
from nnx.data.split_values import (
    SampleId,
    SplitError,
    Times,
    as_integers,
    as_list,
    plain_values,
    repeated,
    sample_ids,
    some,
)
from nnx.utils import validation as check
from nnx.utils.files import atomic_write
from nnx.utils.identity import IdentityRef
from nnx.utils.jsonlike import freeze_mapping, thaw

__all__ = [
    "FORMAT",
    "SPLITS",
    "STRATEGIES",
    "SplitError",
    "SplitIndices",
    "SplitManifest",
    "plan_split",
]

FORMAT = "nnx.split/1"
STRATEGIES = ("group", "chronological", "stratified", "explicit")
_MEMBERS = (*SPLITS, "excluded")
_DEFAULT_PROPORTIONS = (0.7, 0.15, 0.15)


@dataclass(frozen=True, slots=True)
class SplitIndices:
    """Row positions of each split, for ``torch.utils.data.Subset`` or ``iloc``.

    The rows of a split are in the order of their ids, whatever order the
    source has them in.
    """

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitManifest:
    """Which samples train, validate and test.

    Members are sample ids (``str`` or ``int``, one type), stored sorted and
    disjoint. ``ids`` is ``"sample"``, or ``"position"`` when the plan was made
    without ids and its members are row positions. ``source`` names the data the
    plan was made from; replaying asks for the same name again.
    """

    strategy: str
    train: tuple[SampleId, ...]
    validation: tuple[SampleId, ...]
    test: tuple[SampleId, ...]
    excluded: tuple[SampleId, ...] = ()
    ids: str = "sample"
    source: IdentityRef = field(default_factory=IdentityRef.unknown)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.strategy not in STRATEGIES:
            raise SplitError(
                f"strategy must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}"
            )
        if self.ids not in ("sample", "position"):
            raise SplitError(f'ids must be "sample" or "position", not {self.ids!r}')
        for name in _MEMBERS:
            put(name, tuple(sorted(plain_values(getattr(self, name), name, (str, int)))))
        members = sorted(self._all()) if self._one_type() else []
        if any(map(eq, members, members[1:])):
            raise SplitError(
                f"a sample belongs to one split once; repeated: {some(repeated(members))}"
            )
        if self.ids == "position" and members and members[0] < 0:  # type: ignore[operator]
            raise SplitError(f"a row position cannot be negative: {members[0]}")
        put("source", _source(self.source))
        try:
            put("parameters", freeze_mapping(self.parameters, "SplitManifest.parameters"))
            if self.seed is not None:
                put("seed", check.integer("SplitManifest", "seed", self.seed))
        except ValueError as error:
            raise SplitError(str(error)) from None

    def _all(self) -> Iterable[SampleId]:
        return chain(self.train, self.validation, self.test, self.excluded)

    def _one_type(self) -> bool:
        kinds = {type(members[0]) for name in _MEMBERS if (members := getattr(self, name))}
        if len(kinds) > 1:
            raise SplitError("the ids of a plan have one type, but these mix int and str")
        if self.ids == "position" and kinds == {str}:
            raise SplitError("row positions are integers, but these are strings")
        return True

    @property
    def n_rows(self) -> int:
        """How many rows the plan covers, the excluded ones too."""
        return sum(len(getattr(self, name)) for name in _MEMBERS)

    # -- replay ----------------------------------------------------------------------

    def resolve(
        self, ids: Iterable[Any], *, source: IdentityRef | str | None = None
    ) -> SplitIndices:
        """Where this plan's samples are among ``ids`` (of a positional plan: ``range(n)``).

        Raises :class:`SplitError` for duplicate, missing or unexpected ids, ids of
        another type, an empty training split, and a ``source`` other than the
        recorded one. Excluded samples of a plan by sample ids may be absent.
        """
        self._check_source(_source(source))
        if not self.train:
            raise SplitError("the training split of this plan is empty")
        given = plain_values(ids, "ids", (str, int))
        planned = type(self.train[0])
        if given and type(given[0]) is not planned:
            raise SplitError(
                f"the plan has {planned.__name__} ids, but the source has "
                f"{type(given[0]).__name__} ids; convert the id column"
            )
        where = dict(zip(given, range(len(given))))
        if len(where) != len(given):
            raise SplitError(f"the source repeats ids: {some(repeated(given))}")
        found: dict[str, tuple[int, ...]] = {}
        for name in _MEMBERS:
            members = getattr(self, name)
            try:
                found[name] = tuple(map(where.__getitem__, members))
            except KeyError:
                missing = [sample for sample in members if sample not in where]
                if name == "excluded" and self.ids == "sample":
                    found[name] = tuple(where[sample] for sample in members if sample in where)
                    continue
                raise SplitError(
                    f"the source lacks {len(missing)} planned id(s): {some(missing)}"
                ) from None
        if sum(map(len, found.values())) != len(given):
            extra = set(given).difference(self._all())
            raise SplitError(
                f"the source has {len(extra)} id(s) that the plan does not know: "
                f"{some(sorted(extra))}; plan the split again"
            )
        return SplitIndices(**found)

    def _check_source(self, source: IdentityRef) -> None:
        if self.source.kind == "unknown":
            if self.ids == "position":
                raise SplitError(
                    "this plan holds row positions and no source identity, so it cannot be "
                    "matched with any data; plan with ids, or with source="
                )
            if source.kind != "unknown":
                raise SplitError(
                    f"this plan records no source identity, so {source.value!r} cannot be "
                    f"checked against it; plan with source= or pass none"
                )
        elif source != self.source:
            given = "none was given" if source.kind == "unknown" else f"got {source.value!r}"
            raise SplitError(
                f"this plan was made from the {self.source.kind} source "
                f"{self.source.value!r}, but {given}"
            )

    # -- identity and serialization --------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole plan as JSON-like data."""
        return {
            "format": FORMAT,
            "strategy": self.strategy,
            "ids": self.ids,
            **{name: list(getattr(self, name)) for name in _MEMBERS},
            "source": self.source.state(),
            "parameters": thaw(self.parameters),
            "seed": self.seed,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> SplitManifest:
        """Rebuild from :meth:`state`; anything that does not belong there is refused."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise SplitError(f"this is not a {FORMAT} document (format: {found!r})")
        fields = {name: value for name, value in state.items() if name != "format"}
        known = set(SplitManifest.__dataclass_fields__)
        required = {"strategy", *SPLITS}
        if fields.keys() - known or required - fields.keys():
            problem = some(sorted((fields.keys() - known) | (required - fields.keys())))
            raise SplitError(f"a {FORMAT} document has unknown or missing keys: {problem}")
        try:
            source = IdentityRef.from_state(fields.pop("source", {"kind": "unknown"}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SplitError(f"the source of a {FORMAT} document is unreadable: {error}") from None
        return SplitManifest(source=source, **fields)

    def canonical_bytes(self) -> bytes:
        """The one spelling of this plan: UTF-8 JSON, sorted keys, no spaces."""
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "surrogatepass")

    def digest(self) -> str:
        """SHA-256 (hex) over members, strategy, parameters, seed and source."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()

    def identity(self) -> IdentityRef:
        """The digest as a verified identity."""
        return IdentityRef("digest", f"sha256:{self.digest()}")

    def to_json(self) -> str:
        return json.dumps(self.state(), indent=1)

    @staticmethod
    def from_json(text: str) -> SplitManifest:
        try:
            state = json.loads(text)
        except json.JSONDecodeError as error:
            raise SplitError(f"a split manifest must be JSON: {error}") from None
        return SplitManifest.from_state(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the old or the new file survives."""
        with atomic_write(path) as stream:
            stream.write(self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SplitManifest:
        """Read what :meth:`save` wrote."""
        return SplitManifest.from_json(Path(path).read_text(encoding="utf-8"))


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
    split, and rows within ``gap`` before one are excluded.

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
    source = _source(source)
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
            codes = by_group(values, shares, seed)
        else:
            small = _small_classes(insufficient)
            codes, only_train = by_class(
                members, values, shares, seed, small_classes_train=small == "train"
            )
            parameters |= {"insufficient": small, "train_only_classes": only_train}
    splits = _deal(members, codes)
    if not splits["train"]:
        raise SplitError("the training split would be empty; move the cutoffs or proportions")
    return SplitManifest(
        strategy=strategy,
        **splits,
        ids="position" if ids is None else "sample",
        source=source,
        parameters=parameters,
        seed=seed,
    )


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


def _source(source: Any) -> IdentityRef:
    try:
        return IdentityRef.of(source)
    except (ValueError, TypeError) as error:
        raise SplitError(str(error)) from None


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
    span = None if gap is None else times.span(gap)
    parameters: dict[str, Any] = {
        "times": times.kind,
        "cutoffs": [None if point is None else times.text(point) for point in points],
    }
    if span is not None:
        unit = {"number": "gap", "date": "gap_days"}.get(times.kind, "gap_nanoseconds")
        parameters[unit] = span
    return by_time(times, points, span), parameters


def _deal(members: Sequence[SampleId], codes: Any) -> dict[str, tuple[SampleId, ...]]:
    """The members of each code, sorted."""
    ids = as_integers(members)
    if ids is not None:  # far quicker than sorting Python integers
        return {n: tuple(np.sort(ids[codes == c]).tolist()) for c, n in enumerate(_MEMBERS)}
    return {
        name: tuple(sorted(members[row] for row in (codes == code).nonzero()[0].tolist()))
        for code, name in enumerate(_MEMBERS)
    }
