"""Real trainings on scikit-learn's digits and on two-dimensional mixtures.

They take minutes and run with ``NNX_THOROUGH=1``; docs/paradigms.md has their figures.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import nnx
import pytest
import torch
from nnx import (
    DiffusionMLP,
    JEPAPredictor,
    Losses,
    ModelSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    NNViTParams,
    NoiseSchedulers,
    build_target_encoder,
    jepa_objective,
    kd_objective,
)
from nnx.diffusion import diffusion_objective, sample_run, zero_terminal_snr
from nnx.paradigms import EMA, BlockMasks, EmbeddingProbe, simclr_objective
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.skipif(
    os.environ.get("NNX_THOROUGH") != "1", reason="minutes of training: NNX_THOROUGH=1"
)
TRAINED = 1000  # of 1,797 images; the others are never seen


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images / 16.0, dtype=torch.float32)[:, None]
    return images[order], torch.tensor(found.target)[order]


def params(train_loader, epochs, seed, lr=3e-3, **more):
    return NNTrainParams(
        n_epochs=epochs, seed=seed, train_loader=train_loader, save_phase_checkpoints=False,
        optim=NNOptimParams.builder().adamw(max_lr=lr).build(), **more,
    )  # fmt: skip


def batches(*tensors, size=32):
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=True)


def classifier(hidden, seed, dropout=0.0):
    nnx.set_seed(seed)
    net = NNParams(input_dim=64, output_dim=10, hidden_dims=[hidden], dropout_prob=dropout)
    return NNModel(
        net_params=net, params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY)
    )


@pytest.mark.timeout(600)
def test_a_distilled_student_beats_the_same_student_alone(digits):
    """150 labelled images, five seeds, paired: better every time, by over a point on average."""
    x, y = digits[0].flatten(1), digits[1]
    held = DataLoader(TensorDataset(x[TRAINED:], y[TRAINED:]), batch_size=400)
    teacher = classifier(256, 100, dropout=0.5)
    teacher.train(params(batches(x[:TRAINED], y[:TRAINED]), 60, 100))
    gains = []
    for seed in range(5):
        scores = []
        for objective in (None, kd_objective(teacher, alpha=0.9, temperature=6.0)):
            student = classifier(32, seed)
            run = params(batches(x[:150], y[:150]), 100, seed, data_id=str(objective is None))
            student.train(run, objective=objective)
            scores.append(student.evaluate(held).accuracy)
        gains.append(scores[1] - scores[0])
    print("gains in accuracy:", [round(gain, 4) for gain in gains])
    assert min(gains) > 0
    assert sum(gains) / 5 > 0.01


class Views:
    """Two looks at every image: moved by a pixel, brighter or darker, noisy, with holes."""

    def __init__(self, images, seed, size=200):
        self.images, self.size = images, size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.images) // self.size

    def __iter__(self):
        order = torch.randperm(len(self.images), generator=self.generator)
        for rows in order.split(self.size)[: len(self)]:
            yield self.seen(self.images[rows]), self.seen(self.images[rows])

    def seen(self, images):
        draw, count = self.generator, len(images)
        padded = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
        top, left = torch.randint(0, 3, (2, count), generator=draw)
        moved = padded[torch.arange(count), :, top, left]
        moved = moved * (0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=draw))
        moved = moved + 0.1 * torch.randn(images.shape, generator=draw)
        return moved * (torch.rand(images.shape, generator=draw) > 0.15)


class Encoder(nn.Module):
    """A body to be probed and the head that SimCLR compares."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.head(self.body(x))

    def unpack_batch(self, batch):
        return (batch[0],), batch[1]


def probe_of(digits, embed):
    """The linear probe's accuracy on images that no training saw."""
    x, y = digits
    bank = DataLoader(TensorDataset(x[:TRAINED], y[:TRAINED]), batch_size=500)
    held = DataLoader(TensorDataset(x[TRAINED:], y[TRAINED:]), batch_size=500)
    probe = EmbeddingProbe(bank, embed=embed)
    return lambda model: probe(SimpleNamespace(model=model, val_loader=held)).accuracy


def test_simclr_s_probe_beats_that_of_a_random_encoder(digits):
    probe = probe_of(digits, lambda net, x: net.body(x))
    gains = []
    for seed in range(3):
        nnx.set_seed(seed)
        model = NNModel(module=Encoder(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
        before = probe(model)
        run = params(Views(digits[0][:TRAINED], seed), 60, seed)
        model.train(run, objective=simclr_objective(temperature=0.2))
        gains.append((before, probe(model)))
    print("random, trained:", [(round(a, 3), round(b, 3)) for a, b in gains])
    assert min(after - before for before, after in gains) > 0.08


def test_a_mixture_s_modes_are_all_visited():
    """Eight clusters on a circle: each gets its eighth of the samples to within 4 points."""
    angles = torch.arange(8) * math.pi / 4
    centres = 2 * torch.stack((angles.cos(), angles.sin()), dim=1)
    nnx.set_seed(0)
    points = centres.repeat(500, 1) + 0.1 * torch.randn(4000, 2)
    spec = ModelSpec("diffusion.mlp", config={"input_dim": 2, "time_embed_dim": 16})
    model = NNModel(params=NNModelParams(net=spec, loss=Losses.MEAN_SQUARED_ERROR))
    assert isinstance(model.net, DiffusionMLP)
    run = model.train(
        params(batches(points, size=200), 200, 0),
        objective=diffusion_objective(NoiseSchedulers.COSINE(T=100), seed=0),
        callbacks=[EMA(0.998)],
    )
    samples = sample_run(
        run.id, (4000, 2), tag="ema", steps=100, eta=1.0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    distances = torch.cdist(samples, centres)
    near = distances.min(dim=1).values < 0.5
    shares = distances.argmin(dim=1)[near].bincount(minlength=8) / 4000
    print("shares of the modes:", [round(share, 3) for share in shares.tolist()])
    assert float((shares - 1 / 8).abs().max()) < 0.04
    assert float(near.double().mean()) > 0.9


@pytest.mark.timeout(600)
def test_digits_are_drawn_as_they_are_asked_for(digits):
    """Guided samples are read by a classifier of real digits as the class they were told."""
    x, y = 2 * digits[0] - 1, digits[1]
    spec = ModelSpec("diffusion.unet", config={"width": 16, "multipliers": [1, 2], "n_classes": 10})
    nnx.set_seed(0)
    model = NNModel(params=NNModelParams(net=spec, loss=Losses.MEAN_SQUARED_ERROR))
    objective = diffusion_objective(
        zero_terminal_snr(NoiseSchedulers.COSINE(T=200)), seed=0, prediction="velocity",
        min_snr=5.0, class_dropout=0.1,
    )  # fmt: skip
    run = model.train(
        params(batches(x, y, size=64), 20, 0, lr=2e-3), objective=objective, callbacks=[EMA(0.995)]
    )
    asked = torch.arange(10).repeat_interleave(20)
    samples = sample_run(
        run.id, (200, 1, 8, 8), tag="ema", steps=40, classes=asked, guidance=1.5,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    linear = pytest.importorskip("sklearn.linear_model").LogisticRegression(max_iter=2000)
    linear.fit(x.flatten(1).numpy(), y.numpy())
    read = torch.tensor(linear.predict(samples.clamp(-1, 1).flatten(1).numpy()))
    share = float((read == asked).double().mean())
    print("read as asked:", share)
    assert share > 0.9
    spread = torch.stack([samples[asked == c].std(dim=0).mean() for c in range(10)])
    assert float(spread.min()) > 0.1  # not one picture for each class


def jepa_encoder(seed):
    nnx.set_seed(seed)
    net = NNViTParams(
        input_dim=64, output_dim=32, dropout_prob=0.0, image_size=8, patch_size=2, in_channels=1,
        d_model=32, n_layers=2, n_heads=2,
    )  # fmt: skip
    return NNModel(
        net_params=net, params=NNModelParams(net=Nets.VIT, loss=Losses.MEAN_SQUARED_ERROR)
    )


@pytest.mark.timeout(900)
def test_i_jepa_s_probe_beats_that_of_a_random_encoder(digits):
    images = (digits[0] - digits[0].mean()) / digits[0].std()
    probe = probe_of((images, digits[1]), lambda net, x: net(x)[:, 1:].mean(dim=1))
    gains = []
    for seed in range(3):
        model = jepa_encoder(seed)
        before = probe(model)
        target = build_target_encoder(model.net)
        model.net._jepa_predictor = JEPAPredictor(embed_dim=32, n_patches=16, n_layers=1)
        masks = BlockMasks(4, seed=seed, block_scale=(0.4, 0.7))
        objective = jepa_objective(target, model.net._jepa_predictor, masks, ema_momentum=0.999)
        run = params(batches(images[:TRAINED], digits[1][:TRAINED], size=50), 60, seed, lr=1e-3)
        model.train(run, objective=objective)
        gains.append((before, probe(model)))
    print("random, trained:", [(round(a, 3), round(b, 3)) for a, b in gains])
    assert min(after - before for before, after in gains) > 0.03
