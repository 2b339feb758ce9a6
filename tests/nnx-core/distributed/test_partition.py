from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx.distributed import RankPartition, ShardedLoader, train_loader, validation_loader
from torch.utils.data import TensorDataset

sizes = st.integers(1, 60)
worlds = st.integers(1, 7)


def partitions(n, world, **options):
    return [RankPartition(n, rank=r, world_size=world, **options) for r in range(world)]


@given(sizes, worlds)
def test_every_validation_row_is_dealt_exactly_once(n, world):
    dealt = [i for p in partitions(n, world, kind="validation") for i in p.indices()]
    assert sorted(dealt) == list(range(n))


@given(sizes, worlds, st.integers(0, 3), st.sampled_from(["pad", "drop"]))
def test_training_shares_are_equal_and_cover_the_plan(n, world, epoch, policy):
    if policy == "drop" and n < world:
        return
    parts = partitions(n, world, policy=policy, seed=5)
    for part in parts:
        part.set_epoch(epoch)
    shares = [part.indices() for part in parts]
    assert len({len(s) for s in shares}) == 1
    assert [len(p) for p in parts] == [len(s) for s in shares]
    order = parts[0].global_order()
    assert [row for round_ in zip(*shares) for row in round_] == order
    if policy == "pad":
        assert set(order) == set(range(n))
        assert len(order) - n < world
    else:
        assert len(set(order)) == len(order) == n - n % world


def test_epochs_and_seeds_order_differently_without_a_global_stream():
    before = torch.get_rng_state()
    part = RankPartition(50, rank=0, world_size=1, seed=0)
    first = part.indices()
    part.set_epoch(1)
    assert part.indices() != first
    part.set_epoch(0)
    assert part.indices() == first
    assert RankPartition(50, rank=0, world_size=1, seed=1).indices() != first
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_the_ranks_are_those_of_one_process():
    data = TensorDataset(torch.arange(48), torch.arange(48))
    alone = ShardedLoader(data, 12, RankPartition(48, rank=0, world_size=1, seed=2))
    ranks = [
        ShardedLoader(data, 4, RankPartition(48, rank=r, world_size=3, seed=2)) for r in range(3)
    ]
    for whole, *shares in zip(alone, *ranks):
        assert sorted(whole[0].tolist()) == sorted(v for s in shares for v in s[0].tolist())
    assert sorted(i for r in ranks for i in r.ids()) == list(range(48))


def test_one_process_reads_everything():
    data = TensorDataset(torch.arange(7))
    assert sorted(v for (b,) in train_loader(data, 3) for v in b.tolist()) == list(range(7))
    assert [v for (b,) in validation_loader(data, 3) for v in b.tolist()] == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0, "rank": 0, "world_size": 1}, r"RankPartition\.n must be"),
        ({"n": 4, "rank": 2, "world_size": 2}, "rank must be below world_size 2"),
        ({"n": 4, "rank": 0, "world_size": 2, "kind": "test"}, "kind"),
        ({"n": 4, "rank": 0, "world_size": 2, "policy": "wrap"}, "policy"),
        ({"n": 1, "rank": 0, "world_size": 2, "policy": "drop"}, 'use policy="pad"'),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        RankPartition(options.pop("n"), **options)


def test_a_partition_of_another_dataset():
    with pytest.raises(ValueError, match="deals 5 rows, and the dataset has 7"):
        ShardedLoader(TensorDataset(torch.arange(7)), 2, RankPartition(5, rank=0, world_size=1))
