"""Every value that training saves comes back as it was."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx.bundles.encoding import decode, encode, references
from nnx.bundles.errors import BundleIntegrityError
from nnx.utils.strict import parse_json
from nnx.utils.tensor_file import DTYPES, chunks, header_bytes, read_header, tensors_in

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(st.integers(), inner, min_size=1, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_a_value_comes_back(value):
    text = json.dumps(encode(value, "value", {}), allow_nan=False).encode()
    found = decode(parse_json(text, "value"), "value")
    assert found == value
    assert repr(found) == repr(value)  # 1 is not 1.0, and -0.0 not 0.0


def test_tensors_are_named_in_order_and_nan_is_spelled():
    tensors = {}
    value = {"a": torch.ones(2), "b": [torch.zeros(3), math.nan], 1: 2} | {}
    value.pop(1)
    encoded = encode(value, "value", tensors)
    assert list(tensors) == ["t0", "t1"]
    assert encoded["$dict"]["b"] == [{"$tensor": "t1"}, {"$float": "nan"}]
    assert sorted(references(decode(encoded, "value"))) == ["t0", "t1"]
    assert torch.equal(decode(encoded, "value", tensors.__getitem__)["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": {1, 2}}, r"value\['a'\] holds a builtins.set"),
        ({"a": {(1, 2): 3}}, "keys of tuple"),
        ({1: 2, "b": 3}, "keys of int, str"),
        ([1j], "complex number"),
        ([torch.ones(2).to_sparse()], "only dense tensors"),
    ],
)
def test_what_is_no_data_is_named_by_its_path(value, said):
    with pytest.raises(TypeError, match=said):
        encode(value, "value", {})


@pytest.mark.parametrize(
    "value",
    [
        {"$dict": []}, {"$tuple": {}}, {"$float": "1.5"}, {"$intdict": [[1, 2], [1, 3]]},
        {"$intdict": [["a", 1]]}, {"$tensor": 1}, {}, {"$dict": {"$bytes": 1}},
    ],
)  # fmt: skip
def test_an_encoding_that_is_none_is_refused(value):
    with pytest.raises(BundleIntegrityError):
        decode(value, "value")


def test_a_file_of_every_dtype_is_what_the_safetensors_package_reads(tmp_path):
    from safetensors.torch import load_file

    tensors = {}
    for index, (name, _) in enumerate(DTYPES.values()):
        if hasattr(torch, name):
            plain = torch.arange(6).reshape(2, 3)
            tensors[f"x{index}"] = plain.to(getattr(torch, name))
    tensors["empty"], tensors["scalar"] = torch.empty(0, 3), torch.tensor(2.5)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(bytes(c) for c in chunks(tensors, {"a": "b"})))
    theirs = load_file(path)
    with open(path, "rb", buffering=0) as stream:
        header = read_header(stream, path)
        stream.seek(header.start)
        ours = tensors_in(header, bytearray(stream.read()))
    assert header.metadata == {"a": "b"}
    for name, tensor in tensors.items():
        for found in (theirs[name], ours[name]):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert found.reshape(-1).view(torch.uint8).tolist() == (
                tensor.reshape(-1).view(torch.uint8).tolist()
            )
    start, order = header_bytes(tensors, {})
    assert len(start) % 8 == 0
    assert order[0] in ("x12", "x13", "x14", "x15")  # the widest first, so that all are aligned
