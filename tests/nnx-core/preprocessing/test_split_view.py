"""A view transforms inputs only, keeps no state, and leaves its base alone."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from nnx.preprocessing import PreprocessingError, SplitView, Standardizer, describe_transform
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


class Sample(NamedTuple):
    x: torch.Tensor
    y: int
    id: str


class Base(Dataset):
    classes = ("cat", "dog")

    def __init__(self, make, n=6):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(torch.full((2,), float(i)), i)


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x, i: (x, i), tuple),
        (lambda x, i: [x, i], list),
        (lambda x, i: Sample(x, i, f"id{i}"), Sample),
        (lambda x, i: (x, i, "more"), tuple),
    ],
)
def test_only_the_input_is_transformed_and_the_kind_of_sample_stays(make, kind):
    base = Base(make)
    view = SplitView(base, [4, 1], transform=double)
    sample = view[0]
    assert type(sample) is kind
    assert torch.equal(sample[0], torch.tensor([8.0, 8.0]))
    assert list(sample)[1:] == list(base[4])[1:]
    assert view.indices == (4, 1)
    assert len(view) == 2
    assert torch.equal(base[4][0], torch.tensor([4.0, 4.0]))
    assert SplitView(base, [4])[0][1] == 4


def test_a_bare_input_is_transformed():
    assert torch.equal(
        SplitView(Base(lambda x, i: x), [3], transform=double)[0], torch.tensor([6.0, 6.0])
    )


def test_a_mapping_sample_is_refused_only_by_a_transform():
    base = Base(lambda x, i: {"x": x, "y": i})
    assert SplitView(base, [3])[0]["y"] == 3
    with pytest.raises(
        PreprocessingError, match=r"mapping sample is the input \(entries: \['x', 'y'\]\)"
    ):
        SplitView(base, [3], transform=double)[0]


def test_it_looks_like_a_subset():
    base = Base(lambda x, i: (x, i))
    view = SplitView(base, range(3))
    assert view.dataset is base
    assert view.classes == ("cat", "dog")
    assert not hasattr(SplitView(TensorDataset(torch.ones(2)), [0]), "classes")
    assert view[-1][1] == 2
    with pytest.raises(IndexError):
        view[3]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([6], "6 is not in the 6 rows"),
        ([-1], "-1 is not"),
        ([True], "integers, not True"),
        ([1.0], "integers, not 1.0"),
    ],
)
def test_indices_are_positions_in_the_base(indices, message):
    with pytest.raises(PreprocessingError, match=message):
        SplitView(Base(lambda x, i: (x, i)), indices)
    assert SplitView(Base(lambda x, i: (x, i)), np.array([5])).indices == (5,)


def test_a_transform_is_callable():
    with pytest.raises(PreprocessingError, match="transform must be callable, not 3"):
        SplitView(Base(lambda x, i: (x, i)), [0], transform=3)


class Rows(Base):
    def __init__(self):
        super().__init__(None)

    def __getitem__(self, i):
        return torch.tensor([float(i), 2.0 * i]), i


def noisy(x):
    return x + torch.rand(2)


def test_a_standardizer_is_a_transform_of_single_rows():
    base = Rows()
    table = torch.stack([base[i][0] for i in range(6)])
    fitted = Standardizer.fit(base, rows=[0, 1, 2])
    view = SplitView(base, [3, 5], transform=fitted)
    assert torch.equal(torch.stack([x for x, _ in view]), fitted.transform(table[[3, 5]]))
    assert view.reconstructible
    assert view.state() == {
        "rows": 2,
        "transform": describe_transform(fitted),
        "reconstructible": True,
    }


def test_workers_and_alternate_reading_return_the_same_evaluation_samples():
    base = Rows()
    fitted = Standardizer.fit(base, rows=[0, 1, 2])
    train = SplitView(base, [0, 1, 2], transform=noisy)
    test = SplitView(base, [3, 4, 5], transform=fitted)
    expected = [x for x, _ in test]
    interleaved = []
    for i in range(3):
        train[i]
        interleaved.append(test[i][0])
    workers = [x[0] for x, _ in DataLoader(test, batch_size=1, num_workers=2)]
    assert all(torch.equal(a, b) for a, b in zip(expected, interleaved, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, workers, strict=True))


def test_a_random_training_transform_draws_from_each_workers_stream():
    train = SplitView(Rows(), range(6), transform=noisy)

    def epoch(seed):
        torch.manual_seed(seed)
        return torch.cat([x for x, _ in DataLoader(train, batch_size=1, num_workers=2)])

    assert torch.equal(epoch(1), epoch(1))
    assert not torch.equal(epoch(1), epoch(2))


class Callable_:
    def __call__(self, x):
        return x


def test_a_transform_is_described_by_its_name():
    assert describe_transform(None) is None
    name = f"{__name__}.double"
    for transform in (
        double,
        functools.partial(double),
        functools.partial(functools.partial(double)),
    ):
        assert describe_transform(transform) == {
            "kind": "runtime",
            "name": name,
            "reconstructible": False,
        }
    assert describe_transform(Callable_())["name"] == f"{__name__}.Callable_"
    assert describe_transform(torch.nn.ReLU())["name"] == "torch.nn.modules.activation.ReLU"
    assert describe_transform(np.log)["reconstructible"] is False
    assert describe_transform(lambda x: x)["name"].endswith("<lambda>")
    assert not SplitView(Rows(), [0], transform=double).reconstructible
    fitted = Standardizer((0.0,), (1.0,))
    described = describe_transform(fitted)
    assert described["reconstructible"] is True
    assert Standardizer.from_state(described["state"]) == fitted


def test_views_nest_with_subsets():
    view = SplitView(Subset(Rows(), [5, 4, 3]), [2, 0], transform=double)
    assert [y for _, y in view] == [3, 5]
