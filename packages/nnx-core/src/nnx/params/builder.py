"""The mechanism that all builders share.

A builder holds the fields that its setters wrote and nothing else; ``build()``
hands them to the params class, whose defaults fill the rest and whose checks
apply. Setters return the builder, and the last call wins. A setter that writes
a group of fields replaces the whole group, so a variant never inherits a knob
from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from nnx.params.base import Params, field_names
from nnx.utils import validation as check

P = TypeVar("P", bound=Params)
B = TypeVar("B", bound="Builder")


class Builder(Generic[P]):
    """The mechanism: a dictionary of written fields."""

    _builds: ClassVar[type[Any]]
    # A field that must have been written -> the setters that write it.
    _needs: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def build(self) -> P:
        """The params value; the builder stays usable and later setters never touch it."""
        missing = {
            setter: None for field, setter in self._needs.items() if field not in self._fields
        }
        if missing:
            raise ValueError(
                f"{type(self).__name__} cannot build yet: call {', '.join(missing)} before .build()"
            )
        return self._builds(**self._fields)

    def copy(self: B) -> B:
        """An independent branch of this builder, complete or not."""
        branch = type(self)()
        branch._fields = {name: _owned(name, value) for name, value in self._fields.items()}
        return branch

    @classmethod
    def from_params(cls: type[B], params: P) -> B:
        """A builder that holds ``params``: building it again gives an equal value.

        Takes exactly the class it builds; a subclass may carry fields that the
        setters would not keep consistent, so it is a ``TypeError``.
        """
        if type(params) is not cls._builds:
            raise TypeError(
                f"{cls.__name__}.from_params takes a {cls._builds.__name__}, "
                f"not a {type(params).__name__}"
            )
        builder = cls()
        builder._fields = {
            name: _owned(name, getattr(params, name)) for name in field_names(cls._builds)
        }
        return builder

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={check.show(value)}" for name, value in self._fields.items())
        return f"{type(self).__name__}({fields})"

    def _set(self: B, **values: Any) -> B:
        self._fields.update({name: _owned(name, value) for name, value in values.items()})
        return self

    def _replace(self: B, group: Iterable[str], **values: Any) -> B:
        """Write ``values`` and drop what else of ``group`` was written."""
        for name in group:
            self._fields.pop(name, None)
        return self._set(**values)


# Shared by identity even when they are plain lists of batches.
_SHARED = ("train_loader", "val_loader")


def _owned(name: str, value: Any) -> Any:
    """Containers are copied one level deep; everything else is shared."""
    if name in _SHARED:
        return value
    if isinstance(value, list):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value
