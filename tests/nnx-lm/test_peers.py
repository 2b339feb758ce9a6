"""Losses beside those of other libraries; run where these are installed (group "peers")."""

from __future__ import annotations

import pytest
import torch
from llama import llama_of
from nnx.lm.dpo import dpo_loss, sequence_log_probs
from nnx.objectives.contrastive import nt_xent


def views():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, 5, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_nt_xent_is_that_of_pytorch_metric_learning(temperature):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    theirs = losses.NTXentLoss(temperature=temperature)
    labels = torch.arange(7).repeat(2)
    wanted = float(theirs(torch.cat(views()), labels))
    assert float(nt_xent(*views(), temperature)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_nt_xent_is_the_ranking_loss_of_sentence_transformers_from_both_sides(temperature):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    # Each view's rows against the other view and the rest of their own, in one softmax.
    theirs = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=1 / temperature, directions=("query_to_doc", "query_to_query"),
        partition_mode="joint",
    )  # fmt: skip
    a, b = views()
    sides = [float(theirs.compute_loss_from_embeddings(list(v), None)) for v in ((a, b), (b, a))]
    assert float(nt_xent(a, b, temperature)) == pytest.approx(sum(sides) / 2, rel=1e-5)


def test_the_preference_loss_and_its_gradient_are_those_of_trl(kit, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    tokenizer = kit.tokenizer()
    policy, reference = (kit.net(tokenizer.vocab_size, seed=seed).eval() for seed in (11, 12))
    rows = [
        {"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "ran over the hill"},
        {"prompt": "a dog ran ", "chosen": "over", "rejected": "to see the other dog"},
        {"prompt": "to be ", "chosen": "or not to be", "rejected": "in spain"},
    ]
    llama = llama_of(policy)
    trainer = trl.DPOTrainer(
        model=llama,
        ref_model=llama_of(reference),
        args=trl.DPOConfig(
            str(tmp_path), beta=0.3, per_device_train_batch_size=3, use_cpu=True, bf16=False,
            report_to="none", disable_dropout=True, gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_file=tokenizer.path, pad_token="<pad>", eos_token="<eos>"
        ),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    wanted = trainer.compute_loss(llama, batch)
    wanted.backward()

    ids, marks = batch["input_ids"], batch["completion_mask"].bool()
    scores = sequence_log_probs(policy, ids, marks).chunk(2)
    with torch.no_grad():
        known = sequence_log_probs(reference, ids, marks).chunk(2)
    losses, _ = dpo_loss(scores, known, 0.3)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(wanted.item(), rel=1e-5)
    for ours, theirs in (
        (policy.tok_embed.weight, llama.model.embed_tokens.weight),
        (policy.norm_out.weight, llama.model.norm.weight),
        (policy.blocks[0].ffn.w2.weight, llama.model.layers[0].mlp.down_proj.weight),
    ):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
