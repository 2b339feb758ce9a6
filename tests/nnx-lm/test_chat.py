"""Conversations: templates in a sandbox, and a loss on the assistant's tokens alone."""

from __future__ import annotations

import json

import pytest
import torch
from nnx import NNOptimParams, NNTokenizerParams, NNTrainParams, train_bpe
from nnx.lm import ChatDataset, ChatTemplate, read_chats, reply
from nnx.lm.chat import SPECIAL_TOKENS
from nnx.lm_tasks import CausalLMTask
from torch.utils.data import DataLoader

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "who are you?"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "still a cat"},
]


@pytest.fixture
def tokenizer(kit):
    special = ["<pad>", "<bos>", *SPECIAL_TOKENS]
    trained = train_bpe(texts=kit.texts, vocab_size=400, special_tokens=special, byte_level=True)
    return NNTokenizerParams.of(trained, "chat.json")


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_loss_is_on_the_assistants_turns_and_their_ends_alone(tokenizer):
    ids, mask = ChatTemplate().encode(CHAT, tokenizer)
    assert text_of(tokenizer, ids) == ChatTemplate().render(CHAT)
    learned = text_of(tokenizer, [i for i, own in zip(ids, mask) if own])
    assert learned == "a cat<|end|>still a cat<|end|>"


def test_a_conversation_begins_with_one_bos(tokenizer):
    bos = tokenizer.tokenizer.token_to_id("<bos>")
    writes_it = ChatTemplate(template="{{ bos_token }}" + ChatTemplate().template, bos="<bos>")
    for template in (ChatTemplate(bos="<bos>"), writes_it):
        ids, mask = template.encode(CHAT, tokenizer)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert not mask[0]


def test_templates_of_other_models(tokenizer):
    chatml = ChatTemplate(
        template="{% for m in messages %}{{ '<|user|>' + m['role'] + '\\n' + m['content'] + '<|end|>' + "
        "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"
    )
    ids, mask = chatml.encode(CHAT[:3], tokenizer)
    assert text_of(tokenizer, [i for i, own in zip(ids, mask) if own]) == "a cat<|end|>"


def test_a_template_runs_in_a_sandbox(tokenizer):
    leak = ChatTemplate(template="{{ messages.__class__.__mro__ }}<|end|>")
    with pytest.raises(ValueError, match="template failed"):
        leak.render(CHAT)
    with pytest.raises(ValueError, match="template failed"):
        ChatTemplate(template="{{ messages.append(1) }}").render(CHAT)
    with pytest.raises(ValueError, match="refuses the messages: no system"):
        ChatTemplate(template="{{ raise_exception('no system') }}").render(CHAT)
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate(template="{% for %}").render(CHAT)


def test_templates_whose_turns_cannot_be_told_are_refused(tokenizer):
    with pytest.raises(ValueError, match="does not end the assistant's turn 2"):
        ChatTemplate(template="{% for m in messages %}{{ m.content }}{% endfor %}").encode(
            CHAT, tokenizer
        )
    counting = "{{ messages | length }}" + ChatTemplate().template
    with pytest.raises(ValueError, match="another way"):
        ChatTemplate(template=counting).encode(CHAT, tokenizer)
    with pytest.raises(ValueError, match=r"no token '<\|stop\|>'"):
        ChatTemplate(end_of_turn="<|stop|>").encode(CHAT, tokenizer)


def test_rows_are_cut_and_padded_and_nothing_to_learn_is_refused(tokenizer):
    rows = [{"messages": CHAT}, {"messages": CHAT[1:3]}]
    data = ChatDataset(rows, tokenizer)
    batch = next(iter(DataLoader(data, batch_size=2, collate_fn=data.collate)))
    ids, mask = ChatTemplate().encode(CHAT[1:3], tokenizer)
    assert batch["input_ids"][1, : len(ids)].tolist() == ids
    assert batch["loss_mask"][1].sum() == sum(mask)
    assert not batch["loss_mask"][1, len(ids) :].any()
    lm = CausalLMTask(vocab_size=tokenizer.vocab_size)
    _, targets, found = lm.split(batch)
    assert lm.valid(targets, found).sum() == batch["loss_mask"].sum()
    with pytest.raises(ValueError, match="row 1: the assistant says nothing, so"):
        ChatDataset([rows[0], {"messages": CHAT[:2]}], tokenizer)
    with pytest.raises(ValueError, match="row 0: the assistant says nothing within 4 tokens"):
        ChatDataset(rows, tokenizer, max_tokens=4)
    with pytest.raises(ValueError, match="row 0 has no messages"):
        ChatDataset([{"text": "x"}], tokenizer)
    with pytest.raises(ValueError, match="row 0: message 0 has no role and content"):
        ChatDataset([{"messages": [{"role": "user"}]}], tokenizer)
    with pytest.raises(ValueError, match="no rows"):
        ChatDataset([], tokenizer)


def test_chats_are_read_from_json_lines(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n\n", encoding="utf-8")
    assert read_chats(path) == [{"messages": CHAT}]
    path.write_text("{}\n{", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_chats(path)


def test_a_tuned_model_answers_and_stops(kit, tokenizer):
    model = kit.model(tokenizer=tokenizer, context=64, d_model=48)
    asked = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
        for q, a in (("cat?", "the mat"), ("dog?", "the hill"))
    ]
    data = ChatDataset([{"messages": chat} for chat in asked], tokenizer)
    loader = DataLoader(data, batch_size=2, collate_fn=data.collate)
    lm = CausalLMTask(vocab_size=tokenizer.vocab_size)
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).build()
    params = NNTrainParams(n_epochs=60, seed=0, train_loader=loader, optim=optim)
    model.train(params, objective=lm.objective())
    pieces = []
    for chat in asked:
        pieces.clear()
        answer = reply(model, chat[:1], temperature=0, max_new_tokens=20, on_text=pieces.append)
        assert answer == chat[1]["content"] == "".join(pieces)
    assert isinstance(model.net(torch.tensor([[1, 2]])), torch.Tensor)
