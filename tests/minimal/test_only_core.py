"""Only nnx-core and what it declares: it imports, and what is optional refuses."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import nnx
import pytest
from nnx.plugins import siblings

OPTIONAL = (
    "pandas", "sklearn", "tensorboard", "wandb", "torchdata", "torch_geometric", "tokenizers",
    "huggingface_hub", "plotly", "captum", "torchinfo", "torchao", "optuna", "gguf", "faiss",
    "onnx", "peft", "transformers",
)  # fmt: skip


@pytest.mark.parametrize("library", OPTIONAL)
def test_nothing_optional_is_installed(library: str) -> None:
    assert importlib.util.find_spec(library) is None


def test_every_module_of_core_imports() -> None:
    found = [m.name for m in pkgutil.walk_packages(nnx.__path__, "nnx.")]
    assert "nnx.cli.app" in found
    for name in found:
        if name != "nnx.__main__":
            importlib.import_module(name)


def test_every_public_name_of_core_is_there() -> None:
    for name in nnx.__all__:
        assert getattr(nnx, name) is not None


@pytest.mark.parametrize("distribution", siblings.MODULES)
def test_every_name_of_an_extension_refuses_with_its_install_line(distribution: str) -> None:
    line = siblings.install_line(distribution)
    for name in (*siblings.PUBLIC_NAMES[distribution], *siblings.MODULES[distribution]):
        with pytest.raises(ImportError) as raised:
            getattr(nnx, name)
        assert line in str(raised.value)
