"""Runs on disk, made by the store itself, for the report and the live view."""

from __future__ import annotations

import math
import random

from nnx.enums import Checkpoints, Nets, Optims
from nnx.params import NNModelParams, NNOptimParams, NNParams, NNTrainParams
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint, ResumeStatus
from nnx.store import NNCheckpoint, NNRun, RunWriter
from torch import nn


def record(epoch, batch, batches, *, lr=0.05, rate=0.05, seed=0, val=True):
    step = epoch * batches + batch
    noise = random.Random(seed * 10_007 + step).random()
    loss = 1.2 * math.exp(-step * rate) + 0.1 + 0.1 * noise
    train = NNEvaluationDataPoint(loss=loss, error=loss / 2, accuracy=1 - loss / 2)
    point = NNIterationDataPoint(
        lr=lr * 0.9**epoch, iter_idx=step, epoch_idx=epoch, batch_idx=batch, train_edp=train
    )
    if val and batch == batches - 1:
        value = 1.2 * math.exp(-step * rate) + 0.12 + 0.02 * epoch
        point = point.with_val_edp(
            NNEvaluationDataPoint(loss=value, error=value / 2, accuracy=1 - value / 2,
                                  metrics={"nll": value})
        )  # fmt: skip
    return point


def configuration(seed=0, lr=0.05, n_epochs=5, parent=None, **more):
    return NNRun(
        net=NNParams(input_dim=4, output_dim=3, dropout_prob=0.1, hidden_dims=[8]),
        model=NNModelParams(net=Nets.FEED_FWD),
        train=NNTrainParams(
            n_epochs=n_epochs,
            seed=seed,
            optim=NNOptimParams(
                name=Optims.ADAM, max_lr=lr, weight_decay=0.0, momentum=(0.9, 0.999)
            ),
            parent_run_id=parent,
            **more,
        ),
    )


def commit(writer, epoch, records, best):
    for point in records:
        writer.append(point)
    run = writer.run
    checkpoint = NNCheckpoint(
        net_params=run.net,
        net_state=nn.Linear(4, 3).state_dict(),
        model_params=run.model,
        idp=records[-1],
    )
    phases = (Checkpoints.FIRST,) if epoch == 0 else ()
    writer.commit_epoch(
        checkpoint, {"optimizer_state": {}, "completed_epoch": epoch}, phases=phases, best=best
    )


def make_run(root, *, seed=0, lr=0.05, n_epochs=5, epochs=None, batches=4, parent=None, **more):
    """A run as training would leave it; returns the ``NNRun``."""
    run = configuration(seed, lr, n_epochs, parent, **more)
    if parent is not None:
        run = run.with_resume_status(
            ResumeStatus(
                mode="stateful", source_run_id=parent, source_checkpoint="last", source_epoch=4
            )
        )
    best = math.inf
    with RunWriter.open(run, root=str(root)) as writer:
        for epoch in range(n_epochs if epochs is None else epochs):
            records = [record(epoch, b, batches, lr=lr, rate=lr, seed=seed) for b in range(batches)]
            score = records[-1].val_edp.error
            commit(writer, epoch, records, score < best)
            best = min(best, score)
        return writer.finish()
