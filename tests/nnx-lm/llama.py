"""Our transformer in another library, weight for weight."""

from __future__ import annotations

import pytest
import torch


def llama_of(net):
    """The same network in transformers."""
    transformers = pytest.importorskip("transformers")
    p = net.params
    config = transformers.LlamaConfig(
        vocab_size=p.vocab_size, hidden_size=p.d_model, intermediate_size=p.ffn_width,
        num_hidden_layers=p.n_layers, num_attention_heads=p.n_heads,
        num_key_value_heads=p.kv_heads, rms_norm_eps=p.norm_eps, rope_theta=p.rope_base,
        max_position_embeddings=p.max_seq_len, tie_word_embeddings=p.tie_embeddings,
        attention_bias=False,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).to(net.lm_head.weight.dtype).eval()
    width = p.d_model // p.n_heads

    def halves(weight):  # its rotary pairs are channels i and i + C/2
        heads = weight.view(-1, width, p.d_model)
        return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(-1, p.d_model)

    ours, state = net.state_dict(), {}
    state["model.embed_tokens.weight"] = ours["tok_embed.weight"]
    state["model.norm.weight"] = ours["norm_out.weight"]
    state["lm_head.weight"] = ours["lm_head.weight"]
    for i in range(p.n_layers):
        sizes = [p.d_model, p.kv_heads * width, p.kv_heads * width]
        q, k, v = ours[f"blocks.{i}.attn.w_qkv.weight"].split(sizes)
        layer, block = f"model.layers.{i}", f"blocks.{i}"
        state[f"{layer}.self_attn.q_proj.weight"] = halves(q)
        state[f"{layer}.self_attn.k_proj.weight"] = halves(k)
        state[f"{layer}.self_attn.v_proj.weight"] = v
        for theirs, own in (
            ("self_attn.o_proj", "attn.w_o"), ("mlp.gate_proj", "ffn.w1"),
            ("mlp.down_proj", "ffn.w2"), ("mlp.up_proj", "ffn.w3"),
            ("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"),
        ):  # fmt: skip
            state[f"{layer}.{theirs}.weight"] = ours[f"{block}.{own}.weight"]
    llama.load_state_dict(state)
    return llama
