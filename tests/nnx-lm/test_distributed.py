"""Two processes over one corpus train to the weights of one that reads both of their batches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from nnx import Checkpoints, NNCheckpoint, NNRun

SCRIPT = """
import os
from nnx import (
    Losses, Nets, NNModel, NNModelParams, NNOptimParams, NNTokenizerParams, NNTrainParams,
    NNTransformerParams, set_seed,
)
from nnx.distributed import DDP, init_process_group, shutdown
from nnx.lm import PackedLoader, PackedTokens, write_tokens
from nnx.lm_tasks import CausalLMTask

alone = "RANK" not in os.environ
if not alone:
    init_process_group("gloo")
tokenizer = NNTokenizerParams.from_state({"path": "tok.json"})
tokens = write_tokens(["text.txt"], tokenizer, "c.tokens", documents="line")
set_seed(1)
shape = NNTransformerParams.builder().vocab(tokenizer.vocab_size).context(max_seq_len=16)
model = NNModel(
    shape.layers(n=1, heads=2, d_model=16).build(),
    NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
)
packed = PackedTokens(tokens, 8, last=48)
train, held = packed.split(0.25)
size = 6 if alone else 3
task = CausalLMTask(vocab_size=tokenizer.vocab_size, alignment="pre_shifted")
params = NNTrainParams(
    n_epochs=2, seed=0, train_loader=PackedLoader(train, size, seed=5),
    val_loader=PackedLoader(held, size, validation=True), data_id="alone" if alone else "two",
    optim=NNOptimParams.builder().sgd(max_lr=0.3).build(),
)
model.train(
    params, objective=task.objective(), eval_step_fn=task.eval_step(),
    distributed=None if alone else DDP(),
)
if not alone:
    shutdown()
"""


def test_processes_share_a_corpus(kit, tmp_path):
    kit.tokenizer()
    (tmp_path / "text.txt").write_text("\n".join(kit.texts * 4), encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for arguments in ([], launch):
        done = subprocess.run(
            [sys.executable, *arguments, str(script)], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=170,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    runs = {run.train.data_id: run for run in NNRun.all(str(tmp_path / "runs"))}
    states = [
        NNCheckpoint.load(runs[name].id, Checkpoints.LAST, str(tmp_path / "runs")).net_state
        for name in ("alone", "two")
    ]
    for name, weight in states[0].items():
        assert torch.allclose(weight, states[1][name], atol=1e-5), name
    one, two = (runs[name].idps[-1].val_edp for name in ("alone", "two"))
    assert one.count == two.count
    assert dict(two.metrics) == pytest.approx(dict(one.metrics), rel=1e-4)
