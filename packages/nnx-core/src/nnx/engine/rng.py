"""The random streams of a run: the process's own and its loaders' generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnx import seeding

# Where a loader keeps a generator of its own, as attribute paths.
_GENERATOR_PATHS = (
    ("generator",),
    ("sampler", "generator"),
    ("sampler", "sampler", "generator"),
    ("batch_sampler", "generator"),
    ("batch_sampler", "sampler", "generator"),
    ("dataset", "generator"),
)


def loader_generators(loaders: Mapping[str, Any]) -> dict[str, torch.Generator]:
    """Each distinct ``torch.Generator`` that ``loaders`` own, by role and path.

    A generator reached by several paths is named by the first of them.
    """
    found: dict[str, torch.Generator] = {}
    seen: set[int] = set()
    for role, loader in loaders.items():
        for path in _GENERATOR_PATHS:
            value = loader
            for name in path:
                value = getattr(value, name, None)
                if value is None:
                    break
            if isinstance(value, torch.Generator) and id(value) not in seen:
                seen.add(id(value))
                found[".".join((role, *path))] = value
    return found


def capture(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every random stream: process-wide ones and the loaders' generators."""
    generators = {
        name: {
            "seed": None if _is_implicit(name, loaders) else generator.initial_seed(),
            "state": generator.get_state(),
        }
        for name, generator in loader_generators(loaders).items()
    }
    return {"process": seeding.rng_state(), "loaders": generators}


def restore(state: Mapping[str, Any], loaders: Mapping[str, Any]) -> tuple[str, ...]:
    """Set every stream to a captured state; return the generators that had no match.

    A loader's generator is matched by its place in the loader and by its seed: one
    that was rebuilt with another seed is another stream and is left alone. One that
    its sampler made for itself, from whatever the global stream held, matches always.
    """
    generators = loader_generators(loaders)
    unmatched = []
    for name, saved in state.get("loaders", {}).items():
        generator = generators.get(name)
        if generator is None or saved["seed"] not in (None, generator.initial_seed()):
            unmatched.append(name)
        else:
            generator.set_state(saved["state"].cpu())
    seeding.set_rng_state(state["process"])
    return tuple(unmatched)


def _is_implicit(name: str, loaders: Mapping[str, Any]) -> bool:
    """Whether the caller gave no generator and a torchdata sampler seeded one itself."""
    role, _, path = name.partition(".")
    loader = loaders[role]
    sampler = type(getattr(loader, "sampler", None)).__module__
    return (
        path == "sampler.generator"
        and getattr(loader, "generator", None) is None
        and sampler.partition(".")[0] == "torchdata"
    )
