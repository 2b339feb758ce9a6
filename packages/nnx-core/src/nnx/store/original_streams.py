"""Random streams in the spelling of the original NNx, which bundles keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Places where a loader keeps a generator, in the order of the original's list.
_PLACES = ("train.generator", "train.sampler.generator", "train.batch_sampler.generator")


def is_original(state: Mapping[str, Any]) -> bool:
    return "process" not in state and "torch" in state


def from_original(state: Mapping[str, Any]) -> dict[str, Any]:
    """The streams as :mod:`nnx.engine.rng` restores them."""
    import torch

    version, words, gauss = state["python"]
    numpy = state["numpy"]
    keys = numpy["state"]
    process = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (
            numpy["bit_generator"],
            torch.tensor(keys, dtype=torch.int64),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached_gaussian"],
        ),
        "torch": state["torch"],
    }
    process.update({k: state[k] for k in ("cuda", "mps") if state.get(k) is not None})
    if "loaders" in state:  # written here: more is known of them
        return {"process": process, "loaders": state["loaders"], "workers": state["workers"]}
    generators = zip(_PLACES, state.get("train_generators") or ())
    loaders = {place: {"seed": None, "state": found} for place, found in generators}
    return {"process": process, "loaders": loaders}


def to_original(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse; what the original has no place for is beside it."""
    process = state["process"]
    version, words, gauss = process["python"]
    name, keys, position, has_gauss, cached = process["numpy"]
    loaders = state.get("loaders") or {}
    places = [p for p in _PLACES if p in loaders] or [p for p in loaders if p.startswith("train.")]
    plain: dict[str, Any] = {
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": {
            "bit_generator": name,
            "state": keys.tolist(),
            "position": position,
            "has_gauss": has_gauss,
            "cached_gaussian": cached,
        },
        "torch": process["torch"],
        "cuda": process.get("cuda"),
        "mps": process.get("mps"),
        "train_generators": [loaders[place]["state"] for place in places],
    }
    if loaders or state.get("workers"):
        plain.update(loaders=loaders, workers=state.get("workers") or {})
    return plain
