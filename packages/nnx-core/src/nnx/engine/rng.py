"""The random streams of a run: the process's own and its loaders' generators."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from nnx import seeding

# Where a loader keeps a generator of its own comes first: a generator that is reached by
# several paths is named by the first of them.
_FIRST = ("generator", "sampler", "batch_sampler", "dataset")
# What holds no generator of a loader, and is not looked into.
_CLOSED = (
    str, bytes, int, float, complex, type, type(None), ModuleType, BuiltinFunctionType,
    torch.Tensor, torch.nn.Module, np.ndarray, np.generic,
)  # fmt: skip
# A longer sequence holds data, not parts, unless it is one of datasets.
_PARTS, _OBJECTS = 64, 4096

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def parts_of(loaders: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that ``loaders`` are made of, outermost first, by role and path.

    Samplers, datasets, wrappers of either, the functions they call: each once.
    """
    waiting: deque[tuple[str, Any]] = deque(loaders.items())
    seen: set[int] = set()
    while waiting and len(seen) < _OBJECTS:
        name, value = waiting.popleft()
        if isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if not isinstance(value, _GENERATORS):
            waiting.extend((f"{name}.{key}", part) for key, part in _inside(value))


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple, deque)):
        few = len(value) <= _PARTS or isinstance(value[0], Dataset)
        return enumerate(value) if few else ()
    if isinstance(value, dict):
        return value.items() if len(value) <= _PARTS else ()
    if isinstance(value, MethodType):
        return (("self", value.__self__),)
    if isinstance(value, partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        return [(name, cell.cell_contents) for name, cell in cells if not _is_empty(cell)]
    held = {k: v for k, v in _attributes(value) if k != "_iterator"}
    ordered = {name: held.pop(name) for name in _FIRST if name in held}
    return (ordered | held).items()


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds in its dictionary and in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # never set
                    continue


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def loader_generators(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Each distinct generator that ``loaders`` own, by role and path.

    Those of torch, NumPy and Python, however deep below wrappers.
    """
    return {name: part for name, part in parts_of(loaders) if isinstance(part, _GENERATORS)}


def capture(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every random stream: process-wide ones and the loaders' generators."""
    parts = list(parts_of(loaders))
    generators = {
        name: {
            "seed": None if _is_implicit(name, loaders) else _seed(generator),
            "state": _get_state(generator),
        }
        for name, generator in parts
        if isinstance(generator, _GENERATORS)
    }
    return {
        "process": seeding.rng_state(),
        "loaders": generators,
        "workers": {name: part._iterator is not None for name, part in parts if keeps(part)},
    }


def restore(state: Mapping[str, Any], loaders: Mapping[str, Any]) -> tuple[str, ...]:
    """Set every stream to a captured state; return the parts that had no match.

    A loader's generator is matched by its place in the loader and by its seed, then by
    its seed alone: one that was rebuilt with another seed is another stream and is left
    alone. One that its sampler made for itself, from whatever the global stream held,
    and one whose seed cannot be asked for match by their place.
    """
    parts = list(parts_of(loaders))
    generators = {name: part for name, part in parts if isinstance(part, _GENERATORS)}
    waiting = dict(state.get("loaders", {}))
    for by_place in (True, False):
        for name, saved in list(waiting.items()):
            match = _match(name, saved, generators, by_place=by_place)
            if match is not None:
                _set_state(generators.pop(match), saved["state"])
                del waiting[name]
    kept = {name: part for name, part in parts if keeps(part)}
    running = state.get("workers", dict.fromkeys(kept))
    for name in running.keys() & kept.keys():
        _set_running(kept[name], running[name])
    seeding.set_rng_state(state["process"])
    return (*waiting, *sorted(running.keys() ^ kept.keys()))


def _match(
    name: str, saved: Mapping[str, Any], generators: Mapping[str, Any], *, by_place: bool
) -> str | None:
    """The generator that continues a saved one."""
    seed, kind = saved["seed"], type(saved["state"])
    if by_place:
        same = name in generators and seed in (None, _seed(generators[name]))
        return name if same and type(_get_state(generators[name])) is kind else None
    if seed is None:
        return None
    role = name.partition(".")[0]
    alike = [other for other, generator in generators.items() if _seed(generator) == seed]
    return next(iter(sorted(alike, key=lambda other: other.partition(".")[0] != role)), None)


# Generators of three libraries -------------------------------------------------------------


def _seed(generator: Any) -> int | None:
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def _get_state(generator: Any) -> Any:
    """A generator's state as plain data."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return list(_plain(generator.getstate()))
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.bit_generator.state = _arrays(state)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, np.ndarray)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """NumPy's own form of a state: words of 64 bits, of 32 in the Mersenne twister."""
    if isinstance(value, Mapping):
        return {key: _arrays(part) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    return np.array(value, np.uint32 if len(value) == 624 else np.uint64)


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


# Persistent workers ------------------------------------------------------------------------


def keeps(part: Any) -> bool:
    """Whether this is a ``DataLoader`` whose workers go on from epoch to epoch."""
    return (
        isinstance(part, DataLoader)
        and type(part).__iter__ is DataLoader.__iter__
        and part.persistent_workers
        and part.num_workers > 0
    )


def _set_running(loader: Any, running: bool | None) -> None:
    """Start or stop a loader's workers, as they were when the streams were captured."""
    if running is None:  # it was not noted
        return
    if not running:
        loader._iterator = None
    elif loader._iterator is None:
        loader._iterator = _NotYetStarted()


class _NotYetStarted:
    """In place of the workers that an uninterrupted run would have by now.

    Their start draws a seed, once; a loader with workers is only reset, which draws
    none. The first pass after a resume starts them without that draw.
    """

    def _reset(self, loader: Any) -> None:
        own, loader.generator = loader.generator, torch.Generator()
        try:
            loader._iterator = loader._get_iterator()
        finally:
            loader.generator = own
