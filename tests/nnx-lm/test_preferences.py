"""Preference pairs and DPO: the loss by hand, stored references, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from nnx import NNOptimParams, NNPreferenceDataset, NNTrainParams, dpo_train_step_factory
from nnx.lm import DPOObjective, ReferenceLogProbs
from nnx.objectives import build_objective


def pairs(kit, tokenizer, **options):
    options = {"max_prompt_len": 16, "max_response_len": 12, "seed": 5, **options}
    return NNPreferenceDataset(
        prompts=kit.texts[:12], chosen=kit.texts[1:13], rejected=kit.texts[2:14],
        tokenizer=tokenizer, batch_sizes=(4, 4, 4), **options,
    )  # fmt: skip


def train(model, loader, *, n_epochs=1, lr=1e-2, **options):
    optim = NNOptimParams.builder().adamw(max_lr=lr).build()
    params = NNTrainParams(
        n_epochs=n_epochs, seed=3, train_loader=loader, optim=optim, overwrite_existing=True
    )
    return model.train(params, **options)


def log_prob(net, prompt, response):
    """The summed log-probability of one response, token by token."""
    total, ids = 0.0, list(prompt)
    with torch.no_grad():
        for token in response:
            total += float(net(torch.tensor([ids]))[0, -1].double().log_softmax(-1)[token])
            ids.append(token)
    return total


def test_batches_are_cut_and_padded_on_the_right(kit):
    tokenizer = kit.tokenizer()
    data = pairs(kit, tokenizer, max_prompt_len=4, pad_token_id=7)
    assert (len(data), data.name, data.output_dim) == (12, "preferences", tokenizer.vocab_size)
    prompt, chosen, rejected = next(iter(data.val_loader))
    assert prompt.shape[1] == 4
    assert chosen.shape == rejected.shape == (1, 12)
    rows = [tokenizer.encode(t)[:4] for t in kit.texts[:12]]
    assert all(row.tolist() in rows for row in prompt)
    short = NNPreferenceDataset(
        prompts=["the"], chosen=["cat"], rejected=["a dog"], tokenizer=tokenizer,
        max_prompt_len=3, max_response_len=3, pad_token_id=7, val_proportion=0, test_proportion=0,
    )  # fmt: skip
    prompt, chosen, rejected = next(iter(short.train_loader))
    assert prompt[0, 1:].tolist() == [7, 7]
    assert short.val_loader is None


def test_equal_seeds_give_equal_splits_and_draw_nothing_else(kit):
    tokenizer = kit.tokenizer()
    before = torch.get_rng_state()
    first, second = (pairs(kit, tokenizer, seed=1) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    same = zip(first.test_loader, second.test_loader)
    assert all(torch.equal(a, b) for left, right in same for a, b in zip(left, right))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": ["x"]}, "differ in length"),
        ({"prompts": [], "chosen": [], "rejected": []}, "no pairs"),
        ({"chosen": ["cat", ""]}, r"chosen\[1\] is '', which has no tokens"),
        ({"rejected": "ab"}, "a list of strings"),
        ({"max_response_len": 0}, "max_response_len"),
        ({"tokenizer": None}, "encode"),
        ({"val_proportion": 1.0}, "val_proportion"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(kit, change, message):
    tokenizer = kit.tokenizer()
    given = {"prompts": ["the", "a"], "chosen": ["cat", "dog"], "rejected": ["to", "be"]}
    with pytest.raises(ValueError, match=message):
        NNPreferenceDataset(**{"tokenizer": tokenizer, **given, **change})


# The loss -------------------------------------------------------------------------------------


def test_the_loss_of_a_model_against_itself_is_ln_2_with_dropout(kit):
    model, reference = kit.model(drop=0.4), kit.model(drop=0.4)
    data = pairs(kit, model.tokenizer)
    run = train(model, data.train_loader, train_step_fn=dpo_train_step_factory(reference))
    assert run.idps[0].train_edp.loss == pytest.approx(math.log(2), abs=1e-7)
    assert model.net.training
    assert not reference.net.training
    assert not any(p.requires_grad for p in reference.net.parameters())

    model = kit.model(drop=0.4)
    stored = data.with_reference(ReferenceLogProbs.compute(model, data))
    run = train(model, stored.train_loader, objective=DPOObjective())
    assert run.idps[0].train_edp.loss == pytest.approx(math.log(2), abs=1e-6)


def test_losses_and_rewards_by_hand(kit):
    model, reference = kit.model(), kit.model(seed=12)
    data = pairs(kit, model.tokenizer)
    stored = data.with_reference(ReferenceLogProbs.compute(reference, data, batch_size=5))

    class Context:
        val_loader = list(stored.val_loader) + list(stored.test_loader)

    Context.model = model
    record = DPOObjective(beta=0.3).eval_step()(Context)
    rows = data.sequences()
    held = [i for part in data._parts[1:] for i in part.indices]
    margins = []
    for i in held:
        prompt, chosen, rejected = rows[i]
        gains = [
            log_prob(model.net, prompt, r) - log_prob(reference.net, prompt, r)
            for r in (chosen, rejected)
        ]
        margins.append(gains[0] - gains[1])
    losses = [-math.log(1 / (1 + math.exp(-0.3 * m))) for m in margins]
    assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert record.metrics["reward_margin"] == pytest.approx(0.3 * sum(margins) / len(margins), 1e-4)
    assert record.metrics["reward_accuracy"] == sum(m > 0 for m in margins) / len(margins)


def test_padding_is_left_out_of_the_score(kit):
    model = kit.model()
    data = pairs(kit, model.tokenizer)
    batch = next(iter(data.train_loader))
    prompt, *responses = batch
    with torch.no_grad():
        scores = []
        for response in responses:
            logits = model.net(torch.cat((prompt, response), 1))[:, prompt.shape[1] - 1 : -1]
            each = -F.cross_entropy(logits.transpose(1, 2), response, reduction="none")
            scores.append((each * (response != 0)).sum(1))
        reference = kit.model(seed=12)
        theirs = []
        for response in responses:
            logits = reference.net(torch.cat((prompt, response), 1))[:, prompt.shape[1] - 1 : -1]
            each = -F.cross_entropy(logits.transpose(1, 2), response, reduction="none")
            theirs.append((each * (response != 0)).sum(1))
    margin = (scores[0] - theirs[0]) - (scores[1] - theirs[1])
    wanted = -F.logsigmoid(0.5 * margin).mean()
    step = dpo_train_step_factory(reference, beta=0.5, pad_token_id=0)
    run = train(model, [batch], train_step_fn=step)
    assert run.idps[0].train_edp.loss == pytest.approx(float(wanted), rel=1e-5)


def test_preferences_are_learned(kit):
    model, reference = kit.model(), kit.model()
    data = pairs(kit, model.tokenizer)
    stored = data.with_reference(ReferenceLogProbs.compute(reference, data))
    objective = DPOObjective(beta=0.5)
    run = train(model, stored.train_loader, n_epochs=6, lr=3e-3, objective=objective)
    first, last = run.idps[0].train_edp, run.idps[-1].train_edp
    assert last.loss < 0.3 < first.loss
    assert last.metrics["reward_accuracy"] == 1.0
    assert build_objective("lm.dpo", config={"beta": 0.5}).beta == 0.5


@pytest.mark.parametrize("beta", [0, -1, float("nan")])
def test_beta_is_above_zero(kit, beta):
    with pytest.raises(ValueError, match="beta"):
        dpo_train_step_factory(kit.model(), beta=beta)
    with pytest.raises(ValueError, match="beta"):
        DPOObjective(beta=beta)


def test_what_dpo_cannot_train_is_refused(kit):
    model = kit.model()
    data = pairs(kit, model.tokenizer)
    other = kit.model()
    other.net = model.net
    with pytest.raises(ValueError, match="shares parameters with its reference"):
        train(model, data.train_loader, train_step_fn=dpo_train_step_factory(other))
    with pytest.raises(ValueError, match="prompt_ids, chosen_ids, rejected_ids"):
        train(kit.model(), [torch.ones(2, 3)], train_step_fn=dpo_train_step_factory(model))
    with pytest.raises(ValueError, match="with_reference"):
        train(kit.model(), data.train_loader, objective=DPOObjective())


# Stored references ----------------------------------------------------------------------------


def test_stored_values_are_computed_once_and_bound_to_what_they_came_from(kit, tmp_path):
    model = kit.model()
    data = pairs(kit, model.tokenizer)
    path = tmp_path / "reference.safetensors"
    first = ReferenceLogProbs.cached(path, model, data)
    content = path.read_bytes()
    again = ReferenceLogProbs.cached(path, model, data)
    assert torch.equal(first.chosen, again.chosen)
    assert torch.equal(first.rejected, again.rejected)
    prompt, chosen, _ = data.sequences()[3]
    assert float(first.chosen[3]) == pytest.approx(log_prob(model.net, prompt, chosen), rel=1e-5)

    with pytest.raises(ValueError, match="the weights of the reference changed"):
        ReferenceLogProbs.cached(path, kit.model(seed=12), data)
    with pytest.raises(ValueError, match="the preference pairs changed"):
        ReferenceLogProbs.cached(path, model, pairs(kit, model.tokenizer, max_response_len=5))
    other = kit.tokenizer("other.json", byte_level=True)
    with pytest.raises(ValueError, match="the tokenizer changed"):
        pairs(kit, other).with_reference(first)
    assert path.read_bytes() == content


def test_a_file_of_another_kind_is_refused(tmp_path, kit):
    from safetensors.torch import save_file

    save_file({"chosen": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no reference log-probabilities"):
        ReferenceLogProbs.load(tmp_path / "x.safetensors")
    (tmp_path / "y").write_bytes(b"nothing of the kind, surely")
    with pytest.raises(ValueError, match="no safetensors file"):
        ReferenceLogProbs.load(tmp_path / "y")


def test_a_reference_keeps_splits_and_order(kit):
    model = kit.model()
    data = pairs(kit, model.tokenizer)
    stored = data.with_reference(ReferenceLogProbs.compute(model, data))
    for plain, full in zip(data.val_loader, stored.val_loader):
        for row, ids, mask in zip(plain[1], full["chosen_ids"], full["chosen_mask"]):
            assert ids[mask].tolist() == [t for t in row.tolist() if t]
    assert len(stored.train_loader.dataset) == len(data.train_loader.dataset)
