"""The random streams that a loader is made of go on where they were."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx import (
    Callback,
    EarlyStopping,
    MonitorSpec,
    NNEvaluationDataPoint,
    supervised_objective,
)
from nnx.engine import rng
from nnx.history import HistoryJournal
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    random_split,
)


class Noisy(Dataset):
    """Adds noise from a generator of its own to every sample."""

    def __init__(self, kit, generator, draw):
        (self.x, self.y), self.own, self.draw = kit.blobs(), generator, draw

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row] + self.draw(self.own), self.y[row]


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.randn(6, generator=g)),
    "numpy": (
        lambda: np.random.default_rng(3), lambda g: torch.from_numpy(g.normal(size=6)).float()
    ),
    "philox": (
        lambda: np.random.Generator(np.random.Philox(3)),
        lambda g: torch.from_numpy(g.normal(size=6)).float(),
    ),
    "RandomState": (
        lambda: np.random.RandomState(3), lambda g: torch.from_numpy(g.normal(size=6)).float()
    ),
    "Random": (lambda: random.Random(3), lambda g: torch.tensor([g.gauss(0, 1)] * 6)),
}  # fmt: skip


class Wrapper:
    """A user's own loader around another."""

    def __init__(self, inner):
        self._inner = inner

    def __iter__(self):
        return iter(self._inner)

    def __len__(self):
        return len(self._inner)


class Slotted(Dataset):
    """A user's own dataset around another, without a dictionary."""

    __slots__ = ("inner", "never_set")

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, row):
        return self.inner[row]


def closure_over(dataset):
    own = torch.Generator().manual_seed(5)

    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return x + torch.randn(x.shape, generator=own), y

    return DataLoader(dataset, batch_size=16, collate_fn=collate)


WRAPPED = {
    "dataset": lambda d: DataLoader(d, batch_size=16),
    "Subset": lambda d: DataLoader(Subset(d, range(64)), batch_size=16),
    "random_split": lambda d: DataLoader(
        random_split(d, [64, 32], torch.Generator().manual_seed(0))[0], batch_size=16
    ),
    "ConcatDataset": lambda d: DataLoader(
        ConcatDataset([d] + [Subset(d, [0])] * 80), batch_size=16
    ),
    "a wrapper of the loader": lambda d: Wrapper(Wrapper(DataLoader(d, batch_size=16))),
    "a wrapper with slots": lambda d: DataLoader(Slotted(d), batch_size=16),
    "a function": closure_over,
}


def stop_after(epoch):
    callback = Callback()
    callback.on_epoch_end = lambda ctx: setattr(ctx, "should_stop", ctx.epoch >= epoch)
    return callback


def split_equals_whole(kit, make_loaders, n_epochs=3, **kwargs):
    """Train at once, and split in two with loaders made anew, as another process has them."""

    def params(**more):
        return kit.train_params(n_epochs=n_epochs, **make_loaders(), **kwargs, **more)

    whole, part, rest = kit.model(), kit.model(), kit.model()
    expected = whole.train(params()).idps
    first = part.train(params(data_id="split"), callbacks=[stop_after(0)])
    torch.manual_seed(99)
    again = params(resume_epochs="planned", resume_mode="stateful", resume_from_run_id=first.id)
    run = rest.train(again)
    assert kit.same(whole.net.state_dict(), rest.net.state_dict())
    assert [i.state() for i in run.idps] == [i.state() for i in expected if i.epoch_idx > 0]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_below_wrappers_go_on(kit, wrapped, kind):
    if wrapped != "Subset" and kind != "torch":
        pytest.skip("the place and the kind are independent")
    make, draw = GENERATORS[kind]
    split_equals_whole(
        kit, lambda: {"train_loader": WRAPPED[wrapped](Noisy(kit, make(), draw))}, n_epochs=2
    )


def shuffled(kit, place, seed=3):
    data, generator = TensorDataset(*kit.blobs()), torch.Generator().manual_seed(seed)
    if place == "loader":
        return DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    return DataLoader(data, batch_size=16, sampler=RandomSampler(data, generator=generator))


@pytest.mark.parametrize(("first", "second"), [("loader", "sampler"), ("sampler", "loader")])
def test_a_generator_at_another_place_is_matched_by_its_seed(kit, first, second):
    loaders = {"train": shuffled(kit, first)}
    next(iter(loaders["train"]))
    saved = rng.capture(loaders)
    moved = {"train": shuffled(kit, second)}
    assert rng.restore(saved, moved) == ()
    (ours,) = rng.loader_generators(moved).values()
    (theirs,) = rng.loader_generators(loaders).values()
    assert torch.equal(ours.get_state(), theirs.get_state())
    other = {"train": shuffled(kit, second, seed=4)}
    state = next(iter(rng.loader_generators(other).values())).get_state()
    assert rng.restore(saved, other) == tuple(saved["loaders"])
    assert torch.equal(next(iter(rng.loader_generators(other).values())).get_state(), state)


def test_two_generators_of_one_seed_keep_their_roles(kit):
    loaders = {"train": shuffled(kit, "loader"), "val": shuffled(kit, "loader")}
    next(iter(loaders["val"]))
    saved = rng.capture(loaders)
    moved = {"train": shuffled(kit, "sampler"), "val": shuffled(kit, "sampler")}
    assert rng.restore(saved, moved) == ()
    for role in loaders:
        (a,) = rng.loader_generators({role: loaders[role]}).values()
        (b,) = rng.loader_generators({role: moved[role]}).values()
        assert torch.equal(a.get_state(), b.get_state())


@pytest.mark.parametrize("role", ["train_loader", "val_loader"])
@pytest.mark.parametrize("generator", [None, 3])
def test_persistent_workers_resume_exactly(kit, role, generator):
    def make(persistent):
        own = None if generator is None else torch.Generator().manual_seed(generator)
        workers = {"num_workers": 1, "persistent_workers": True} if persistent else {}
        return kit.loader(generator=own, **workers)

    def loaders():
        return {name: make(name == role) for name in ("train_loader", "val_loader")}

    with pytest.warns(RuntimeWarning, match=f"loaders {role[:-7]} use workers.*draw nothing"):
        split_equals_whole(kit, loaders)


def test_the_first_epoch_of_persistent_workers_is_repeated_too(kit):
    """A point inside the first epoch: the workers had not been started when it began."""

    def params(**more):
        loader = kit.loader(num_workers=1, persistent_workers=True)
        return kit.train_params(n_epochs=2, train_loader=loader, checkpoint_every=2, **more)

    class Dies(Callback):
        def on_train_begin(self, ctx):
            ctx.update_listeners.append(lambda: self.at(ctx.committed_updates))

        def at(self, updates):
            if updates == 5:
                raise KeyboardInterrupt

    whole, rest = kit.model(), kit.model()
    whole.train(params())
    broken = params(data_id="broken")
    with pytest.raises(KeyboardInterrupt):
        kit.model().train(broken, callbacks=[Dies()])

    (source,) = (p.name for p in Path("runs").iterdir() if list(p.glob("checkpoints/step.pt")))
    with pytest.warns(RuntimeWarning, match="use workers"):
        rest.train(
            params(
                resume_from_run_id=source, resume_from_checkpoint="step", resume_mode="stateful",
                resume_epochs="planned",
            )
        )  # fmt: skip
    assert kit.same(whole.net.state_dict(), rest.net.state_dict())


def test_workers_on_one_side_only_are_reported(kit):
    plain = kit.train_params(n_epochs=1)
    first = kit.model().train(plain)
    kept = kit.loader(num_workers=1, persistent_workers=True)
    resumed = dataclasses.replace(
        plain, train_loader=kept, resume_from_run_id=first.id, resume_mode="stateful"
    )
    with pytest.warns(RuntimeWarning, match="state of train fits no"):
        kit.model().train(resumed)


def test_a_deep_or_cyclic_wrapper_is_walked_once(kit):
    outer = Wrapper(kit.loader())
    outer.me, outer.net, outer.rows = outer, kit.model().net, list(range(10**6))
    outer.parts = {"a": [Wrapper(torch.Generator().manual_seed(1))]}
    names = dict(rng.parts_of({"train": outer}))
    assert len(names) < 40
    assert list(rng.loader_generators({"train": outer})) == ["train.parts.a.0._inner"]


# What a finished fit leaves ------------------------------------------------------------------


class KeepsContext(Callback):
    def on_train_begin(self, ctx):
        self.ctx = ctx
        ctx.update_listeners.append(lambda: ctx.committed_updates)


FITS = {
    "plain": dict,
    "callbacks": lambda: {"callbacks": [EarlyStopping(MonitorSpec("loss")), Callback()]},
    "context kept": lambda: {"callbacks": [KeepsContext()]},
    "objective": lambda: {"objective": supervised_objective()},
    "journal": lambda: {"history": HistoryJournal(retention=4)},
    "failed": lambda: {"train_step_fn": lambda ctx: 1 / 0},
}


@pytest.mark.parametrize("fit", FITS)
def test_a_finished_fit_leaves_no_cycle_that_keeps_a_loader(kit, fit):
    """Workers would live until the next garbage collection, and die slowly at exit."""
    model, loader = kit.model(), kit.loader()
    params = kit.train_params(n_epochs=2, train_loader=loader)
    gc.collect()
    gc.disable()
    try:
        if fit == "failed":
            with pytest.raises(ZeroDivisionError):
                model.train(params, **FITS[fit]())
        else:
            model.train(params, **FITS[fit]())
        alive = weakref.ref(loader)
        del loader, params
        assert alive() is None, [type(r) for r in gc.get_referrers(alive())]
    finally:
        gc.enable()


# One batch in advance ------------------------------------------------------------------------


class OneBuffer:
    """A loader without a length that fills the same tensors for every batch."""

    def __init__(self, batches, pack):
        self.batches, self.pack = batches, pack

    def __iter__(self):
        x, y = (torch.empty_like(t) for t in self.batches[0])
        for new_x, new_y in self.batches:
            x.copy_(new_x)
            y.copy_(new_y)
            yield self.pack(x, y)


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Held:
    x: torch.Tensor
    y: torch.Tensor


PACKS = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "nested": (lambda x, y: [{"x": x}, (y,)], lambda b: (b[0]["x"], b[1][0])),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "arrays": (
        lambda x, y: (x.numpy(), y.numpy()), lambda b: (torch.from_numpy(b[0]), torch.from_numpy(b[1]))
    ),
    "object": (Held, lambda b: (b.x, b.y)),
}  # fmt: skip


@pytest.mark.parametrize("pack", PACKS)
def test_a_loader_that_refills_one_buffer_trains_its_own_batches(kit, pack):
    packed, unpacked = PACKS[pack]
    batches = list(kit.loader(shuffle=False))
    last = []

    def step(ctx):
        ctx.model.net.train()
        x, y = unpacked(ctx.batch)
        ctx.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ctx.model.net(x), y)
        loss.backward()
        ctx.optimizer.step()
        last.append(ctx.is_last_batch)
        return NNEvaluationDataPoint(loss=loss.item(), error=loss.item())

    known, unknown = kit.model(dropout=0.0), kit.model(dropout=0.0)
    params = kit.train_params(n_epochs=2, train_loader=[packed(x, y) for x, y in batches])
    known.train(params, train_step_fn=step)
    params = kit.train_params(n_epochs=2, train_loader=OneBuffer(batches, packed))
    unknown.train(params, train_step_fn=step, salt="one buffer")
    assert kit.same(known.net.state_dict(), unknown.net.state_dict())
    assert last == ([False] * 5 + [True]) * 4
