"""Names of data: declared by someone, or a digest of the bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("declared", "digest", "unknown")


@dataclass(frozen=True, slots=True)
class IdentityRef:
    """Which data something was made from.

    ``kind`` is ``"declared"`` (an id that someone supplied: recorded, never
    called verified), ``"digest"`` (``"sha256:<hex>"`` of the bytes) or
    ``"unknown"`` (no ``value``).
    """

    kind: str
    value: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"IdentityRef.kind must be one of {', '.join(KINDS)}, not {self.kind!r}"
            )
        if self.kind == "unknown":
            if self.value is not None:
                raise ValueError("an unknown IdentityRef has no value")
        elif not isinstance(self.value, str) or not self.value:
            raise ValueError(
                f"a {self.kind} IdentityRef needs a non-empty string value, not {self.value!r}"
            )

    @classmethod
    def declared(cls, value: str) -> IdentityRef:
        """A name that the caller vouches for (a ``data_id``, a dataset's name)."""
        return cls("declared", value)

    @classmethod
    def unknown(cls) -> IdentityRef:
        """Nothing is known."""
        return cls("unknown")

    @classmethod
    def of(cls, value: IdentityRef | str | None) -> IdentityRef:
        """``value`` as a reference: a string is declared, ``None`` is unknown."""
        if isinstance(value, IdentityRef):
            return value
        if value is None:
            return cls.unknown()
        if isinstance(value, str):
            return cls.declared(value)
        raise TypeError(
            f"an identity is an IdentityRef, a string or None, not {type(value).__name__}"
        )

    @property
    def verified(self) -> bool:
        """Whether the value was computed from the bytes."""
        return self.kind == "digest"

    def state(self) -> dict[str, Any]:
        """``{"identity": kind, "value": value}``."""
        return {"identity": self.kind, "value": self.value}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> IdentityRef:
        """Rebuild from :meth:`state`; an earlier form calls the kind ``kind``."""
        kind = state["identity"] if "identity" in state else state["kind"]
        return IdentityRef(kind, state.get("value"))


def hash_bytes(data: bytes) -> IdentityRef:
    """The digest of ``data``."""
    return IdentityRef("digest", f"sha256:{hashlib.sha256(data).hexdigest()}")


def hash_file(path: str | os.PathLike[str], *, chunk_size: int = 1048576) -> IdentityRef:
    """The digest of a file's bytes, read ``chunk_size`` bytes at a time."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer >= 1, not {chunk_size!r}")
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(chunk_size):
            digest.update(chunk)
    return IdentityRef("digest", f"sha256:{digest.hexdigest()}")
