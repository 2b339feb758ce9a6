"""A split as data: what it holds, where it came from, and how it is replayed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import eq
from pathlib import Path
from typing import Any

from nnx.data.split_strategies import SPLITS
from nnx.data.split_values import SampleId, SplitError, plain_values, repeated, some
from nnx.utils import validation as check
from nnx.utils.files import atomic_write
from nnx.utils.identity import IdentityRef
from nnx.utils.jsonlike import freeze_mapping, thaw

FORMAT = "nnx.split/1"
STRATEGIES = ("group", "chronological", "stratified", "explicit")
MEMBERS = (*SPLITS, "excluded")


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
    # Read from a document of an earlier form, which spells the source in its own way.
    _earlier: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.strategy not in STRATEGIES:
            raise SplitError(
                f"strategy must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}"
            )
        if self.ids not in ("sample", "position"):
            raise SplitError(f'ids must be "sample" or "position", not {self.ids!r}')
        for name in MEMBERS:
            put(name, tuple(sorted(plain_values(getattr(self, name), name, (str, int)))))
        members = sorted(self._all()) if self._one_type() else []
        if any(map(eq, members, members[1:])):
            raise SplitError(
                f"a sample belongs to one split once; repeated: {some(repeated(members))}"
            )
        if self.ids == "position" and members and members[0] < 0:  # type: ignore[operator]
            raise SplitError(f"a row position cannot be negative: {members[0]}")
        put("source", source_identity(self.source))
        try:
            put("parameters", freeze_mapping(self.parameters, "SplitManifest.parameters"))
            if self.seed is not None:
                put("seed", check.integer("SplitManifest", "seed", self.seed))
        except ValueError as error:
            raise SplitError(str(error)) from None

    def _all(self) -> Iterable[SampleId]:
        return chain(self.train, self.validation, self.test, self.excluded)

    def _one_type(self) -> bool:
        kinds = {type(members[0]) for name in MEMBERS if (members := getattr(self, name))}
        if len(kinds) > 1:
            raise SplitError("the ids of a plan have one type, but these mix int and str")
        if self.ids == "position" and kinds == {str}:
            raise SplitError("row positions are integers, but these are strings")
        return True

    @property
    def n_rows(self) -> int:
        """How many rows the plan covers, the excluded ones too."""
        return sum(len(getattr(self, name)) for name in MEMBERS)

    # -- replay ----------------------------------------------------------------------

    def resolve(
        self, ids: Iterable[Any], *, source: IdentityRef | str | None = None
    ) -> SplitIndices:
        """Where this plan's samples are among ``ids`` (of a positional plan: ``range(n)``).

        Raises :class:`SplitError` for duplicate, missing or unexpected ids, ids of
        another type, an empty training split, and a ``source`` other than the
        recorded one. Excluded samples of a plan by sample ids may be absent.
        """
        self._checksource_identity(source_identity(source))
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
        for name in MEMBERS:
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

    def _checksource_identity(self, source: IdentityRef) -> None:
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
            **{name: list(getattr(self, name)) for name in MEMBERS},
            "source": _earlier_source(self.source) if self._earlier else self.source.state(),
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
        known = {"strategy", "ids", *MEMBERS, "source", "parameters", "seed"}
        required = {"strategy", *SPLITS}
        if fields.keys() - known or required - fields.keys():
            problem = some(sorted((fields.keys() - known) | (required - fields.keys())))
            raise SplitError(f"a {FORMAT} document has unknown or missing keys: {problem}")
        stored = fields.pop("source", IdentityRef.unknown().state())
        try:
            source = IdentityRef.from_state(stored)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SplitError(f"the source of a {FORMAT} document is unreadable: {error}") from None
        return SplitManifest(source=source, **fields, _earlier="identity" not in stored)

    def canonical_bytes(self) -> bytes:
        """The one spelling of this plan: UTF-8 JSON, sorted keys, no spaces."""
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "surrogatepass")

    def digest(self) -> str:
        """``"sha256:<hex>"`` over members, strategy, parameters, seed and source."""
        return f"sha256:{hashlib.sha256(self.canonical_bytes()).hexdigest()}"

    def identity(self) -> IdentityRef:
        """The digest as a verified identity."""
        return IdentityRef("digest", self.digest())

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


def _earlier_source(source: IdentityRef) -> dict[str, Any]:
    """The earlier spelling, so that the digest of a stored plan stays what it was."""
    value = {} if source.value is None else {"value": source.value}
    return {"kind": source.kind, **value}


def source_identity(source: Any) -> IdentityRef:
    try:
        return IdentityRef.of(source)
    except (ValueError, TypeError) as error:
        raise SplitError(str(error)) from None
