"""A data file is one of torch's own, whoever wrote it."""

from __future__ import annotations

import io
import math
import pickletools
import sys
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx.store.archive import Archive


def written(value) -> bytes:
    archive = Archive.of(value)
    assert archive is not None
    stream = io.BytesIO()
    archive.write(stream)
    return stream.getvalue()


def read(data: bytes, **options):
    return torch.load(io.BytesIO(data), weights_only=True, **options)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b) and a.dtype is b.dtype and a.shape == b.shape
            and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
            and torch.equal(a, b) and not b.requires_grad
        )  # fmt: skip
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back_as_they_were(value):
    assert same(value, read(written(value)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_a_tensor_of_every_type_comes_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert same({"t": tensor}, read(written({"t": tensor})))


def test_views_keep_their_layout_and_share_their_storage_again():
    base = torch.arange(24.0).reshape(4, 6)
    value = [base, base.t(), base[1:, ::2], base.expand(2, 4, 6), base[0]]
    back = read(written(value))
    assert all(map(same, value, back))
    back[0][0, 0] = -1.0
    assert back[1][0, 0] == back[4][0] == -1.0


def test_repeated_texts_and_tuples_of_any_length_come_back():
    value = {"a": "x", "b": ["x", "x", ("x",) * 300, "é" * 300, ""], "x": (), "c": (1, 2, "x")}
    assert same(value, read(written(value)))


def test_the_file_is_laid_out_like_one_of_torch():
    value = {"weights": {"a": torch.ones(3), "b": torch.zeros(2, 2)}, "epoch": 3}
    other = io.BytesIO()
    torch.save(value, other)
    ours, theirs = (zipfile.ZipFile(io.BytesIO(d)) for d in (written(value), other.getvalue()))
    assert ours.testzip() is None
    wanted = {"data.pkl", "byteorder", "data/0", "data/1", "version"}
    names = {name.partition("/")[2] for name in ours.namelist()}
    assert wanted <= names <= {name.partition("/")[2] for name in theirs.namelist()}
    pickletools.dis(ours.read("archive/data.pkl"), io.StringIO())
    assert ours.read("archive/byteorder").decode() == sys.byteorder
    assert ours.read("archive/data/0") == torch.ones(3).numpy().tobytes()


def test_a_file_can_be_mapped_into_memory(tmp_path):
    value = {"a": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.int64)}
    (tmp_path / "x.pt").write_bytes(written(value))
    assert same(value, torch.load(tmp_path / "x.pt", weights_only=True, mmap=True))


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).as_subclass(Sub),
        torch.ones(2, dtype=torch.complex64).conj(), {1, 2}, b"bytes", range(3), 1j,
        [torch.ones(4), torch.ones(4).to(torch.float8_e4m3fn)],
        (lambda t: [t, t.view(torch.int32)])(torch.ones(4)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_only_torch_can_save_is_left_to_it(value):
    assert Archive.of({"inside": [value]}) is None
