"""What a component says about itself: its name, its schema version, whether it must be there."""

from __future__ import annotations

from dataclasses import dataclass

from nnx.utils import validation as check


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """The identity under which a component's state is saved.

    ``name`` is unique in a run. ``version`` is the schema version of the state
    (an integer from 1); a checkpoint of a newer version than the component's is
    refused. ``required`` components must be present on both sides of a resume.
    ``numbered`` lets several components share a default name: they become
    ``name``, ``name.2``, ``name.3``, … in the order of registration.
    """

    name: str
    version: int = 1
    required: bool = True
    numbered: bool = False

    def __post_init__(self) -> None:
        owner = "ComponentSpec"
        check.name(owner, "name", self.name)
        check.count(owner, "version", self.version)
        for field in ("required", "numbered"):
            check.flag(owner, field, getattr(self, field))
