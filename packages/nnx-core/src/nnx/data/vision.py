"""Any torchvision-style dataset class as loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from nnx.data.base import (
    BatchSizes,
    NNDatasetBase,
    checked_batch_sizes,
    checked_proportions,
    random_parts,
)
from nnx.preprocessing import SplitView, describe_transform
from nnx.seeding import isolated_rng
from nnx.utils import validation as check

_OWNER = "NNDataset"


@dataclass
class NNDataset(NNDatasetBase):
    """A dataset class with a training and a test part, as three loaders.

    ``ds_class`` is called like torchvision's classes, with those of ``root``,
    ``train`` (or ``split="train"`` / ``"test"``), ``download`` and ``transform``
    that it takes. ``val_proportion`` of the training part becomes the validation
    split, drawn by ``random_split`` from ``seed`` or the global torch stream; the
    test part is left whole.

    ``transform`` is the class's own. ``train_transform`` and ``eval_transform``
    come after it, on the inputs of one split only (see
    :class:`~nnx.preprocessing.SplitView`).
    """

    ds_class: Callable[..., Dataset[Any]]
    root_dir: str = "./data"
    transform: Callable[..., Any] | None = None
    n_workers: int = 0
    batch_sizes: BatchSizes = (None, None, None)
    val_proportion: float = 0.15
    seed: int | None = None
    download: bool = True
    train_transform: Callable[..., Any] | None = None
    eval_transform: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.batch_sizes = checked_batch_sizes(_OWNER, self.batch_sizes)
        proportions = checked_proportions(_OWNER, val_proportion=self.val_proportion)
        self.n_workers = check.count(_OWNER, "n_workers", self.n_workers, at_least=0)
        if self.seed is not None:
            self.seed = check.integer(_OWNER, "seed", self.seed)
        for name in ("transform", "train_transform", "eval_transform"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                check.refuse(_OWNER, name, value, "callable or None")
        base, test = self._open(train=True), self._open(train=False)
        if not len(base):  # type: ignore[arg-type]
            raise ValueError(f"{_OWNER}: the training part of {_name(self.ds_class)} is empty")
        self.name = _name(self.ds_class)
        self.input_dim, self.output_dim = _dimensions(base)
        train, validation = random_parts(base, proportions, self.seed)
        splits: list[Any] = [train, validation, test]
        if self._transforms():
            rows = [train.indices, validation.indices, range(len(test))]  # type: ignore[attr-defined,arg-type]
            after = [self.train_transform, self.eval_transform, self.eval_transform]
            splits = [
                SplitView(part, indices, transform=transform)
                for part, indices, transform in zip((base, base, test), rows, after)
            ]
        self._publish(splits, self.batch_sizes, n_workers=self.n_workers)

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self._transforms()}

    def _transforms(self) -> dict[str, Any]:
        given = {"train_transform": self.train_transform, "eval_transform": self.eval_transform}
        return {k: describe_transform(v) for k, v in given.items() if v is not None}

    def _open(self, *, train: bool) -> Dataset[Any]:
        parameters = inspect.signature(self.ds_class).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        part: dict[str, Any] = {"train": train}
        if "train" not in parameters and not takes_all and "split" in parameters:
            part = {"split": "train" if train else "test"}
        given = {
            "root": self.root_dir, **part, "download": self.download, "transform": self.transform,
        }  # fmt: skip
        accepted = {k: v for k, v in given.items() if takes_all or k in parameters}
        if not part.keys() & accepted.keys():
            raise ValueError(
                f"{_OWNER}.ds_class must take train= (or split=) like torchvision's datasets; "
                f"{_name(self.ds_class)} takes {list(parameters)}"
            )
        if self.transform is not None and "transform" not in accepted:
            raise ValueError(f"{_name(self.ds_class)} takes no transform=; use train_transform=")
        return self.ds_class(**accepted)


def _name(ds_class: Any) -> str:
    inner = getattr(ds_class, "func", ds_class)  # of a functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def _dimensions(base: Any) -> tuple[int, int]:
    """Values per sample and classes. Looking at a sample moves no random stream."""
    with isolated_rng():
        sample = base[0]
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise ValueError(f"{_OWNER}: a sample must be (input, target), not {type(sample).__name__}")
    X, target = sample[0], sample[1]
    size = getattr(X, "numel", None)
    if callable(size):
        input_dim = int(size())
    elif hasattr(X, "shape"):
        input_dim = int(torch.Size(X.shape).numel())
    elif isinstance(getattr(X, "size", None), tuple):  # a PIL image
        input_dim = X.size[0] * X.size[1] * len(X.getbands())
    else:
        raise ValueError(
            f"{_OWNER}: the input of a sample is a {type(X).__name__}, not a tensor, an array or "
            f"an image; pass a transform such as torchvision.transforms.ToTensor()"
        )
    return input_dim, _n_outputs(base, target)


def _n_outputs(base: Any, target: Any) -> int:
    classes = getattr(base, "classes", None)
    if classes is not None:
        return len(classes)
    for name in ("targets", "labels"):
        values = getattr(base, name, None)
        if values is not None:
            return int(torch.as_tensor(values).max()) + 1
    target = torch.as_tensor(target)
    if target.is_floating_point():
        return max(1, target.numel())
    raise ValueError(
        f"{_OWNER}: how many classes there are is unknown; give the dataset class a `classes` "
        f"or `targets` attribute"
    )
