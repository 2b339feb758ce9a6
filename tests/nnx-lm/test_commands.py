"""``nnx lm``: train on text, resume a killed training, write, and talk."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from nnx import GenerativeNNModel, NNOptimParams, NNRun, NNTrainParams
from nnx.cli.app import build
from nnx.lm import ChatDataset, TextTraining, train_text
from nnx.lm_tasks import CausalLMTask
from nnx.store.election import standings
from torch.utils.data import DataLoader
from typer.testing import CliRunner

SMALL = ["--vocab-size", "300", "--layers", "1", "--heads", "2", "--width", "16"]
SMALL += ["--context", "16", "--batch", "4", "--quiet"]


@pytest.fixture
def text(kit, tmp_path, monkeypatch):
    monkeypatch.setenv("NNX_RUNS", "runs")
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text("\n".join(kit.texts * 2), encoding="utf-8")
    return folder


def nnx(*arguments, fails=False, **options):
    result = CliRunner().invoke(build(), list(map(str, arguments)), **options)
    assert (result.exit_code != 0) == fails, result.output
    return result.output


def test_training_shows_how_good_the_model_is_and_the_model_writes(text, tmp_path):
    out = nnx("lm", "train", text, *SMALL, "--epochs", 3)
    lines = re.findall(
        r"epoch (\d)/3  train loss [\d.]+  loss ([\d.]+)  perplexity ([\d.]+)  bits/byte ([\d.]+)"
        r"  [\d,]+ tokens/s",
        out,
    )
    assert [line[0] for line in lines] == ["1", "2", "3"]
    loss, perplexity, bits = map(float, lines[-1][1:])
    assert perplexity == pytest.approx(math.exp(loss), rel=0.02)
    bytes_per_token = float(re.search(r"\(([\d.]+) bytes each\)", out)[1])
    assert bits == pytest.approx(loss / math.log(2) / bytes_per_token, rel=0.02)
    assert float(lines[0][1]) > loss
    run = NNRun.all()[0]
    written = nnx("lm", "generate", run.id[:6], "the cat", "-n", 20, "-t", 0)
    model = GenerativeNNModel.from_run(run.id)
    assert written.startswith("the cat")
    again = nnx("lm", "generate", "best", "the cat", "--seed", 4, "-n", 12)
    assert again == nnx("lm", "generate", "best", "the cat", "--seed", 4, "-n", 12)
    assert model.tokenizer.path == os.path.join("lm", "tokenizer.json")
    larger = nnx("lm", "train", text, *SMALL, "--epochs", 1, "--batch", 2)
    assert "using the tokenizer" in larger
    assert len({one.data for one in standings("runs").values()}) == 1  # judged on one text


def test_a_killed_training_is_resumed_to_the_same_model(text, monkeypatch):
    monkeypatch.setattr("nnx.lm.text_run._POINT_EVERY", 5)
    code = "import nnx.lm.text_run as t; t._POINT_EVERY = 5; from nnx.cli import main; main()"
    arguments = ["lm", "train", str(text), *SMALL, "--epochs", "9"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    [killed] = NNRun.all()
    out = nnx("lm", "train", "--resume", killed.id[:8])
    resumed = next(run for run in NNRun.all() if run.id != killed.id)
    assert "epoch 9/9" in out
    nnx("lm", "train", text, *SMALL, "--epochs", 9, "--runs", "whole")
    [whole] = NNRun.all("whole")
    one = GenerativeNNModel.from_run(resumed.id, root="runs").net.state_dict()
    other = GenerativeNNModel.from_run(whole.id, root="whole").net.state_dict()
    assert all((one[name] == other[name]).all() for name in one)


def test_refusals_say_what_to_do_and_reserve_no_run(text, tmp_path):
    assert "name text files or folders" in nnx("lm", "train", fails=True)
    assert "no file or folder" in nnx("lm", "train", "absent", fails=True)
    assert "give FILES or --resume" in nnx("lm", "train", text, "--resume", "x", fails=True)
    assert "n_heads" in nnx("lm", "train", text, *SMALL, "--heads", 5, fails=True)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_learned_from_conversations_talks(kit, text):
    model, run = train_text(
        [text],
        "lm",
        TextTraining(vocab_size=300, layers=1, width=32, heads=2, context=64, epochs=1),
    )
    data = ChatDataset(
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}],
        model.tokenizer,
    )
    loader = DataLoader(data, batch_size=1, collate_fn=data.collate)
    task = CausalLMTask(vocab_size=model.tokenizer.vocab_size)
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).build()
    tuned = model.train(
        NNTrainParams(n_epochs=60, seed=0, train_loader=loader, optim=optim),
        objective=task.objective(),
    )
    out = nnx("lm", "chat", tuned.id, "-t", 0, input="hi\n\n")
    assert out.strip() == "ho"
    assert not nnx("lm", "chat", run.id, input="")
    other = kit.model()
    other_run = other.train(
        NNTrainParams(n_epochs=1, train_loader=[data.collate([data[0]])["input_ids"] % 70]),
        objective=CausalLMTask(vocab_size=76).objective(),
    )
    assert "has no token '<|end|>'" in nnx("lm", "chat", other_run.id, input="hi\n", fails=True)
