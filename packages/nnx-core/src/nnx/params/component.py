"""What a component says about itself: its name, its schema version, whether it must be there."""

from __future__ import annotations

from dataclasses import dataclass


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
        name: object = self.name
        version: object = self.version
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"ComponentSpec.name must be a non-empty string, not {self.name!r}")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(
                f"ComponentSpec.version of {self.name!r} must be an integer >= 1, "
                f"not {self.version!r}"
            )
        for field in ("required", "numbered"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(
                    f"ComponentSpec.{field} of {self.name!r} must be True or False, "
                    f"not {getattr(self, field)!r}"
                )
