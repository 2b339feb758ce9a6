"""What nnx-lm publishes is found where the names promise it, and costs nothing until used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import nnx
import pytest
from nnx import _lm_plugin
from nnx.plugins import siblings


def test_the_flat_names_are_those_that_core_expects_of_us():
    published = _lm_plugin.nnx_public_names()
    assert set(published) == set(siblings.PUBLIC_NAMES["nnx-lm"])
    for name in published:
        assert getattr(nnx, name).__module__.startswith("nnx.")


def test_the_plugin_and_the_rooms_are_light():
    script = (
        "import sys, nnx, nnx.lm, nnx.generation, nnx.embeddings\n"
        "assert not {'torch', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_and_defaults_are_the_contract():
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in found if p.name != "self"}

    empty = inspect.Parameter.empty
    generate = parameters(nnx.GenerativeNNModel.generate)
    assert list(generate.items())[:13] == [
        ("prompt", empty), ("max_new_tokens", 64), ("temperature", 1.0), ("top_k", None),
        ("top_p", None), ("repetition_penalty", 1.0), ("stop", None), ("seed", None),
        ("use_cache", True), ("logits_chain", None), ("on_token", None),
        ("logits_pipeline", None), ("min_p", None),
    ]  # fmt: skip
    assert parameters(nnx.train_bpe) == {
        "files": None, "vocab_size": 8192, "texts": None, "special_tokens": None,
        "min_frequency": 2, "byte_level": False,
    }  # fmt: skip
    assert parameters(nnx.dpo_train_step_factory) == {
        "ref_model": empty, "beta": 0.1, "pad_token_id": None,
    }  # fmt: skip
    from nnx.embeddings import embed_texts, train_contrastive

    assert parameters(embed_texts)["batch_size"] == 64
    assert parameters(train_contrastive)["lr"] == 2e-5
    assert parameters(nnx.text_contrastive_train_step_factory) == {"temperature": 0.5}


@pytest.mark.parametrize("given", [{}, {"files": [], "texts": []}])
def test_a_tokenizer_is_trained_on_one_source(given):
    with pytest.raises(ValueError, match="give one of them"):
        nnx.train_bpe(**given)


def test_a_tokenizer_is_trained_on_files(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two one two three\n" * 9, encoding="utf-8")
    from_files = nnx.train_bpe([str(path)], vocab_size=60)
    from_texts = nnx.train_bpe(texts=["one two one two three"] * 9, vocab_size=60)
    assert from_files.get_vocab() == from_texts.get_vocab()
    with pytest.raises(FileNotFoundError, match="no file"):
        nnx.train_bpe([str(tmp_path / "absent")])
    with pytest.raises(TypeError, match="list of files"):
        nnx.train_bpe(str(path))
    with pytest.raises(ValueError, match="vocab_size"):
        nnx.train_bpe(texts=["a"], vocab_size=0)
