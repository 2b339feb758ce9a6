"""Any class with torchvision's protocol becomes loaders with per-split transforms."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from nnx import NNDataset
from nnx.preprocessing import SplitView, Standardizer
from torch.utils.data import Dataset, Subset, random_split


class Digits(Dataset):
    """A stand-in with torchvision's constructor, targets and classes."""

    classes = ("zero", "one", "two")
    calls: ClassVar[list] = []

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        type(self).calls.append((root, train, download))
        n = 20 if train else 8
        self.data = torch.arange(n * 8, dtype=torch.float32).reshape(n, 2, 2, 2) + (not train)
        self.targets = [i % 3 for i in range(n)]
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x = self.data[i]
        return (x if self.transform is None else self.transform(x)), self.targets[i]


def flip(x):
    return -x


def scale(x):
    return x / 10


def samples(loader):
    return [loader.dataset[i] for i in range(len(loader.dataset))]


def test_validation_is_carved_out_of_training_and_the_test_part_stays_whole():
    Digits.calls.clear()
    ds = NNDataset(ds_class=Digits, root_dir="there", seed=4, val_proportion=0.25)
    assert Digits.calls == [("there", True, True), ("there", False, True)]
    train, validation = random_split(range(20), [15, 5], generator=torch.Generator().manual_seed(4))
    assert list(ds.train_loader.dataset.indices) == list(train.indices)
    assert list(ds.val_loader.dataset.indices) == list(validation.indices)
    assert len(ds.test_loader.dataset) == 8
    assert (ds.name, ds.input_dim, ds.output_dim) == ("Digits", 8, 3)
    assert ds.state() == {"name": "Digits", "input_dim": 8, "output_dim": 3}
    assert isinstance(ds.train_loader.dataset, Subset)


def test_without_a_seed_the_global_stream_draws_the_split():
    torch.manual_seed(9)
    ds = NNDataset(ds_class=Digits, val_proportion=0.25)
    after = torch.rand(1)
    torch.manual_seed(9)
    train, _ = random_split(range(20), [15, 5])
    assert list(ds.train_loader.dataset.indices) == list(train.indices)
    assert torch.equal(torch.rand(1), after)


def test_transforms_of_a_split_come_after_the_classes_own_and_touch_inputs_only():
    ds = NNDataset(
        ds_class=Digits, transform=scale, train_transform=flip, val_proportion=0.25, seed=4
    )
    base, test = Digits("r", True), Digits("r", False)
    view = ds.train_loader.dataset
    assert isinstance(view, SplitView)
    for i, (x, y) in zip(view.indices, samples(ds.train_loader)):
        assert torch.equal(x, -base.data[i] / 10)
        assert y == base.targets[i]
    for i, (x, _) in zip(ds.val_loader.dataset.indices, samples(ds.val_loader)):
        assert torch.equal(x, base.data[i] / 10)
    assert torch.equal(samples(ds.test_loader)[3][0], test.data[3] / 10)
    assert view.classes == Digits.classes
    assert view.dataset.transform is scale
    assert ds.state()["train_transform"] == {
        "kind": "runtime", "name": f"{__name__}.flip", "reconstructible": False,
    }  # fmt: skip
    assert "eval_transform" not in ds.state()


def test_the_same_rows_with_and_without_split_transforms():
    plain = NNDataset(ds_class=Digits, seed=1)
    with_view = NNDataset(ds_class=Digits, seed=1, eval_transform=flip)
    assert list(plain.val_loader.dataset.indices) == list(with_view.val_loader.dataset.indices)
    assert torch.equal(samples(with_view.test_loader)[0][0], -samples(plain.test_loader)[0][0])


class Rows(Digits):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x.flatten(), y


def test_a_standardizer_transforms_every_split():
    base = Rows("r")
    fitted = Standardizer.fit(base, rows=range(15))
    ds = NNDataset(ds_class=Rows, train_transform=fitted, eval_transform=fitted, seed=1)
    x, _ = samples(ds.test_loader)[2]
    assert torch.equal(x, fitted(Rows("r", False)[2][0]))
    assert ds.state()["eval_transform"]["state"] == fitted.state()


class SplitWord(Dataset):
    """SVHN's constructor: split="train" or "test"."""

    def __init__(self, root, split="train", transform=None, download=False):
        self.n = 6 if split == "train" else 2
        self.labels = np.array([0, 4] * 3)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return np.zeros((1, 2, 3), dtype=np.float32), int(self.labels[i])


def letters(root, kind, **options):
    assert kind == "letters"
    return Digits(root, **options)


def test_other_constructors_of_the_family():
    ds = NNDataset(ds_class=SplitWord, val_proportion=0.0)
    assert (len(ds.train_loader.dataset), ds.val_loader, len(ds.test_loader.dataset)) == (
        6,
        None,
        2,
    )
    assert (ds.input_dim, ds.output_dim) == (6, 5)
    partial = NNDataset(ds_class=functools.partial(letters, kind="letters"))
    assert partial.name == "letters"
    assert len(partial.test_loader.dataset) == 8


class Noisy(Digits):
    def __getitem__(self, i):
        return torch.rand(8), self.targets[i]


def test_looking_at_a_sample_moves_no_stream():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    NNDataset(ds_class=Noisy, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_are_seeded():
    ds = NNDataset(ds_class=Noisy, seed=1, n_workers=1, batch_sizes=(4, None, None))
    assert ds.train_loader.num_workers == 1
    assert ds.train_loader.worker_init_fn is not None
    assert len(list(ds.train_loader)) == 5


class NoTrain(Dataset):
    def __init__(self, root):
        raise AssertionError("must not be built")


class Dicts(Digits):
    def __getitem__(self, i):
        return {"x": self.data[i]}


class Unknown(Dataset):
    def __init__(self, root, train=True):
        pass

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(2), 1


@pytest.mark.parametrize(
    ("ds_class", "options", "message"),
    [
        (NoTrain, {}, r"must take train= .*NoTrain takes \['root'\]"),
        (NoTrain, {"batch_sizes": (0, 1, 1)}, "batch_sizes"),
        (NoTrain, {"val_proportion": 1}, "val_proportion"),
        (NoTrain, {"n_workers": -1}, "n_workers"),
        (NoTrain, {"train_transform": 3}, "train_transform must be callable"),
        (Unknown, {"transform": flip}, "takes no transform="),
        (Unknown, {}, "how many classes there are is unknown"),
        (Dicts, {}, r"must be \(input, target\), not dict"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(ds_class, options, message):
    with pytest.raises(ValueError, match=message):
        NNDataset(ds_class=ds_class, **options)
