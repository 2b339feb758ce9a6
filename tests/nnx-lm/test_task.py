"""Causal language modelling: targets, sums over tokens, records, resuming."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from nnx import (
    Checkpoints,
    GenerativeNNModel,
    Losses,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTokenizerParams,
    NNTrainParams,
    PrecisionPolicy,
    train_bpe,
)
from nnx.lm import linear_cross_entropy
from nnx.lm_tasks import CausalLMTask, LMTaskError, perplexity
from nnx.objectives import build_objective
from torch.utils.data import DataLoader

IDS = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 0]])


def task(**options):
    return CausalLMTask(vocab_size=options.pop("vocab_size", 20), **options)


def test_token_ids_are_shifted_once():
    inputs, targets, mask = task().split(IDS)
    assert torch.equal(inputs, IDS[:, :-1])
    assert torch.equal(targets, IDS[:, 1:])
    assert mask is None
    valid = task(pad_id=0).valid(targets, None)
    assert valid.tolist() == [[True, True, False, False], [True, True, True, False]]
    aligned = task(alignment="pre_shifted").split((IDS, IDS + 1))
    assert torch.equal(aligned[1], IDS + 1)


def test_masks_choose_targets():
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]])
    for batch in ((IDS, mask), {"input_ids": IDS, "loss_mask": mask}, (IDS, mask[:, 1:])):
        _, targets, found = task().split(batch)
        assert task().valid(targets, found).tolist() == mask[:, 1:].bool().tolist()
    attention = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    batch = {"input_ids": IDS, "attention_mask": attention, "loss_mask": mask}
    _, targets, found = task().split(batch)
    assert found.tolist() == [[False, True, False, False], [True, True, True, False]]
    packed = {"input_ids": IDS, "documents": torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])}
    assert task().split(packed)[2].tolist() == [[True, False, True, True], [True] * 4]


def test_an_end_token_that_is_also_the_padding_stays_a_target():
    ids = torch.tensor([[3, 4, 1, 1, 1], [5, 1, 6, 1, 1]])
    _, targets, _ = task().split(ids)
    assert task(pad_id=1, eos_id=1).valid(targets, None).tolist() == [
        [True, True, False, False],
        [True, True, True, False],
    ]
    assert not task(pad_id=1).valid(targets, None)[targets == 1].any()
    attention = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    _, targets, mask = task().split({"input_ids": ids, "attention_mask": attention})
    assert task().valid(targets, mask)[0].tolist() == [True, True, False, False]


def test_training_does_not_unlearn_the_end_token_that_pads(kit):
    model = kit.model()
    end = 1
    rows = [(model.tokenizer.encode(x) + [end] * 20)[:20] for x in kit.texts]
    lm = CausalLMTask(
        vocab_size=model.tokenizer.vocab_size, pad_id=end, eos_id=end, tokenizer="test"
    )
    fit(model, DataLoader(torch.tensor(rows), batch_size=4), lm, n_epochs=8, lr=1e-2)
    full = model.tokenizer.encode(kit.texts[0])
    with torch.no_grad():
        assert int(model.net(torch.tensor([full]))[0, -1].argmax()) == end


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (IDS.float(), "integers"),
        (IDS[0], "integers of shape"),
        (IDS[:, :1], "no next token"),
        ((IDS, IDS), "loss mask of 0 and 1"),
        ((IDS, IDS, IDS), "not 3 part"),
        ({"x": IDS}, "no input_ids"),
        (IDS + 15, "token id 24, outside the vocabulary of 20"),
        (IDS - 1, "token id -1"),
        ((IDS, torch.ones(2, 3)), r"loss_mask must be \(2, 4\)"),
        ({"input_ids": IDS, "loss_mask": IDS}, "0 and 1 alone"),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])},
            "row 0 .* padding before a real token",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused_before_the_forward_pass(batch, message):
    with pytest.raises(LMTaskError, match=message):
        task().split(batch)


def test_aligned_batches_must_be_aligned():
    with pytest.raises(LMTaskError, match="must be aligned"):
        task(alignment="pre_shifted").split((IDS, IDS[:, 1:]))
    with pytest.raises(LMTaskError, match="no targets"):
        task(alignment="pre_shifted").split({"input_ids": IDS})
    with pytest.raises(LMTaskError, match="target id 30"):
        task(alignment="pre_shifted").split((IDS, torch.full_like(IDS, 30)))
    ignored = torch.full_like(IDS, -100)
    assert not task(alignment="pre_shifted").valid(ignored, None).any()


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 0},
        {"alignment": "shifted"},
        {"smoothing": 1.0},
        {"smoothing": float("nan")},
        {"vocab_axis": 2},
        {"pad_id": 1.5},
        {"version": 2},
    ],
)
def test_a_task_refuses_what_means_nothing(options):
    with pytest.raises(ValueError, match="CausalLMTask"):
        task(**options)


def test_a_task_comes_back_from_its_state():
    lm = task(pad_id=3, smoothing=0.1, alignment="pre_shifted", tokenizer="t", eos_id=3)
    assert CausalLMTask.from_state(lm.state()) == lm
    assert "eos_id" not in task().state()
    with pytest.raises(ValueError, match="no key 'padding'"):
        CausalLMTask.from_state({**task().state(), "padding": 1})
    objective = build_objective("lm.causal", config=lm.state())
    assert objective.task == lm


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_token_sums_are_those_of_torch(axis, smoothing):
    lm = task(smoothing=smoothing, vocab_axis=axis)
    logits = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(0))
    targets, valid = IDS, IDS != 0

    class Given(torch.nn.Module):
        def forward(self, ids):
            return logits if axis == -1 else logits.transpose(1, 2)

    model = NNModel(module=Given(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    ce, nll, correct, count = lm.token_sums(lm.logits(model, IDS, targets), targets, valid)
    rows, wanted = logits[valid], targets[valid]
    expected = F.cross_entropy(rows, wanted, reduction="sum", label_smoothing=smoothing)
    assert float(ce) == pytest.approx(float(expected))
    assert nll == pytest.approx(float(F.cross_entropy(rows, wanted, reduction="sum")))
    assert (correct, count) == (int((rows.argmax(1) == wanted).sum()), 7)
    with pytest.raises(LMTaskError, match="vocabulary of 21"):
        task(vocab_size=21, vocab_axis=axis).logits(model, IDS, targets)


def test_perplexity():
    assert perplexity(None) is None
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(40)) == pytest.approx(40)
    assert perplexity(1e6) == math.inf


# Training --------------------------------------------------------------------------------------


def fit(model, loader, lm, *, n_epochs=2, lr=3e-3, accumulate=1, val=None, **options):
    optim = NNOptimParams.builder().adamw(max_lr=lr).accumulate_grad(accumulate).build()
    train = {
        k: options.pop(k) for k in ("resume_from_run_id", "overwrite_existing") if k in options
    }
    params = NNTrainParams(
        n_epochs=n_epochs, seed=3, train_loader=loader, val_loader=val, optim=optim, **train
    )
    evaluate = None if val is None else lm.eval_step()
    return model.train(params, objective=lm.objective(), eval_step_fn=evaluate, **options)


def rows(kit, tokenizer):
    return torch.tensor([(tokenizer.encode(x) + [0] * 20)[:20] for x in kit.texts])


def test_uneven_microbatches_are_the_full_batch(kit):
    """An accumulated window of uneven token counts takes the full batch's step."""

    def trained(batches, accumulate):
        model = kit.model()
        lm = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0)
        optim = NNOptimParams.builder().sgd(max_lr=0.5).accumulate_grad(accumulate).build()
        params = NNTrainParams(n_epochs=1, seed=3, train_loader=batches, optim=optim)
        model.train(params, objective=lm.objective())
        return model.net.state_dict()

    data = rows(kit, kit.tokenizer())
    data[:3, 4:] = 0
    whole = trained([data], 1)
    parts = trained([data[:3], data[3:10], data[10:]], 3)
    for name, weight in whole.items():
        assert torch.allclose(weight, parts[name], atol=1e-6), name


def test_evaluation_is_over_tokens_whatever_the_batches_and_the_padding(kit):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    lm = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0, smoothing=0.3)

    class Context:
        pass

    def evaluated(batches):
        Context.model, Context.val_loader = model, batches
        return lm.eval_step()(Context)

    padded = torch.cat((data, torch.zeros(16, 7, dtype=torch.long)), dim=1)
    found = [evaluated(b) for b in ([data], data.split(3), [padded], data.split(1))]
    with torch.no_grad():
        logits, targets = model.net(data[:, :-1]).double(), data[:, 1:]
    wanted = F.cross_entropy(logits[targets != 0], targets[targets != 0])
    for record in found:
        assert record.loss == pytest.approx(float(wanted), rel=1e-6)
        assert record.metrics["perplexity"] == pytest.approx(math.exp(float(wanted)), rel=1e-6)
        assert record.count == int((targets != 0).sum())
        assert record.error is None
        assert record.accuracy is None
    assert evaluated([torch.zeros(2, 4, dtype=torch.long)]).status == "empty"
    with pytest.raises(LMTaskError, match="no batches"):
        evaluated([])


def test_an_all_masked_window_takes_no_step(kit):
    model = kit.model()
    before = {k: v.clone() for k, v in model.net.state_dict().items()}
    lm = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0)
    fit(model, [torch.zeros(2, 6, dtype=torch.long)], lm, n_epochs=1)
    assert all(torch.equal(v, before[k]) for k, v in model.net.state_dict().items())


def test_another_vocabulary_is_refused_before_a_run(kit, tmp_path):
    model = kit.model()
    with pytest.raises(LMTaskError, match="vocabulary of 80 and the network one of 76"):
        fit(model, [IDS], CausalLMTask(vocab_size=80))
    assert not (tmp_path / "runs").exists()


def test_a_resume_with_another_task_is_refused_before_any_update(kit):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    lm = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0)
    run = fit(model, [data], lm, n_epochs=1)
    before = {k: v.clone() for k, v in model.net.state_dict().items()}
    other = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=1)
    with pytest.raises(ValueError, match="pad_id was 0 and is 1 now"):
        fit(model, [data], other, n_epochs=2, resume_from_run_id=run.id)
    assert all(torch.equal(v, before[k]) for k, v in model.net.state_dict().items())
    assert fit(model, [data], lm, n_epochs=2, resume_from_run_id=run.id).idps


def test_tied_embeddings_survive_training_and_reloading(kit):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    run = fit(model, [data], CausalLMTask(vocab_size=76, pad_id=0), n_epochs=1)
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert again.net.lm_head.weight is again.net.tok_embed.weight
    assert torch.equal(again.net(data), model.net(data))


# The tokenizer of a run -------------------------------------------------------------------------


def test_a_run_is_reloaded_by_id_with_its_tokenizer(kit):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    run = fit(model, [data], CausalLMTask(vocab_size=76, pad_id=0), n_epochs=1)
    again = GenerativeNNModel.from_run(run.id)
    assert again.tokenizer.path == "tok.json"
    options = {"temperature": 0, "max_new_tokens": 12}
    assert again.generate("the cat", **options) == model.generate("the cat", **options)
    elsewhere = NNTokenizerParams.of(model.tokenizer.tokenizer, "other.json")
    assert GenerativeNNModel.from_run(run.id, tokenizer=elsewhere).tokenizer is elsewhere
    with pytest.raises(FileNotFoundError, match="no checkpoint 'q1'"):
        GenerativeNNModel.from_run(run.id, Checkpoints.Q1)
    plain = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert not plain.components


def test_a_changed_tokenizer_file_is_refused_by_its_digest(kit, tmp_path):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    lm = CausalLMTask(vocab_size=76, pad_id=0)
    run = fit(model, [data], lm, n_epochs=1)
    NNTokenizerParams.of(train_bpe(texts=["other words"], vocab_size=20), "tok.json")
    with pytest.raises(ValueError, match=r"tokenizer 'tok.json' is not the one .* trained with"):
        GenerativeNNModel.from_run(run.id)
    model.tokenizer = NNTokenizerParams.from_state({"path": "tok.json"})
    with pytest.raises(ValueError, match="is not the one that the run was trained with"):
        fit(model, [data], lm, n_epochs=2, resume_from_run_id=run.id)
    (tmp_path / "tok.json").unlink()
    found = GenerativeNNModel.from_run(run.id).tokenizer  # the checkpoint holds it too
    assert (found.path, found.encode("the cat")) == ("tok.json", kit.tokenizer().encode("the cat"))


# The chunked cross-entropy ------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "vocab"), [(37, 1000), (5, 7), (300, 60000)])
def test_the_chunked_loss_has_the_plain_gradients(n, vocab, smoothing):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 16, generator=generator)
    weight = torch.randn(vocab, 16, generator=generator) * 0.3
    targets = torch.randint(0, vocab, (n,), generator=generator)
    found, wanted = [], []
    for grads, chunked in ((found, True), (wanted, False)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            loss = linear_cross_entropy(h, w, targets, smoothing=smoothing) / n
        else:
            loss = F.cross_entropy(h @ w.t(), targets, label_smoothing=smoothing)
        (loss * 3).backward()
        grads += [loss.detach(), h.grad, w.grad]
    for ours, plain in zip(found, wanted):
        assert torch.allclose(ours, plain, atol=1e-6, rtol=1e-5)


def test_the_chunked_loss_of_frozen_parts_and_of_autocast():
    hidden, weight = torch.randn(9, 8), torch.randn(30, 8, requires_grad=True)
    targets = torch.arange(9)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        reduced = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
        plain = F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")
    assert reduced.dtype == torch.float32
    assert reduced.item() == pytest.approx(plain.item(), rel=1e-4)
    reduced.backward()
    assert hidden.grad.dtype == torch.float32


def test_the_perplexity_of_several_processes_is_that_of_all_their_tokens(kit):
    from nnx.engine.ranks.records import merged_record

    model = kit.model()
    data = rows(kit, model.tokenizer)
    lm = CausalLMTask(vocab_size=76, pad_id=0)

    class Context:
        pass

    def evaluated(batches):
        Context.model, Context.val_loader = model, batches
        return lm.eval_step()(Context)

    shares = [evaluated([data[:3]]), evaluated([data[3:]])]
    merged, _ = merged_record([{"record": s.state(), "n_samples": 1} for s in shares])
    whole, found = evaluated([data]), lm.eval_step().after_merge(merged)
    assert found.loss == pytest.approx(whole.loss, rel=1e-9)
    assert dict(found.metrics) == pytest.approx(dict(whole.metrics), rel=1e-9)


# Networks that are not plain ------------------------------------------------------------------


def test_a_hooked_network_is_called_as_a_whole_and_loses_nothing(kit):
    """FSDP, for one, works by hooks of the whole network."""
    losses = []
    for hooked in (False, True):
        model, calls = kit.model(), []
        if hooked:
            model.net.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        data = rows(kit, model.tokenizer)
        lm = CausalLMTask(vocab_size=76, pad_id=0, smoothing=0.1)
        run = fit(model, [data], lm, n_epochs=2, overwrite_existing=True)
        assert bool(calls) == hooked
        losses.append([point.train_edp.loss for point in run.idps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("tuner", ["PrefixTuner", "PromptTuner"])
def test_a_prefix_or_a_prompt_is_trained_and_the_model_left_alone(kit, tuner):
    tuner = getattr(pytest.importorskip("nnx.peft", exc_type=ImportError), tuner)
    base = kit.model()
    data = rows(kit, base.tokenizer)
    before = {name: weight.clone() for name, weight in base.net.state_dict().items()}
    tuned = GenerativeNNModel(
        params=NNModelParams(loss=Losses.CROSS_ENTROPY),
        tokenizer=base.tokenizer,
        module=tuner(base.net),
    )
    lm = CausalLMTask(vocab_size=76, pad_id=0)
    run = fit(tuned, [data], lm, n_epochs=12, lr=3e-2, val=[data])
    assert run.idps[-1].val_edp.loss < run.idps[0].val_edp.loss - 0.02
    assert all(torch.equal(w, before[n]) for n, w in base.net.state_dict().items())
    text = tuned.generate("the cat", temperature=0, max_new_tokens=8)
    fresh = kit.model()
    again = GenerativeNNModel.from_run(run.id, module=tuner(fresh.net))
    assert again.generate("the cat", temperature=0, max_new_tokens=8) == text


def test_reduced_precision_trains_evaluates_and_writes(kit):
    full = kit.model()
    params = NNModelParams(
        net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY, precision=PrecisionPolicy("bf16")
    )
    model = GenerativeNNModel(full.net_params, params, full.tokenizer)
    model.net.load_state_dict(full.net.state_dict())
    data = rows(kit, full.tokenizer)
    lm = CausalLMTask(vocab_size=76, pad_id=0)
    ours = fit(model, [data], lm, n_epochs=3, val=[data])
    plain = fit(full, [data], lm, n_epochs=3, val=[data])
    for reduced, exact in zip(ours.idps, plain.idps):
        assert reduced.val_edp.loss == pytest.approx(exact.val_edp.loss, rel=5e-3)
    assert model.net.tok_embed.weight.dtype == torch.float32
    assert model.generate("the cat", temperature=0, max_new_tokens=8).startswith("the cat")


def test_predictions_of_a_language_model_are_a_token_for_every_position(kit):
    model = kit.model()
    data = rows(kit, model.tokenizer)
    with torch.no_grad():
        logits = model.net(data)
    found = model.predict(data)
    assert found.logits.shape == logits.shape
    assert found.classes.tolist() == logits.argmax(-1).tolist()
    record = model.evaluate([(data[:, :-1], data[:, 1:])])
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), data[:, 1:].flatten())
    assert record.loss == pytest.approx(wanted.item(), rel=1e-6)
    with pytest.raises(ValueError, match="one target for each position"):
        model.evaluate([(data, data[:, 1:])])
