"""Text as a file of token ids: written once, then read in place, whatever its size.

Beside the file ``corpus.tokens`` lies ``corpus.tokens.json``, which says what the
file holds and from what it was made, with digests. The ids are little-endian
``uint16`` (``uint32`` for a vocabulary beyond 65,536); behind them lie the first
positions of all documents, ``uint64``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nnx.lm.tokenizer_record import tokenizer_digest
from nnx.params import NNTokenizerParams
from nnx.utils import validation as check
from nnx.utils.files import atomic_write

FORMAT = "nnx.lm.tokens/1"
DOCUMENTS = ("file", "line")
_SUFFIXES = (".txt", ".md", ".rst", ".text")
_PIECE = 1 << 16  # characters that are encoded as one text
_BATCH = 64  # texts that the tokenizer is given at once
_ALIGN = 8

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file; the arrays are read from the disk when they are used.

    ``tokens`` (N,) are the ids of all documents one after the other, ``starts`` (M,)
    the position of each document's first token. ``n_bytes`` is the size of the text in
    UTF-8, ``digest`` and ``tokenizer`` are ``sha256:`` digests of the file and of the
    tokenizer that wrote it.
    """

    path: str
    tokens: np.ndarray
    starts: np.ndarray
    n_bytes: int
    eos_id: int | None
    vocab_size: int
    tokenizer: str
    sources: str
    digest: str

    def __len__(self) -> int:
        return len(self.tokens)

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, its end token included."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[int(self.starts[index]) : int(end)]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: what turns a loss per token into one per byte."""
        return self.n_bytes / max(len(self.tokens), 1)

    @staticmethod
    def open(path: StrPath, tokenizer: NNTokenizerParams | None = None) -> TokenFile:
        """Open a token file, and refuse one that ``tokenizer`` did not write.

        Raises ``FileNotFoundError`` where there is none and ``ValueError`` for a file
        of another kind or size. The content is checked by :meth:`verify` alone.
        """
        name, about = os.fspath(path), _read_about(path)
        n, documents = about["tokens"], about["documents"]
        dtype = np.dtype(about["dtype"])
        end = _padded(n * dtype.itemsize)
        size = os.path.getsize(name)
        if size != end + 8 * documents:
            raise ValueError(
                f"{name} has {size} bytes and its description says {end + 8 * documents}: it is "
                "damaged or of another corpus. Write it again"
            )
        if tokenizer is not None and tokenizer_digest(tokenizer) != about["tokenizer"]:
            raise ValueError(
                f"{name} was written by another tokenizer ({about['tokenizer'][:19]}) than "
                f"{tokenizer.path!r} ({tokenizer_digest(tokenizer)[:19]}); write it again with "
                "this one"
            )
        return TokenFile(
            path=name,
            tokens=_mapped(name, dtype, 0, n),
            starts=_mapped(name, np.dtype("<u8"), end, documents),
            n_bytes=about["bytes"],
            **{k: about[k] for k in ("eos_id", "vocab_size", "tokenizer", "sources", "digest")},
        )

    def verify(self) -> None:
        """Read the whole file and compare it with its digest; ``ValueError`` if it differs."""
        digest = hashlib.sha256()
        with open(self.path, "rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        if f"sha256:{digest.hexdigest()}" != self.digest:
            raise ValueError(f"{self.path} is not what was written: its digest differs")


def write_tokens(
    sources: Iterable[StrPath],
    tokenizer: NNTokenizerParams,
    path: StrPath,
    *,
    documents: str = "file",
    eos_id: int | None = None,
) -> TokenFile:
    """Encode text files into the token file ``path``, and open it.

    Args:
        sources: UTF-8 text files, and folders, of which all ``.txt``, ``.md``, ``.rst``
            and ``.text`` files below are read in the order of their names.
        documents: a document is a whole ``"file"`` or each ``"line"`` that is not blank.
        eos_id: a token that is written after every document.

    An existing file of the same sources (names, sizes, times), tokenizer and options
    is opened as it is; of others it is refused. Memory does not grow with the corpus.
    Long documents are encoded in pieces that end at a line end.
    """
    owner = "write_tokens"
    check.choice(owner, "documents", documents, DOCUMENTS)
    if eos_id is not None:
        eos_id = check.count(owner, "eos_id", eos_id, at_least=0)
        if eos_id >= tokenizer.vocab_size:
            check.refuse(
                owner, "eos_id", eos_id, f"below the {tokenizer.vocab_size} tokens there are"
            )
    files = text_files(sources)
    wanted = _sources_digest(files, documents, eos_id)
    if os.path.exists(_about_path(path)):
        found = TokenFile.open(path, tokenizer)
        if found.sources != wanted:
            raise ValueError(
                f"{os.fspath(path)} holds another corpus (other files, changed files or other "
                "options). Remove it, choose another path, or use it as it is with TokenFile.open"
            )
        return found
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writer = _Writer(dtype)
    with atomic_write(path, "wb") as stream:
        writer.stream = stream
        for ids, starts in _encoded(files, tokenizer, documents, eos_id, writer):
            writer.put(ids, starts)
        if not writer.tokens:
            raise ValueError(f"write_tokens: the {len(files)} files hold no text")
        writer.finish()
    about = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokens": writer.tokens,
        "documents": len(writer.starts),
        "bytes": writer.n_bytes,
        "eos_id": eos_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": wanted,
        "digest": f"sha256:{writer.digest.hexdigest()}",
    }
    with atomic_write(_about_path(path)) as stream:
        json.dump(about, stream, indent=1)
    return TokenFile.open(path, tokenizer)


def text_files(sources: Iterable[StrPath]) -> list[Path]:
    """The text files of some files and folders; what cannot be read is refused."""
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(p for p in source.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
            if not inside:
                raise ValueError(f"{source} has no text files ({', '.join(_SUFFIXES)})")
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise FileNotFoundError(f"there is no file or folder {str(source)!r}")
    if not found:
        raise ValueError("there are no text files to read")
    return found


class _Writer:
    """The token file while it is written: ids to the stream, starts of documents kept."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.stream: Any = None
        self.digest = hashlib.sha256()
        self.tokens = self.n_bytes = 0
        self.starts: list[int] = []

    def put(self, ids: Sequence[int], is_start: bool) -> None:
        if is_start:
            self.starts.append(self.tokens)
        self._write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)

    def finish(self) -> None:
        size = self.tokens * self.dtype.itemsize
        self._write(bytes(_padded(size) - size))
        self._write(np.asarray(self.starts, dtype="<u8").tobytes())

    def _write(self, data: bytes) -> None:
        self.digest.update(data)
        self.stream.write(data)


def _encoded(
    files: Sequence[Path],
    tokenizer: NNTokenizerParams,
    documents: str,
    eos_id: int | None,
    writer: _Writer,
) -> Iterator[tuple[Sequence[int], bool]]:
    """The ids of every piece and whether a document begins with it."""
    live: Any = tokenizer.tokenizer
    encode = getattr(live, "encode_batch_fast", live.encode_batch)
    end = [] if eos_id is None else [eos_id]
    begins = True
    for batch in _batched(_pieces(files, documents)):
        writer.n_bytes += sum(len(text.encode()) for text, _ in batch)
        encodings = encode([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, last) in zip(encodings, batch):
            ids = encoding.ids + end if last else encoding.ids
            if ids:
                yield ids, begins
                begins = last
            elif last:
                begins = True


def _pieces(files: Sequence[Path], documents: str) -> Iterator[tuple[str, bool]]:
    """Texts to encode, each with whether its document ends with it."""
    for path in files:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(open(path, encoding="utf-8", newline=""))
            try:
                if documents == "line":
                    for line in stream:
                        if line.strip():
                            yield line.rstrip("\r\n"), True
                    continue
                piece = stream.read(_PIECE)
                while piece:
                    rest = stream.readline()  # up to the end of a line
                    following = stream.read(_PIECE)
                    yield piece + rest, not following
                    piece = following
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _batched(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size > _BATCH * _PIECE or len(batch) >= _BATCH * 64:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _sources_digest(files: Sequence[Path], documents: str, eos_id: int | None) -> str:
    stats = [(p.as_posix(), (s := p.stat()).st_size, s.st_mtime_ns) for p in files]
    content = json.dumps([stats, documents, eos_id])
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def _about_path(path: StrPath) -> str:
    return f"{os.fspath(path)}.json"


def _read_about(path: StrPath) -> dict[str, Any]:
    where = _about_path(path)
    if not os.path.isfile(where):
        raise FileNotFoundError(
            f"there is no token file {os.fspath(path)!r} (no description {where!r}); write one "
            "with nnx.lm.write_tokens"
        )
    try:
        about = json.loads(Path(where).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{where} does not describe a token file of NNx ({FORMAT})")
    return about


def _mapped(path: str, dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
