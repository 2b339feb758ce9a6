"""Prefix and prompt tuning over a small transformer that keeps the documented protocol."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nnx.peft import (
    PrefixTuner,
    PromptTuner,
    apply_ia3_to,
    apply_lora_to,
    load_prefix_weights,
    load_prompt_weights,
    save_prefix_weights,
    save_prompt_weights,
)
from torch import nn

D, HEADS, VOCAB, LENGTH = 8, 2, 11, 12


def rotate(x, start):
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] / 10.0 ** torch.arange(2)
    cos, sin = (f(angles).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D)
        self.kv_prefix = None

    def forward(self, x, past):
        batch, length, _ = x.shape
        q, k, v = self.w_qkv(x).view(batch, length, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        start = 0 if past is None else past[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        kv = (k, v)
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        if self.kv_prefix is not None:
            pk, pv = (p.transpose(0, 1).expand(batch, -1, -1, -1) for p in self.kv_prefix())
            k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
            mask = F.pad(mask, (pk.shape[2], 0), value=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, D)), kv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.ffn = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, x, past):
        y, kv = self.attn(x, past)
        x = x + y
        return x + self.ffn(x), kv


class Transformer(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.params = SimpleNamespace(n_heads=HEADS, d_model=D, max_seq_len=LENGTH)
        self.tok_embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.tok_embed.weight

    def forward_embeddings(self, x, past_kvs=None):
        kvs = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, None if past_kvs is None else past_kvs[i])
            kvs.append(kv)
        return self.head(x), kvs

    def forward_with_cache(self, tokens, past_kvs=None):
        return self.forward_embeddings(self.tok_embed(tokens), past_kvs)

    def forward(self, tokens):
        return self.forward_with_cache(tokens)[0]

    def unpack_batch(self, batch):
        return batch


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def train(tuner, steps=3):
    optimizer = torch.optim.AdamW(tuner.trainable_parameters(), lr=0.1)
    for _ in range(steps):
        F.cross_entropy(tuner(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


class TestPrefix:
    def test_only_the_prefixes_train_and_the_model_stays_bit_identical(self):
        model = Transformer()
        before = copy.deepcopy(model.state_dict())
        tuner = PrefixTuner(model, n_prefix=3)
        trainable = [n for n, p in tuner.named_parameters() if p.requires_grad]
        assert trainable == [f"prefix_{kind}.{i}" for kind in ("keys", "values") for i in range(3)]
        assert all(p.shape == (3, HEADS, D // HEADS) for p in tuner.trainable_parameters())
        start = tuner(TOKENS).detach()
        train(tuner)
        assert not torch.equal(tuner(TOKENS), start)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert list(model.state_dict()) == list(before)

    def test_every_query_sees_the_prefix_as_extra_keys(self):
        """With values of zero and keys of zero the prefix takes softmax mass exp(0) each."""
        model = Transformer(1)
        attention = model.blocks[0].attn
        x = torch.randn(2, 4, D)
        q, k, v = attention.w_qkv(x).view(2, 4, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = rotate(q, 0) @ rotate(k, 0).transpose(-1, -2) / (D // HEADS) ** 0.5
        scores = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf).exp()
        expected = scores / (scores.sum(-1, keepdim=True) + 2.0) @ v
        expected = attention.out(expected.transpose(1, 2).reshape(2, 4, D))
        tuner = PrefixTuner(model, n_prefix=2)
        with torch.no_grad():
            for parameter in tuner.trainable_parameters():
                parameter.zero_()
        torch.testing.assert_close(attention(x, None)[0], expected)

    def test_cached_decoding_equals_the_full_forward_pass(self):
        tuner = PrefixTuner(Transformer(), n_prefix=3)
        train(tuner)
        full = tuner(TOKENS)
        logits, kvs = tuner.forward_with_cache(TOKENS[:, :2])
        parts = [logits]
        for i in (2, 3):
            logits, kvs = tuner.forward_with_cache(TOKENS[:, i : i + 1], kvs)
            parts.append(logits)
        assert kvs[0][0].shape[2] == 4
        torch.testing.assert_close(torch.cat(parts, 1), full)

    def test_leading_layers_only(self):
        model = Transformer()
        tuner = PrefixTuner(model, n_layers=2)
        assert len(tuner.prefix_keys) == 2
        assert [b.attn.kv_prefix is None for b in model.blocks] == [False, False, True]

    def test_a_tuned_model_is_refused_and_a_deepcopy_forks(self):
        tuner = PrefixTuner(Transformer(), n_prefix=2)
        with pytest.raises(ValueError, match="prefix-tuned already"):
            PrefixTuner(tuner.model)
        for fork in (copy.deepcopy(tuner), pickle.loads(pickle.dumps(tuner))):
            before = tuner(TOKENS)
            assert torch.equal(fork(TOKENS), before)
            train(fork)
            assert torch.equal(tuner(TOKENS), before)
            assert not torch.equal(fork(TOKENS), before)

    def test_files_hold_only_the_prefix(self, tmp_path):
        source, other = (
            PrefixTuner(Transformer(), n_prefix=2),
            PrefixTuner(Transformer(), n_prefix=2),
        )
        train(source)
        path = save_prefix_weights(source, tmp_path / "p.pt")
        assert list(torch.load(path, weights_only=True)) == list(source.prefix_state_dict())
        assert load_prefix_weights(other, path) == 6
        assert torch.equal(other(TOKENS), source(TOKENS))
        weight = other.model.head.weight.clone()
        assert (
            load_prefix_weights(other, {**source.state_dict(), "model.head.weight": weight * 2})
            == 6
        )
        assert torch.equal(other.model.head.weight, weight)
        with pytest.raises(RuntimeError, match=r"size mismatch for prefix_keys\.0"):
            load_prefix_weights(PrefixTuner(Transformer(), n_prefix=5), path)

    @pytest.mark.parametrize("apply", [apply_lora_to, apply_ia3_to])
    def test_an_adapted_projection_stays_in_the_path_frozen(self, apply):
        model = Transformer().to(torch.bfloat16)
        apply(model, "*.w_qkv")
        tuner = PrefixTuner(model, n_prefix=2)
        assert {p.dtype for p in tuner.trainable_parameters()} == {torch.bfloat16}
        assert not any(p.requires_grad for p in model.parameters())
        assert hasattr(model.blocks[0].attn.w_qkv, "base")
        tuner(TOKENS)

    @pytest.mark.parametrize("training", [True, False])
    def test_modes_follow_the_model(self, training):
        tuner = PrefixTuner(Transformer().train(training))
        assert {m.training for m in tuner.modules()} == {training}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"n_prefix": 0}, "n_prefix must be an integer >= 1"),
            ({"n_layers": 0}, "n_layers must be an integer >= 1 and <= 3"),
            ({"n_layers": 4}, "<= 3, not 4"),
        ],
    )
    def test_counts_out_of_range_change_nothing(self, options, message):
        model = Transformer()
        with pytest.raises(ValueError, match=message):
            PrefixTuner(model, **options)
        assert all(p.requires_grad for p in model.parameters())
        assert model.blocks[0].attn.kv_prefix is None

    def test_another_kind_of_model_is_refused(self):
        with pytest.raises(TypeError, match="tunes a TransformerNN, not a Linear"):
            PrefixTuner(nn.Linear(2, 2))


class TestPrompt:
    def test_the_prompt_is_read_before_the_tokens_and_its_logits_dropped(self):
        model = Transformer()
        tuner = PromptTuner(model, n_prompt_tokens=3)
        x = torch.cat([tuner.soft_prompt.expand(2, -1, -1), model.tok_embed(TOKENS)], 1)
        assert torch.equal(tuner(TOKENS), model.forward_embeddings(x)[0][:, 3:])
        assert tuner(TOKENS).shape == (2, 4, VOCAB)

    def test_only_the_prompt_trains_and_the_model_stays_bit_identical(self):
        model = Transformer()
        before = copy.deepcopy(model.state_dict())
        tuner = PromptTuner(model, n_prompt_tokens=3)
        assert [n for n, p in tuner.named_parameters() if p.requires_grad] == ["soft_prompt"]
        assert 0.005 < PromptTuner(Transformer(), n_prompt_tokens=11).soft_prompt.std() < 0.05
        start = tuner(TOKENS).detach()
        train(tuner)
        assert not torch.equal(tuner(TOKENS), start)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_cached_decoding_equals_the_full_forward_pass(self):
        tuner = PromptTuner(Transformer(), n_prompt_tokens=3)
        logits, kvs = tuner.forward_with_cache(TOKENS[:, :2])
        step, kvs = tuner.forward_with_cache(TOKENS[:, 2:], kvs)
        torch.testing.assert_close(torch.cat([logits, step], 1), tuner(TOKENS))

    def test_the_window_shrinks_by_the_prompt(self):
        tuner = PromptTuner(Transformer(), n_prompt_tokens=5)
        assert tuner.effective_max_seq_len == LENGTH - 5
        tuner(torch.ones(1, 7, dtype=torch.long))
        with pytest.raises(ValueError, match=r"8 tokens and a prompt of 5 exceed .* 12; at most 7"):
            tuner(torch.ones(1, 8, dtype=torch.long))

    def test_files_hold_only_the_prompt(self, tmp_path):
        source = PromptTuner(Transformer(), n_prompt_tokens=3)
        other = PromptTuner(Transformer(), n_prompt_tokens=3)
        path = save_prompt_weights(source, tmp_path / "p.pt")
        assert list(torch.load(path, weights_only=True)) == ["soft_prompt"]
        assert load_prompt_weights(other, path) == 1
        assert load_prompt_weights(other, source.state_dict()) == 1
        assert torch.equal(other(TOKENS), source(TOKENS))
        with pytest.raises(RuntimeError, match="size mismatch for soft_prompt"):
            load_prompt_weights(PromptTuner(Transformer(), n_prompt_tokens=4), path)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_placement_follows_the_token_embedding(self, dtype):
        model = Transformer().to(dtype)
        apply_lora_to(model, "tok_embed", kinds=(nn.Embedding,))
        tuner = PromptTuner(model, n_prompt_tokens=2)
        assert tuner.soft_prompt.dtype == dtype
        with torch.device("meta"):
            skeleton = Transformer()
        assert PromptTuner(skeleton, n_prompt_tokens=2).soft_prompt.is_meta

    @pytest.mark.parametrize("training", [True, False])
    def test_modes_copies_and_pickles(self, training):
        tuner = PromptTuner(Transformer().train(training), n_prompt_tokens=2)
        assert {m.training for m in tuner.modules()} == {training}
        for twin in (copy.deepcopy(tuner), pickle.loads(pickle.dumps(tuner))):
            assert torch.equal(twin(TOKENS), tuner(TOKENS))

    @pytest.mark.parametrize("count", [0, LENGTH, True, 1.5])
    def test_a_count_without_room_is_refused(self, count):
        model = Transformer()
        with pytest.raises(ValueError, match="n_prompt_tokens must be an integer >= 1 and <= 11"):
            PromptTuner(model, n_prompt_tokens=count)
        assert all(p.requires_grad for p in model.parameters())

    def test_another_kind_of_model_is_refused(self):
        tuner = PromptTuner(Transformer(), n_prompt_tokens=2)
        with pytest.raises(TypeError, match="not a PromptTuner"):
            PromptTuner(tuner)

    def test_a_prompt_on_top_of_a_prefix(self):
        model = Transformer()
        PrefixTuner(model, n_prefix=2)
        assert PromptTuner(model, n_prompt_tokens=2)(TOKENS).shape == (2, 4, VOCAB)
