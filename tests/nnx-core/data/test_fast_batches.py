"""fast_batches is iter(loader): the same batches, order and random draws."""

from __future__ import annotations

import copy
import random
import types

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.data.loading import fast_batches
from nnx.preprocessing import SplitView, Standardizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)


def run(make_loader, iterate, epochs=2):
    """Batches and random states after each batch, from a fixed start."""
    torch.manual_seed(3)
    numpy.random.seed(3)
    random.seed(3)
    loader = make_loader()
    seen = []
    for _ in range(epochs):
        for batch in iterate(loader):
            seen.append((batch, torch.get_rng_state(), generator_states(loader)))
            torch.rand(1)  # training draws from the same stream between batches
        seen.append((None, torch.get_rng_state(), generator_states(loader)))
    assert numpy.random.get_state()[1][0] == 3
    return seen


def generator_states(loader):
    owners = [loader, loader.sampler, getattr(loader.sampler, "sampler", None)]
    if loader.batch_sampler is not None:
        owners.append(loader.batch_sampler.sampler)
    generators = [getattr(o, "generator", None) for o in owners]
    return [g.get_state() for g in generators if g is not None]


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert left.device == right.device
        assert left._base is None
        assert torch.equal(left, right) or (left.isnan() == right.isnan()).all()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right):
            assert_same(a, b)
    else:
        assert left == right


def is_fast(loader):
    return isinstance(fast_batches(loader), types.GeneratorType)


def tensors(n, kinds):
    g = torch.Generator().manual_seed(0)
    made = {
        "f32": torch.randn(n, 3, generator=g),
        "f16": torch.randn(n, 2, generator=g).half(),
        "bf16": torch.randn(n, generator=g).bfloat16(),
        "i64": torch.randint(0, 5, (n,), generator=g),
        "u8": torch.randint(0, 255, (n, 2, 2), generator=g).byte(),
        "bool": torch.randint(0, 2, (n,), generator=g).bool(),
        "c64": torch.randn(n, 2, generator=g).to(torch.complex64),
        "empty": torch.zeros(n, 0),
    }
    return [made[k] for k in kinds]


KINDS = st.lists(
    st.sampled_from(["f32", "f16", "bf16", "i64", "u8", "bool", "c64", "empty"]),
    min_size=1,
    max_size=3,
)


@st.composite
def loaders(draw):
    """A recipe that builds the same loader each time it is called."""
    n = draw(st.integers(1, 40))
    kinds = draw(KINDS)
    shape = draw(
        st.sampled_from(
            ["tensor", "stack", "stack-dict", "subset", "subset-of-subset", "view", "standardized"]
        )
    )
    rows = draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=40))
    size = draw(st.integers(1, 17))
    sampling = draw(
        st.sampled_from(
            ["plain", "shuffle", "generator", "both", "weighted", "weighted-generator",
             "replacement", "subset-random", "batch-sampler", "list-sampler", "batch-list"]
        )
    )  # fmt: skip
    drop_last = draw(st.booleans())

    def dataset():
        parts = tensors(n, kinds)
        if shape == "stack":
            return StackDataset(*parts)
        if shape == "stack-dict":
            return StackDataset(**{f"x{i}": t for i, t in enumerate(parts)})
        base = TensorDataset(*parts)
        if shape == "view":
            return SplitView(Subset(base, rows), range(len(rows)))
        if shape == "standardized":
            parts[0] = torch.randn(n, 4, generator=torch.Generator().manual_seed(2))
            fitted = Standardizer.fit(parts[0], rows=range(n))
            return SplitView(TensorDataset(*parts), [i % n for i in rows], transform=fitted)
        if shape == "subset":
            return Subset(base, rows)
        if shape == "subset-of-subset":
            return Subset(Subset(base, rows), list(range(len(rows)))[::-1])
        return base

    def make():
        data = dataset()
        m = len(data)
        g = torch.Generator().manual_seed(7)
        plain = {"batch_size": size, "drop_last": drop_last}
        weights = torch.rand(m, generator=torch.Generator().manual_seed(1)) + 0.01
        options = {
            "plain": plain,
            "shuffle": {**plain, "shuffle": True},
            "generator": {**plain, "shuffle": True, "generator": g},
            "both": {**plain, "sampler": RandomSampler(data, generator=g), "generator": g},
            "weighted": {**plain, "sampler": WeightedRandomSampler(weights, 2 * m)},
            "weighted-generator": {
                **plain,
                "sampler": WeightedRandomSampler(weights, m, generator=g),
            },
            "replacement": {
                **plain,
                "sampler": RandomSampler(data, replacement=True, num_samples=m + 3, generator=g),
            },
            "subset-random": {**plain, "sampler": SubsetRandomSampler(range(0, m, 2))},
            "batch-sampler": {"batch_sampler": BatchSampler(RandomSampler(data), size, drop_last)},
            "list-sampler": {**plain, "sampler": list(range(m))[::-1]},
            "batch-list": {"batch_sampler": BatchSampler(SequentialSampler(data), size, drop_last)},
        }[sampling]
        return DataLoader(data, **options)

    return make


@settings(max_examples=150, deadline=None)
@given(loaders())
def test_batches_order_and_random_states_are_those_of_the_plain_loader(make):
    plain, fast = run(make, iter), run(make, fast_batches)
    assert len(plain) == len(fast)
    for (batch, state, owned), (batch2, state2, owned2) in zip(plain, fast):
        assert_same(batch2, batch) if batch is not None else None
        assert torch.equal(state, state2)
        assert all(torch.equal(a, b) for a, b in zip(owned, owned2))
    assert is_fast(make())


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_pinning_is_left_to_the_loader():
    def make():
        return DataLoader(
            TensorDataset(torch.arange(9.0)), batch_size=4, shuffle=True, pin_memory=True
        )

    for (batch, state, _), (batch2, state2, _) in zip(run(make, iter), run(make, fast_batches)):
        assert_same(batch2, batch)
        assert torch.equal(state, state2)
    assert is_fast(make())


def test_a_batch_may_be_changed_in_place_without_touching_the_data():
    data = torch.arange(12.0).reshape(6, 2)
    held = data.clone()
    for (batch,) in fast_batches(DataLoader(TensorDataset(data), batch_size=4)):
        batch.zero_()
    assert torch.equal(data, held)


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return torch.tensor(i * i)


class Doubling(TensorDataset):
    def __getitem__(self, i):
        return tuple(2 * t[i] for t in self.tensors)


class ReversingLoader(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


def collate(samples):
    return default_collate(samples)[0]


X = torch.arange(10.0).reshape(5, 2)
DATA = TensorDataset(X)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Squares(), batch_size=2),
        DataLoader(Doubling(X), batch_size=2),
        ReversingLoader(DATA, batch_size=2),
        DataLoader(SplitView(DATA, [3, 1], transform=torch.neg), batch_size=2),
        DataLoader(DATA, batch_size=2, collate_fn=collate),
        DataLoader(DATA, batch_size=None),
        DataLoader(DATA, batch_size=2, num_workers=1),
        DataLoader(TensorDataset(X.clone().requires_grad_()), batch_size=2),
        DataLoader(TensorDataset(torch.nn.Parameter(X)), batch_size=2),
        DataLoader(TensorDataset(X.t().contiguous().t()), batch_size=2),
        [(X[:2],), (X[2:],)],
    ],
    ids=lambda loader: type(getattr(loader, "dataset", loader)).__name__,
)
def test_anything_else_is_iterated_as_it_is(loader):
    assert not is_fast(loader)
    for ours, plain in zip(fast_batches(loader), iter(loader), strict=True):
        if isinstance(plain, torch.Tensor):
            assert torch.equal(ours, plain)
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours, plain))


def test_an_index_out_of_range_raises_what_the_dataset_raises():
    loader = DataLoader(DATA, batch_size=2, sampler=[0, 1, 99])
    with pytest.raises(IndexError, match="99"):
        list(fast_batches(loader))


@pytest.mark.parametrize(
    "batch", [(1, 0), torch.tensor([1, 0]), [torch.tensor(1), torch.tensor(0)]]
)
def test_unusual_indices_are_served_as_by_the_dataset(batch):
    loader = DataLoader(DATA, batch_sampler=[batch])
    (ours,), (plain,) = fast_batches(loader), iter(loader)
    assert torch.equal(ours[0], plain[0])


def test_the_loader_is_not_changed():
    loader = DataLoader(DATA, batch_size=2)
    before = copy.copy(vars(loader))
    list(fast_batches(loader))
    assert vars(loader) == before
    assert type(iter(loader)._dataset_fetcher).__name__ == "_MapDatasetFetcher"


def test_the_subset_is_read_when_the_batch_is():
    rows = [0, 1, 2, 3]
    iterator = fast_batches(DataLoader(Subset(DATA, rows), batch_size=2))
    next(iterator)
    rows[2] = 0
    assert torch.equal(next(iterator)[0], X[[0, 3]])
