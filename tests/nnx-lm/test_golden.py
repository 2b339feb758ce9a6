"""Values that equal seeds and inputs must give: those of the original system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nnx import (
    NNOptimParams,
    NNPreferenceDataset,
    NNTrainParams,
    RepetitionPenalty,
    TemperatureScaling,
    TopKFilter,
    TopPFilter,
    apply_chain,
    dpo_train_step_factory,
    set_seed,
)
from nnx.lm_tasks import CausalLMTask
from nnx.objectives.contrastive import nt_xent
from torch.utils.data import DataLoader, TensorDataset

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "language_models.json").read_text(encoding="utf-8")
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def numbers(tensor, most=12):
    return tensor.detach().double().flatten()[:most].tolist()


@pytest.mark.parametrize(
    ("case", "drop"), [("nets_transformer", 0.0), ("nets_transformer_dropout", 0.3)]
)
def test_names_shapes_initial_weights_and_outputs(kit, case, drop):
    wanted = GOLDEN[case]
    net = kit.net(d_model=16, context=32, drop=drop)
    tokens = torch.randint(0, 40, (2, 12), generator=seeded(3))
    assert {n: list(v.shape) for n, v in net.state_dict().items()} == {
        n: shape for n, (shape, _) in wanted["weights"].items()
    }
    for name, value in net.state_dict().items():
        assert float(value.double().sum()) == pytest.approx(wanted["weights"][name][1], abs=2e-5)
    assert numbers(net.eval()(tokens)) == pytest.approx(wanted["eval"], abs=2e-6)
    net.train()
    set_seed(5)
    assert numbers(net(tokens)) == pytest.approx(wanted["train"], abs=2e-6)


def test_tokenizer(kit):
    tokenizer, wanted = kit.tokenizer("t.json"), GOLDEN["lm_tokenizer"]
    ids = tokenizer.encode("the cat ran to the hill")
    assert (ids, tokenizer.vocab_size) == (wanted["ids"], wanted["vocab"])
    assert (tokenizer.decode(ids), tokenizer.state()) == (wanted["text"], wanted["state"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_text(kit, use_cache):
    text = kit.model().generate("the cat", max_new_tokens=16, temperature=0, use_cache=use_cache)
    assert text == GOLDEN["lm_generate_greedy"]["text"]


def test_a_chain_of_processors():
    logits = torch.randn(1, 30, generator=seeded(9))[0]
    stages = [RepetitionPenalty(1.4), TemperatureScaling(0.6), TopKFilter(8), TopPFilter(0.7)]
    out = apply_chain(logits, token_history=[1, 2, 2, 5], processors=stages)
    wanted = [float("-inf") if v == "-inf" else v for v in GOLDEN["lm_chain"]["out"]]
    assert out.tolist() == pytest.approx(wanted, abs=1e-5)


def trained(model, loader, *, n_epochs=3, **options):
    params = {k: options.pop(k) for k in ("val_loader", "optim") if k in options}
    run = model.train(
        NNTrainParams(n_epochs=n_epochs, seed=3, train_loader=loader, **params), **options
    )
    weight = float(sum(p.detach().double().abs().sum() for p in model.net.parameters()))
    return run, weight


def rows_of(kit, tokenizer):
    return torch.tensor([(tokenizer.encode(x) + [0] * 20)[:20] for x in (kit.texts * 3)[:24]])


def test_training_with_the_task(kit):
    model, wanted = kit.model(), GOLDEN["lm_train_task"]
    rows = rows_of(kit, model.tokenizer)
    task = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0)
    run, weight = trained(
        model,
        DataLoader(rows, batch_size=6, shuffle=True),
        val_loader=DataLoader(rows, batch_size=6),
        objective=task.objective(),
        eval_step_fn=task.eval_step(),
        optim=NNOptimParams.builder().adamw(max_lr=3e-3).accumulate_grad(2).build(),
    )
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(wanted["loss"], rel=2e-4)
    assert all(p.train_edp.error is None for p in run.idps)
    assert weight == pytest.approx(wanted["weight"], rel=2e-4)
    validation = run.idps[-1].val_edp
    assert validation.loss == pytest.approx(wanted["val"][-1], rel=2e-4)
    assert dict(validation.metrics) == pytest.approx(wanted["metrics"], rel=2e-4)


def test_training_with_the_default_step(kit):
    model, wanted = kit.model(), GOLDEN["lm_train_default_step"]
    rows = rows_of(kit, model.tokenizer)
    data = TensorDataset(rows[:, :-1], rows[:, 1:])
    run, weight = trained(model, DataLoader(data, batch_size=6, shuffle=True))
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(wanted["loss"], rel=2e-4)
    assert [p.train_edp.error for p in run.idps] == pytest.approx(wanted["error"], abs=1e-6)
    assert weight == pytest.approx(wanted["weight"], rel=2e-4)


def test_preference_training(kit):
    model, reference, wanted = kit.model(), kit.model(), GOLDEN["lm_dpo_first_loss"]
    pairs = NNPreferenceDataset(
        prompts=kit.texts[:8], chosen=kit.texts[1:9], rejected=kit.texts[2:10],
        tokenizer=model.tokenizer, max_prompt_len=16, max_response_len=16,
        batch_sizes=(4, 2, 2), seed=5,
    )  # fmt: skip
    assert [list(part.shape) for part in next(iter(pairs.train_loader))] == wanted["shapes"]
    run, weight = trained(
        model,
        pairs.train_loader,
        n_epochs=1,
        train_step_fn=dpo_train_step_factory(reference, beta=0.2),
    )
    wanted = wanted["run"]
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(wanted["loss"], rel=2e-4)
    assert [p.train_edp.error for p in run.idps] == pytest.approx(wanted["error"], rel=2e-4)
    assert weight == pytest.approx(wanted["weight"], rel=2e-4)


def test_the_contrastive_loss():
    a, b = torch.randn(6, 5, generator=seeded(41)), torch.randn(6, 5, generator=seeded(42))
    found = [float(nt_xent(a, b, t)) for t in (0.1, 0.5, 1.0)]
    assert found == pytest.approx(GOLDEN["par_nt_xent"]["v"], abs=2e-6)
