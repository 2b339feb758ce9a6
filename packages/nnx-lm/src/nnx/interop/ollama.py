"""A GGUF file with the ``Modelfile`` that Ollama builds a model from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nnx.interop.gguf.writer import ARCHITECTURE, write_gguf
from nnx.lm.transformer import TransformerNN
from nnx.utils.files import atomic_write
from nnx.utils.folders import new_folders


def export_ollama_modelfile(
    transformer_nn: TransformerNN,
    tokenizer: Any,
    out_dir: str | os.PathLike[str],
    *,
    system: str = "",
    parameters: dict[str, Any] | None = None,
    template: str | None = None,
    quantization: str = "F16",
    model_name: str | None = None,
    architecture: str = ARCHITECTURE,
) -> str:
    """Write ``model.gguf`` and ``Modelfile`` into a folder; the Modelfile's absolute path.

    ``parameters`` become ``PARAMETER`` lines, one for each item of a list. ``system`` and
    ``template`` become blocks, which cannot hold three quotes or end with one. Ollama runs
    ``architecture="llama"`` alone; see :func:`~nnx.interop.write_gguf` for it, for
    ``quantization`` and ``model_name``, and for what is refused.
    """
    lines = ["FROM ./model.gguf"]
    for name, text in (("TEMPLATE", template), ("SYSTEM", system)):
        if text:
            lines.append(f'{name} """{_block(name, text)}"""')
    lines += _parameters(parameters or {})
    folder = os.path.abspath(os.fspath(out_dir))
    path = os.path.join(folder, "Modelfile")
    with new_folders(folder):
        write_gguf(
            transformer_nn, tokenizer, os.path.join(folder, "model.gguf"),
            architecture=architecture, quantization=quantization, model_name=model_name,
        )  # fmt: skip
        with atomic_write(path) as stream:
            stream.write("\n".join(lines) + "\n")
    return path


def _block(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name.lower()} is text, not {type(text).__name__}")
    if '"""' in text or text.endswith('"'):
        raise ValueError(
            f"{name.lower()} cannot hold three double quotes or end with one, which close the "
            "block of a Modelfile"
        )
    return text


def _parameters(parameters: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in parameters.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"a parameter of a Modelfile has a plain name, not {key!r}")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            lines.append(f"PARAMETER {key} {_value(key, item)}")
    return lines


def _value(key: str, item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    text = str(item)
    if "\n" in text or '"' in text:
        raise ValueError(f"parameter {key}: {text!r} does not fit on a line of a Modelfile")
    return (
        f'"{text}"'
        if isinstance(item, str) and (not text or text != text.strip() or " " in text)
        else text
    )
