"""Trains on scikit-learn's digits and draws the pictures of docs/paradigms.

``python tools/paradigm_pictures.py [NAME ...]`` writes all of them, or the named ones, in
a few minutes on one core. The same seeds give the same pictures.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import nnx
import torch
from nnx import (
    JEPAPredictor,
    Losses,
    ModelSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNMoEParams,
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
from nnx.paradigms import (
    EMA,
    BlockMasks,
    EmbeddingProbe,
    MixingObjective,
    RoutingProbe,
    byol_objective,
    mixup_objective,
    moe_objective,
    simclr_objective,
    vicreg_objective,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "paradigms"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
TRAINED = 1000

_found = load_digits()
_order = torch.randperm(len(_found.target), generator=torch.Generator().manual_seed(0))
IMAGES = torch.tensor(_found.images / 16.0, dtype=torch.float32)[_order][:, None]
CLASSES = torch.tensor(_found.target)[_order]
SQUARED = NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)


def loader(*tensors: torch.Tensor, size: int = 32, shuffle: bool = True) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=shuffle)


HELD = loader(IMAGES[TRAINED:].flatten(1), CLASSES[TRAINED:], size=400, shuffle=False)


def params(train_loader: object, epochs: int, lr: float = 3e-3, **more: object) -> NNTrainParams:
    optim = NNOptimParams.builder().adamw(max_lr=lr).build()
    return NNTrainParams(
        n_epochs=epochs, seed=0, train_loader=train_loader, optim=optim,
        save_phase_checkpoints=False, **more,
    )  # fmt: skip


def classifier(hidden: int, dropout: float = 0.0) -> NNModel:
    nnx.set_seed(0)
    net = NNParams(input_dim=64, output_dim=10, hidden_dims=[hidden], dropout_prob=dropout)
    return NNModel(
        net_params=net, params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY)
    )


def validations(run: object, read: Callable[[object], float]) -> list[tuple[float, float]]:
    records = [(p.epoch_idx + 1.0, p.val_edp) for p in run.idps if p.val_edp is not None]
    return [(epoch, read(record)) for epoch, record in records]


# -- drawing ----------------------------------------------------------------------------


def draw(name: str, title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A chart of ``lines`` over epochs."""
    width, height, left, top, bottom = 640, 300, 52, 40, 36
    every = [point for line in lines.values() for point in line]
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    y0, y1 = min(y for _, y in every), max(y for _, y in every)
    parts = [f"<text x='{left}' y='18' font-weight='bold'>{title}</text>"]
    for y in (y0, (y0 + y1) / 2, y1):
        down = top + (y1 - y) / (y1 - y0) * (height - top - bottom)
        parts.append(f"<path d='M{left} {down:.1f}H{width - 10}' stroke='#d0d7de'/>")
        parts.append(f"<text x='{left - 6}' y='{down + 4:.1f}' text-anchor='end'>{y:.3g}</text>")
    for x, anchor in ((x0, "start"), (x1, "end")):
        across = left + (x - x0) / (x1 - x0) * (width - left - 10)
        parts.append(f"<text x='{across}' y='{height - 18}' text-anchor='{anchor}'>{x:g}</text>")
    parts.append(f"<text x='{width / 2}' y='{height - 4}' text-anchor='middle'>epochs</text>")
    for index, (label, line) in enumerate(lines.items()):
        points = " ".join(
            f"{left + (x - x0) / (x1 - x0) * (width - left - 10):.1f},"
            f"{top + (y1 - y) / (y1 - y0) * (height - top - bottom):.1f}"
            for x, y in line
        )
        colour = COLOURS[index]
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>"
        )
        parts.append(f"<text x='{left + 150 * index}' y='34' fill='{colour}'>{label}</text>")
    (FOLDER / f"{name}.svg").write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"font-family='sans-serif' font-size='12'>{''.join(parts)}</svg>\n",
        encoding="utf-8",
    )


def tile(name: str, images: torch.Tensor, columns: int, scale: int = 4) -> None:
    """``images`` (N, H, W) in [0, 1] as one grey PNG, row by row."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=1.0)
    rows = padded.unflatten(0, (-1, columns)).transpose(1, 2).flatten(0, 1).flatten(1)
    grey = (255 * rows).byte().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    raw = b"".join(b"\0" + bytes(row.tolist()) for row in grey)

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    (FOLDER / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)


# -- the trainings ----------------------------------------------------------------------


def distillation() -> None:
    x = IMAGES.flatten(1)
    teacher = classifier(256, dropout=0.5)
    teacher.train(params(loader(x[:TRAINED], CLASSES[:TRAINED]), 60))
    lines = {}
    for label, objective in (
        ("alone", None),
        ("taught", kd_objective(teacher, alpha=0.9, temperature=6.0)),
    ):
        run = classifier(32).train(
            params(loader(x[:150], CLASSES[:150]), 100, val_loader=HELD, data_id=label),
            objective=objective,
        )
        lines[label] = validations(run, lambda record: record.accuracy)
    draw("distillation", "A student of 150 digits: accuracy on 797 others", lines)


def mixing() -> None:
    x, y = IMAGES[:600], CLASSES[:600].clone()
    draws = torch.Generator().manual_seed(0)
    wrong = torch.rand(600, generator=draws) < 0.4
    y[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=draws)
    lines = {}
    for label, objective in (
        ("plain", None),
        ("Mixup", mixup_objective(alpha=1.0, seed=0)),
        ("Mixup or CutMix", MixingObjective(mixup_alpha=1.0, cutmix_alpha=1.0, seed=0)),
    ):
        run = classifier(128).train(
            params(loader(x, y), 60, val_loader=HELD, data_id=label), objective=objective
        )
        lines[label] = validations(run, lambda record: record.accuracy)
    draw("mixing", "600 digits, four in ten with a random label: accuracy on 797 others", lines)


class Views:
    """Two looks at every image: moved by a pixel, brighter or darker, noisy, with holes."""

    def __init__(self, images: torch.Tensor, size: int = 200) -> None:
        self.images, self.size = images, size
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.images) // self.size

    def __iter__(self):
        order = torch.randperm(len(self.images), generator=self.generator)
        for rows in order.split(self.size)[: len(self)]:
            yield self.seen(self.images[rows]), self.seen(self.images[rows])

    def seen(self, images: torch.Tensor) -> torch.Tensor:
        draw, count = self.generator, len(images)
        windows = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
        top, left = torch.randint(0, 3, (2, count), generator=draw)
        moved = windows[torch.arange(count), :, top, left]
        moved = moved * (0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=draw))
        moved = moved + 0.1 * torch.randn(images.shape, generator=draw)
        return moved * (torch.rand(images.shape, generator=draw) > 0.15)


class Encoder(nn.Module):
    """A body to be probed and a head to be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16),
            nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def unpack_batch(self, batch):
        return (batch[0],), batch[1]


def probe(images: torch.Tensor, embed: Callable[..., torch.Tensor]) -> tuple:
    """The evaluation step, and the loader of the images that no training saw."""
    bank = loader(images[:TRAINED], CLASSES[:TRAINED], size=500, shuffle=False)
    held = loader(images[TRAINED:], CLASSES[TRAINED:], size=500, shuffle=False)
    return EmbeddingProbe(bank, neighbours=None, embed=embed), held


def embeddings() -> None:
    step, held = probe(IMAGES, lambda net, x: net.body(x))
    lines = {}
    for label in ("SimCLR", "VICReg", "BYOL"):
        nnx.set_seed(0)
        model = NNModel(module=Encoder(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
        target = build_target_encoder(model.net)
        if label == "BYOL":
            model.net._predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        if label == "SimCLR":
            objective = simclr_objective(temperature=0.2)
        elif label == "VICReg":
            objective = vicreg_objective()
        else:
            objective = byol_objective(target, model.net._predictor, ema_momentum=0.95)
        run = model.train(
            params(Views(IMAGES[:TRAINED]), 60, val_loader=held, data_id=label),
            objective=objective, eval_step_fn=step,
        )  # fmt: skip
        lines[label] = validations(run, lambda record: record.accuracy)
    draw("embeddings", "Linear probe of 16 numbers for a digit, learned without labels", lines)


def jepa() -> None:
    images = (IMAGES - IMAGES.mean()) / IMAGES.std()
    step, held = probe(images, lambda net, x: net(x)[:, 1:].mean(dim=1))
    nnx.set_seed(0)
    net = NNViTParams(
        input_dim=64, output_dim=32, dropout_prob=0.0, image_size=8, patch_size=2, in_channels=1,
        d_model=32, n_layers=2, n_heads=2,
    )  # fmt: skip
    model = NNModel(
        net_params=net, params=NNModelParams(net=Nets.VIT, loss=Losses.MEAN_SQUARED_ERROR)
    )
    target = build_target_encoder(model.net)
    model.net._jepa_predictor = JEPAPredictor(embed_dim=32, n_patches=16, n_layers=1)
    masks = BlockMasks(4, seed=0, block_scale=(0.4, 0.7))
    run = model.train(
        params(
            loader(images[:TRAINED], CLASSES[:TRAINED], size=50), 60, lr=1e-3, val_loader=held
        ),
        objective=jepa_objective(target, model.net._jepa_predictor, masks, ema_momentum=0.999),
        eval_step_fn=step,
    )  # fmt: skip
    lines = {
        "linear probe": validations(run, lambda record: record.accuracy),
        "effective rank / 10": validations(run, lambda r: r.metrics["effective_rank"] / 10),
    }
    draw("jepa", "I-JEPA on digits: what the embeddings tell", lines)


def experts() -> None:
    x = IMAGES.flatten(1)
    lines = {}
    for label, weight in (("without balance", 0.0), ("balance 0.05", 0.05)):
        nnx.set_seed(0)
        net = NNMoEParams(
            input_dim=64, output_dim=10, hidden_dims=[32], dropout_prob=0.0, num_experts=8, top_k=1
        )
        model = NNModel(
            net_params=net,
            params=NNModelParams(net=Nets.FEED_FWD_MOE, loss=Losses.CROSS_ENTROPY),
        )
        run = model.train(
            params(
                loader(x[:TRAINED], CLASSES[:TRAINED]), 30, val_loader=HELD, data_id=label
            ),
            objective=moe_objective(aux_loss_weight=weight),
            eval_step_fn=RoutingProbe(),
        )  # fmt: skip
        lines[label] = validations(run, lambda record: record.metrics["moe_max_load"])
    draw("experts", "The busiest of 8 experts, in even shares", lines)


def averages() -> None:
    x = IMAGES.flatten(1)
    lines = {}
    for label, ema in (("as trained", None), ("average", EMA(0.99))):
        run = classifier(64).train(
            params(
                loader(x[:600], CLASSES[:600], size=8), 30, lr=3e-2, val_loader=HELD, data_id=label
            ),
            callbacks=[] if ema is None else [ema],
            eval_step_fn=None if ema is None else ema.eval_step(),
        )  # fmt: skip
        lines[label] = validations(run, lambda record: record.accuracy)[2:]
    draw("averages", "A learning rate that is too high: accuracy on 797 digits", lines)


def diffusion() -> None:
    spec = ModelSpec("diffusion.unet", config={"width": 16, "multipliers": [1, 2], "n_classes": 10})
    nnx.set_seed(0)
    model = NNModel(params=NNModelParams(net=spec, loss=Losses.MEAN_SQUARED_ERROR))
    objective = diffusion_objective(
        zero_terminal_snr(NoiseSchedulers.COSINE(T=200)), seed=0, prediction="velocity",
        min_snr=5.0, class_dropout=0.1,
    )  # fmt: skip
    run = model.train(
        params(loader(2 * IMAGES - 1, CLASSES, size=64), 20, lr=2e-3),
        objective=objective, callbacks=[EMA(0.995)],
    )  # fmt: skip
    samples = sample_run(
        run.id, (80, 1, 8, 8), tag="ema", steps=40, classes=torch.arange(10).repeat(8),
        guidance=1.5, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    tile("diffusion", 1 - (samples[:, 0].clamp(-1, 1) + 1) / 2, columns=10)
    epochs = {p.epoch_idx: p for p in run.idps}
    loss = [(epoch + 1.0, p.monitored_train_edp().loss) for epoch, p in epochs.items()]
    draw("diffusion", "The weighted error of the velocity", {"training": loss})


PICTURES = {
    function.__name__: function
    for function in (
        distillation, embeddings, mixing, experts, jepa, averages, diffusion,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    os.environ["NNX_TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names or PICTURES:
            PICTURES[name]()
        os.chdir(FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
