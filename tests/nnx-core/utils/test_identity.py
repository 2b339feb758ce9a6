"""A name of data says whether it was declared or computed."""

from __future__ import annotations

import hashlib

import pytest
from nnx.utils.identity import IdentityRef, hash_bytes, hash_file


def test_a_digest_is_computed_from_the_bytes(tmp_path):
    data = b"abc" * 1000
    (tmp_path / "rows.csv").write_bytes(data)
    expected = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert hash_bytes(data) == IdentityRef("digest", expected)
    assert hash_file(tmp_path / "rows.csv", chunk_size=7) == hash_bytes(data)
    assert hash_bytes(data).verified


def test_a_declared_name_is_never_verified():
    assert IdentityRef.of("v1") == IdentityRef.declared("v1")
    assert not IdentityRef.declared("v1").verified
    assert IdentityRef.of(None) == IdentityRef.unknown()


@pytest.mark.parametrize("ref", [IdentityRef.unknown(), IdentityRef.declared("a"), hash_bytes(b"")])
def test_it_round_trips_through_its_state(ref):
    assert IdentityRef.from_state(ref.state()) == ref
    assert IdentityRef.of(ref) is ref


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("other", "x", "declared, digest, unknown"),
        ("unknown", "x", "no value"),
        ("declared", "", "non-empty"),
        ("digest", None, "non-empty"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, value, message):
    with pytest.raises(ValueError, match=message):
        IdentityRef(kind, value)


def test_only_a_string_or_a_reference_is_an_identity():
    with pytest.raises(TypeError, match="int"):
        IdentityRef.of(3)
