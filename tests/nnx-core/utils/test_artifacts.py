"""Artifacts are their documents: exact, digested, old or new on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from nnx.utils.artifacts import JsonArtifact


class WeightError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Weight(JsonArtifact):
    value: float
    note: str | None = None
    FORMAT: ClassVar[str] = "test.weight/1"
    _error: ClassVar[type[ValueError]] = WeightError

    def state(self) -> dict[str, Any]:
        return {"format": self.FORMAT, "kind": "w", "value": self.value, "note": self.note}

    @classmethod
    def from_state(cls, state: Any) -> Weight:
        return cls(**cls._open(state, {"value": True, "note": False}, kind="w"))


def test_a_document_is_exact_and_its_digest_is_of_one_spelling(tmp_path) -> None:
    weight = Weight(0.1 + 0.2, "é")
    weight.save(tmp_path / "w.json")
    assert Weight.load(tmp_path / "w.json") == weight
    assert weight.canonical_bytes() == (
        '{"format":"test.weight/1","kind":"w","note":"é","value":0.30000000000000004}'.encode()
    )
    assert weight.digest() == Weight.from_json(weight.to_json()).digest()
    assert weight.digest().startswith("sha256:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ('{"value": NaN}', "NaN is no JSON number"),
        ("[]", "not a test.weight/1 document"),
        ('{"format": "other/1"}', "format: 'other/1'"),
        ('{"format": "test.weight/1", "kind": "v"}', "of kind 'v'"),
        ('{"format": "test.weight/1", "kind": "w"}', "lacks 'value'"),
        ('{"format": "test.weight/1", "kind": "w", "value": 1, "x": 2}', "unknown key 'x'"),
    ],
)
def test_what_is_no_such_document_is_refused_by_name(tmp_path, text, message) -> None:
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(WeightError, match=message) as caught:
        Weight.load(tmp_path / "w.json")
    assert str(tmp_path / "w.json") in str(caught.value)


def test_a_value_that_json_lacks_never_replaces_a_file(tmp_path) -> None:
    Weight(1.0).save(tmp_path / "w.json")
    with pytest.raises(ValueError, match="JSON"):
        Weight(float("nan")).save(tmp_path / "w.json")
    assert Weight.load(tmp_path / "w.json") == Weight(1.0)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightError, match="JSON text"):
        Weight.load(tmp_path / "b.json")
