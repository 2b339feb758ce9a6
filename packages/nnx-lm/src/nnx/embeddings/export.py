"""Embeddings as a FAISS index, and a backbone's weights as safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nnx.embeddings.encoding import checked_texts, embed_texts
from nnx.plugins.siblings import install_line
from nnx.utils import validation as check
from nnx.utils.files import atomic_write

INDEX_TYPES = ("IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat")
_HNSW_LINKS = 32

Path = str | os.PathLike[str]


def export_to_faiss(
    backbone: Any,
    corpus: list[str],
    out_path: Path,
    *,
    batch_size: int = 64,
    index_type: str = "IndexFlatIP",
    normalize: bool | None = None,
    device: str | torch.device | None = None,
    ids: Sequence[int] | None = None,
) -> str:
    """Embed ``corpus`` and write a FAISS index; return the path.

    ``normalize`` scales the embeddings to length 1, which makes the inner product of
    ``"IndexFlatIP"`` the cosine; ``None`` does so for that index alone. A search
    returns positions in ``corpus``, or the entry of ``ids`` (distinct integers >= 0).
    The folder must exist; the file is the old one or the whole new one.

    Raises ``ValueError`` for an empty corpus or an unknown index type, ``ImportError``
    without faiss.
    """
    owner = "export_to_faiss"
    check.choice(owner, "index_type", index_type, INDEX_TYPES)
    texts = checked_texts(owner, corpus)
    if not texts:
        raise ValueError("export_to_faiss: the corpus is empty, and an index of nothing finds none")
    numbers = None if ids is None else _checked_ids(ids, len(texts))
    folder = os.path.dirname(os.path.abspath(out_path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"export_to_faiss: the folder {folder!r} does not exist")
    faiss = _faiss()
    unit = index_type == "IndexFlatIP" if normalize is None else normalize
    vectors = _as_array(
        embed_texts(backbone, texts, batch_size=batch_size, device=device, normalize=unit)
    )
    width = vectors.shape[1]
    index = getattr(faiss, index_type)(
        *((width, _HNSW_LINKS) if index_type == "IndexHNSWFlat" else (width,))
    )
    if numbers is None:
        index.add(vectors)
    else:
        index = faiss.IndexIDMap2(index)
        index.add_with_ids(vectors, numbers)
    with atomic_write(out_path, "wb") as stream:
        stream.write(faiss.serialize_index(index).tobytes())
    return os.fspath(out_path)


def search_faiss(
    backbone: Any,
    index_path: Path,
    queries: list[str],
    *,
    k: int = 5,
    batch_size: int = 64,
    normalize: bool | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ids, each (len(queries), k), of the nearest entries of an index.

    ``normalize`` as in :func:`export_to_faiss`; ``None`` normalizes for an index of
    inner products. Scores are cosines (greater is nearer) or squared distances. Fewer
    than ``k`` entries leave the id -1 behind.
    """
    k = check.count("search_faiss", "k", k)
    faiss = _faiss()
    index = faiss.read_index(os.fspath(index_path))
    unit = index.metric_type == faiss.METRIC_INNER_PRODUCT if normalize is None else normalize
    texts = checked_texts("search_faiss", queries)
    if not texts:
        return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
    vectors = _as_array(embed_texts(backbone, texts, batch_size=batch_size, normalize=unit))
    if vectors.shape[1] != index.d:
        raise ValueError(
            f"{os.fspath(index_path)} holds embeddings of width {index.d} and the backbone gives "
            f"{vectors.shape[1]}: it was made with another backbone"
        )
    scores, found = index.search(vectors, k)
    return scores, found


def export_to_safetensors(backbone: Any, out_path: Path) -> str:
    """Write the tensors of ``backbone.state_dict()`` (or of a mapping); return the path.

    Tensors that share memory, as tied embeddings do, are each written in full, so
    that ``load_state_dict`` takes every name back. Raises ``TypeError`` for an entry
    that is no tensor.
    """
    from safetensors.torch import save

    state = backbone if isinstance(backbone, Mapping) else backbone.state_dict()
    tensors, seen = {}, set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"export_to_safetensors: {name} is a {type(value).__name__}, and safetensors "
                "hold tensors alone"
            )
        tensor = value.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    payload = save(tensors)
    with atomic_write(out_path, "wb") as stream:
        stream.write(payload)
    return os.fspath(out_path)


def _as_array(vectors: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(vectors.float().cpu().numpy())


def _checked_ids(ids: Sequence[int], count: int) -> np.ndarray:
    numbers = [check.count("export_to_faiss", "ids", i, at_least=0) for i in ids]
    if len(numbers) != count or len(set(numbers)) != count:
        raise ValueError(
            f"export_to_faiss.ids must be {count} distinct integers, one per text, not "
            f"{len(numbers)} of which {len(set(numbers))} differ"
        )
    return np.asarray(numbers, dtype=np.int64)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            f"a FAISS index needs faiss: {install_line('nnx-lm', 'faiss')}"
        ) from error
    return faiss
