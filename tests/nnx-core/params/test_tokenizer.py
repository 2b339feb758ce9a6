"""A tokenizer is stored as the path to its file."""

from __future__ import annotations

import re
import sys

import pytest
from nnx import NNTokenizerParams
from nnx.plugins.siblings import install_line


@pytest.fixture
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_a_tokenizer_is_written_and_read_back(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = NNTokenizerParams.of(tokenizer, "runs/tok.json")
    assert params.state() == {"path": "runs/tok.json"}
    again = NNTokenizerParams.from_state(params.state())
    assert again.vocab_size == 3
    assert again.encode("b a c") == params.encode("b a c") == [1, 0, 2]
    assert again.decode([1, 0]) == "b a"
    assert "Tokenizer object" not in repr(params)


def test_a_missing_file_and_a_missing_key_are_named(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        NNTokenizerParams.from_state({"path": str(tmp_path / "nowhere.json")})
    with pytest.raises(ValueError, match="path must be a non-empty string, not None"):
        NNTokenizerParams.from_state({})


def test_without_the_library_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=re.escape(install_line("nnx-lm"))):
        NNTokenizerParams.from_state({"path": "tok.json"})
