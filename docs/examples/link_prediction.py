"""Shows: a model of links beats counting neighbours, and no held-out edge carries a message."""

from __future__ import annotations

import torch
from nnx import Losses, MonitorSpec, NNModel, NNModelParams, NNOptimParams, NNTrainParams
from nnx.link_tasks import LinkTask, link_predictor_spec, split_links

# A graph of six blocks: members of a block are linked often, and their features are alike.
generator = torch.Generator().manual_seed(0)
block = torch.arange(240) % 6
chance = torch.where(block[:, None] == block, 0.14, 0.008)
edges = (torch.rand(240, 240, generator=generator) < chance).triu(1).nonzero().T
x = torch.randn(6, 16, generator=generator)[block]
x = x + 1.5 * torch.randn(240, 16, generator=generator)

split = split_links(edges, 240, val=0.15, test=0.15, seed=1)
task = LinkTask(split)
model = NNModel(
    params=NNModelParams(
        net=link_predictor_spec(input_dim=16, hidden_dims=(32, 16), encoder="graph_conv"),
        loss=Losses.BINARY_CROSS_ENTROPY,
    )
)
model.train(
    NNTrainParams(
        n_epochs=40, seed=0, metrics=tuple(task.metric_specs()), monitor=MonitorSpec("auroc"),
        train_loader=task.loader("train", x, 512), val_loader=task.loader("val", x, 4096),
        optim=NNOptimParams.builder().adam(max_lr=0.01).build(),
    ),
    objective=task.objective(),
    eval_step_fn=task.eval_step(),
)  # fmt: skip
report = task.report(task.predict(model, task.loader("test", x, 4096)), k=(20,))
for scorer, figures in report.items():
    print(scorer, *(f"{name} {figure.value:.3f}" for name, figure in figures.items()))
messages = set(map(tuple, split.message_edge_index().T.tolist()))
held_out = {*split.val, *split.test}
print(f"{len(held_out)} edges held out, {len(messages & held_out)} of them carry messages")
assert not messages & {(v, u) for u, v in held_out}
assert split.replay(edges) == split
