"""What differs between two bundles, from their records alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nnx.bundles.layout import MODEL, TRAINING
from nnx.bundles.reading import inspect_bundle
from nnx.utils.disk import StrPath

_FIELDS = (
    "capability", "source_run_id", "source_checkpoint", "epoch", "model", "model_params",
    "net_params", "transforms", "components", "calibrators",
)  # fmt: skip


def diff_bundles(left: StrPath, right: StrPath) -> dict[str, tuple[Any, Any]]:
    """Every field in which two bundles differ: ``{path: (left, right)}``; empty when none.

    Weights and training state are compared by the digests of their files, whose
    generation is part of them: equal tensors of two exports have unequal files, so
    ``weights`` and ``training_state`` compare the digest of the tensors' bytes.
    """
    one, other = inspect_bundle(left), inspect_bundle(right)
    found: dict[str, tuple[Any, Any]] = {}
    for name in _FIELDS:
        for path, a, b in _differences(name, getattr(one, name), getattr(other, name)):
            found[path] = (a, b)
    for name, what in ((MODEL, "weights"), (TRAINING, "training_state")):
        a, b = (_content(info, name) for info in (one, other))
        if a != b:
            found[what] = (a, b)
    return found


def _content(info: Any, name: str) -> str | None:
    """The digest of a payload's tensors: names, dtypes, shapes and bytes, not their order."""
    import os

    from nnx.bundles.reading import tensors_digest

    if name not in info.payloads:
        return None
    return tensors_digest(os.path.join(info.path, f"g-{info.generation}", name))


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}, key=str):
            yield from _differences(f"{path}.{key}", a.get(key), b.get(key))
    elif a != b or type(a) is not type(b):
        yield path, a, b
