"""Trains one paradigm in each process of a group, or in one alone, and writes what came of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from nnx import (
    JEPAPredictor,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    NNViTParams,
    build_target_encoder,
    jepa_objective,
    set_seed,
)
from nnx.distributed import DDP, init_process_group, shutdown
from nnx.paradigms import (
    EMA,
    BlockMasks,
    EmbeddingProbe,
    RoutingProbe,
    moe_objective,
    simclr_objective,
    vicreg_objective,
)
from small_models import X, Y, feed_forward, losses, mixture, numbers, self_distilled
from torch.utils.data import DataLoader, TensorDataset

ROWS = 16  # of every joined batch


def case(name, world):
    if name in ("simclr", "vicreg"):
        data = TensorDataset(X[:48], X[:48] + 0.1 * numbers(31, 48, 6))
        pieces = None if world == 1 else 3  # of each process's rows
        contrast = simclr_objective(temperature=0.3, microbatch=pieces)
        objective = contrast if name == "simclr" else vicreg_objective(invariance=1, variance=1)
        return feed_forward(out=8, dropout=0.0), objective, data
    if name in ("byol", "dino"):
        data = TensorDataset(X[:48], X[:48] + 0.1 * numbers(31, 48, 6))
        return *self_distilled(name), data
    if name == "jepa":  # every process draws the same masks
        set_seed(1)
        params = NNViTParams(
            input_dim=48, output_dim=8, dropout_prob=0.0, image_size=4, patch_size=1, d_model=8,
            n_layers=1, n_heads=2,
        )  # fmt: skip
        loss = NNModelParams(net=Nets.VIT, loss=Losses.MEAN_SQUARED_ERROR)
        model = NNModel(net_params=params, params=loss)
        target = build_target_encoder(model.net)
        model.net._predictor = JEPAPredictor(embed_dim=8, n_patches=16, n_layers=1)
        masks = BlockMasks(4, seed=7)
        objective = jepa_objective(target, model.net._predictor, masks, ema_momentum=0.5)
        return model, objective, TensorDataset(numbers(5, 48, 3, 4, 4), Y[:48])
    objective = moe_objective(aux_loss_weight=0.5)
    return mixture(experts=6, top_k=1), objective, TensorDataset(X[:48], Y[:48])


def train(name, world, folder):
    from nnx.distributed import train_loader, validation_loader

    model, objective, data = case(name, world)
    if world == 1:
        loader = DataLoader(data, batch_size=ROWS)
    else:
        loader = train_loader(data, ROWS // world, shuffle=False)
    held = TensorDataset(X[24:48], Y[24:48])
    if world == 1:
        val_loader = DataLoader(held, batch_size=ROWS)
    else:
        val_loader = validation_loader(held, ROWS // world)
    probe = RoutingProbe() if name == "moe" else EmbeddingProbe(DataLoader(held, batch_size=9))
    if name == "jepa":
        val_loader, probe = None, None
    rate = 0.01 if name == "jepa" else 0.5
    optim = NNOptimParams.builder().sgd(max_lr=rate).build()
    params = NNTrainParams(
        n_epochs=2, seed=3, train_loader=loader, val_loader=val_loader, optim=optim
    )
    spec = None if world == 1 else DDP(find_unused_parameters=True)
    os.chdir(folder)
    ema = EMA(0.9)
    run = model.train(
        params, objective=objective, distributed=spec, salt=f"{name} {world}", eval_step_fn=probe,
        callbacks=[ema],
    )  # fmt: skip
    weights = {n: v.double().flatten().tolist() for n, v in model.net.state_dict().items()}
    averaged = [p.double().sum().item() for p in ema.averaged.parameters()]
    probed = {} if probe is None else dict(run.idps[-1].val_edp.metrics)
    target = getattr(objective, "target_encoder", None)
    followed = [] if target is None else [p.double().sum().item() for p in target.parameters()]
    return {
        "losses": losses(run),
        "weights": weights,
        "probed": probed,
        "averaged": averaged + followed,
    }


def main():
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = init_process_group()
    found = {name: train(name, world, folder) for name in names}
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    shutdown()


if __name__ == "__main__":
    main()
