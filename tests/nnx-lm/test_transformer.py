"""The transformer: caches, packed documents, shared key and value heads, files, another library."""

from __future__ import annotations

import pytest
import torch
from llama import llama_of
from nnx import NNTransformerParams, TransformerNN, load_pretrained
from nnx.lm import KVCache, RMSNorm, RoPE
from nnx.lm.token_step import TokenStep

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2}


def tokens(batch=2, length=24, vocab=40, seed=3):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_chunks(net, ids, sizes):
    """Logits by the cached pass over chunks of these sizes."""
    past, parts, start = None, [], 0
    for size in sizes:
        logits, past = net.forward_with_cache(ids[:, start : start + size], past)
        parts.append(logits)
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_and_uncached_logits_agree_at_every_prompt_length_and_chunking(kit, dtype, kv_heads):
    net = kit.net(heads=4, kv_heads=kv_heads).to(dtype).eval()
    ids = tokens()
    with torch.no_grad():
        whole = net(ids)
        chunkings = [[n, *[1] * (24 - n)] for n in range(1, 25)]
        chunkings += [[7, 7, 7, 3], [1, 5, 18], [12, 12], [3] * 8]
        for sizes in chunkings:
            difference = (in_chunks(net, ids, sizes) - whole).abs().max()
            assert difference <= TOLERANCE[dtype], sizes


def test_rows_of_different_lengths_in_one_cache(kit):
    net, ids = kit.net().double().eval(), tokens(batch=3)
    lengths = [5, 11, 8]
    with torch.no_grad():
        _, kvs = net.forward_with_cache(ids[:, : max(lengths)])
        cache = KVCache(kvs, lengths, capacity=24)
        for step in range(6):
            new = torch.stack([ids[i, n + step : n + step + 1] for i, n in enumerate(lengths)])
            logits, cache = net.forward_with_cache(new, cache)
            for i, n in enumerate(lengths):
                alone = net(ids[i : i + 1, : n + step + 1])[0, -1]
                assert torch.allclose(logits[i, -1], alone, atol=1e-12)
        cache.keep([2, 0])
        logits, _ = net.forward_with_cache(ids[[2, 0], 14:15], cache)
        wanted = torch.cat((ids[2, : 8 + 6], ids[2, 14:15]))[None]
        assert torch.allclose(logits[0, -1], net(wanted)[0, -1], atol=1e-12)


def test_packed_documents_are_what_each_is_alone(kit):
    net = kit.net().double().eval()
    first, second, third = tokens(1, 7), tokens(1, 12, seed=4), tokens(1, 5, seed=5)
    documents = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5])
    packed = net(torch.cat((first, second, third), dim=1), documents=documents)
    alone = torch.cat([net(ids) for ids in (first, second, third)], dim=1)
    assert torch.allclose(packed, alone, atol=1e-12)
    # A number that comes back later is another document.
    again = torch.cat((first, second, first), dim=1)
    packed = net(again, documents=torch.tensor([[0] * 7 + [1] * 12 + [0] * 7]))
    assert torch.allclose(packed[:, 19:], net(first), atol=1e-12)


@pytest.mark.parametrize("seen", ["later", "other document"])
def test_no_token_learns_from_what_it_must_not_see(kit, seen):
    net, ids = kit.net(), tokens(1, 10)
    documents = torch.tensor([[0] * 4 + [1] * 6]) if seen == "other document" else None
    x = net.tok_embed(ids).detach().requires_grad_()
    net.tok_embed = _Given(x)
    net(ids, documents=documents)[0, 5].sum().backward()
    reached = (x.grad[0].abs().sum(dim=1) > 0).tolist()
    start = 4 if documents is not None else 0
    assert reached == [start <= i <= 5 for i in range(10)]


class _Given(torch.nn.Module):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def forward(self, ids):
        return self.x


def test_shared_heads_are_repeated_heads(kit):
    """Grouped-query attention equals full attention whose key and value heads are copies."""
    grouped = kit.net(heads=4, kv_heads=2).double()
    full = kit.net(heads=4).double()
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith("w_qkv.weight"):
            q, k, v = weight.split([32, 16, 16])
            twice = [t.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32) for t in (k, v)]
            state[name] = torch.cat((q, *twice))
    full.load_state_dict(state)
    ids = tokens()
    assert torch.allclose(full(ids), grouped(ids), atol=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 4, "kv_heads": 2, "norm_eps": 1e-5, "ffn_dim": 50, "tied": False},
        {"heads": 4, "kv_heads": 1, "ffn_dim": 96},
    ],
)
def test_logits_and_greedy_tokens_are_those_of_llama(kit, shape):
    model = kit.model(**shape)
    net = model.net.eval()
    llama = llama_of(net)
    ids = tokens(vocab=model.tokenizer.vocab_size)
    with torch.no_grad():
        assert torch.allclose(net(ids), llama(ids).logits, atol=1e-5)
    prompt = torch.tensor([model.tokenizer.encode("the cat sat")])
    theirs = llama.generate(
        prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ours = []
    model.generate("the cat sat", max_new_tokens=20, temperature=0, on_token=ours.append)
    assert ours == theirs[0, prompt.shape[1] :].tolist()


def test_rotary_tables_keep_their_precision_in_half_precision_models():
    rope = RoPE(8, 4096).to(torch.bfloat16)
    exact = torch.tensor(4000.0, dtype=torch.float64).cos()
    assert rope.cos.dtype == torch.float32
    assert float(rope.cos[4000, 0]) == pytest.approx(float(exact), abs=1e-6)
    assert rope.double().cos.dtype == torch.float64
    assert not rope.state_dict()
    on_meta = RoPE(8, 16).to("meta").to_empty(device="cpu")
    assert torch.equal(on_meta.cos, RoPE(8, 16).cos)


def test_the_norm_by_hand():
    norm = RMSNorm(3, eps=0.5)
    x = torch.tensor([[1.0, 2.0, 2.0]])
    assert torch.allclose(norm(x), x / (3.0 + 0.5) ** 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RMSNorm(4, eps=-1.0), "eps"),
        (lambda: RMSNorm(4, eps=float("nan")), "eps"),
        (lambda: RoPE(8, 16, base=0.0), "base"),
        (lambda: RoPE(7, 16), "even"),
        (lambda: RoPE(8, 0), "max_seq_len"),
    ],
)
def test_layers_refuse_numbers_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_tokens_than_the_context_are_refused_with_numbers(kit):
    net = kit.net(context=16)
    with pytest.raises(ValueError, match="20 tokens exceed the model's max_seq_len of 16 by 4"):
        net(tokens(1, 20))
    with pytest.raises(ValueError, match="exceed"):
        net(tokens(1, 20), documents=torch.zeros(1, 20, dtype=torch.long))
    _, past = net.forward_with_cache(tokens(1, 10))
    with pytest.raises(ValueError, match="7 tokens after 10 cached ones"):
        net.forward_with_cache(tokens(1, 7), past)
    with pytest.raises(ValueError, match="past_kvs has 1 layers and the model 2"):
        net.forward_with_cache(tokens(1, 2), past[:1])


def test_a_file_of_weights_comes_back_tied(kit, tmp_path):
    net = kit.net()
    path = str(tmp_path / "weights.pt")
    net.to_file(path)
    other = TransformerNN.from_file(path, net.params)
    assert other.lm_head.weight is other.tok_embed.weight
    assert torch.equal(other(tokens()), net(tokens()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        TransformerNN.from_file(path, kit.shape(41))


def test_tied_embeddings_survive_load_pretrained_and_safetensors(kit, tmp_path):
    from nnx.embeddings import export_to_safetensors
    from safetensors.torch import load_file

    net = kit.net()
    path = export_to_safetensors(net, tmp_path / "net.safetensors")
    assert set(load_file(path)) == set(net.state_dict())
    other = kit.net(seed=12)
    load_pretrained(other, path, strict=True)
    assert other.lm_head.weight is other.tok_embed.weight
    assert torch.equal(other(tokens()), net(tokens()))


def test_new_fields_are_off_by_default_and_move_no_run_id(kit):
    plain = kit.shape()
    assert not {"n_kv_heads", "ffn_dim", "norm_eps"} & set(plain.state())
    other = kit.shape(heads=4, kv_heads=2, ffn_dim=50, norm_eps=1e-5)
    state = other.state()
    assert (state["n_kv_heads"], state["ffn_dim"], state["norm_eps"]) == (2, 50, 1e-5)
    assert NNTransformerParams.from_state(state) == other
    assert (other.kv_heads, other.ffn_width, plain.kv_heads, plain.ffn_width) == (2, 50, 2, 85)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "n_kv_heads must be a divisor of n_heads"),
        ({"heads": 2, "kv_heads": 4}, "n_kv_heads must be an integer >= 1 and <= 2"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"norm_eps": -1e-6}, "norm_eps"),
    ],
)
def test_new_fields_refuse_what_no_network_has(kit, shape, message):
    with pytest.raises(ValueError, match=message):
        kit.shape(**shape)


def test_a_width_and_a_multiple_are_two_answers():
    builder = NNTransformerParams.builder().vocab(8).layers(n=1, heads=1, d_model=8)
    builder = builder.context(max_seq_len=8).ffn(mult=2).ffn_dim(24)
    with pytest.raises(ValueError, match="give one of them"):
        builder.build()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("lengths", [[9], [5, 5], [4, 11, 8]])
def test_the_step_of_one_token_is_the_cached_pass(kit, kv_heads, lengths):
    net = kit.net(heads=4, kv_heads=kv_heads).double().eval()
    ids = tokens(batch=len(lengths))
    with torch.inference_mode():
        _, kvs = net.forward_with_cache(ids[:, : max(lengths)])
        ours, theirs = (KVCache(kvs, lengths, capacity=24) for _ in range(2))
        step = TokenStep.of(net)
        for i in range(5):
            logits, _ = net.forward_with_cache(ids[:, i : i + 1], theirs)
            assert torch.allclose(step(ids[:, i : i + 1], ours), logits[:, -1], atol=1e-12)
    for layer, other in zip(ours.layers, theirs.layers):
        assert torch.allclose(layer.keys, other.keys, atol=1e-12)


def test_modules_with_a_say_of_their_own_are_called(kit):
    net = kit.net()
    assert TokenStep.of(net) is not None
    assert TokenStep.of(kit.net().bfloat16()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert TokenStep.of(net) is None
    handle = net.blocks[0].ffn.register_forward_hook(lambda *_: None)
    assert TokenStep.of(net) is None
    handle.remove()
    net.blocks[1].attn.kv_prefix = lambda: None
    assert TokenStep.of(net) is None
    net.blocks[1].attn.kv_prefix = None
    net.blocks[1].ffn.w2 = torch.nn.Sequential(net.blocks[1].ffn.w2)
    assert TokenStep.of(net) is None
