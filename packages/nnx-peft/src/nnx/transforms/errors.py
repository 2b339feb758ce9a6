"""Everything that is wrong with a recipe, in one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nnx.errors import NNxError


class Problem(NamedTuple):
    """One thing wrong: in which operation (from 0, ``None``: the recipe), where, what."""

    operation: int | None
    target: str | None
    message: str

    def __str__(self) -> str:
        where = "" if self.operation is None else f"operation {self.operation}: "
        return f"{where}{f'{self.target!r}: ' if self.target else ''}{self.message}"


class RecipeError(ValueError, NNxError):
    """A recipe that does not fit its model. ``problems`` holds each reason; nothing was changed."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "the recipe was not applied:\n" + "\n".join(f"- {p}" for p in self.problems)
        )
