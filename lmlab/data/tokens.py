"""Token files: one split of a corpus as ids on disk, memory-mapped, with a header that is checked when it is opened.

    [ header, 1024 bytes: magic, version, JSON and its digest | tokens, uint16 or uint32 | document starts, int64 ]

Each document is the tokenizer's start (a BOS of its own, else end-of-text) followed by its ids, so that every byte of
the corpus is a target exactly once. A file is written beside its name, fsynced and renamed: under its name it is either
whole or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmlab.errors import DataError

if TYPE_CHECKING:
    from lmlab.data.batches import Batch

MAGIC, VERSION, HEADER_BYTES = b"LMLABTOK", 1, 1024
PREFIX = struct.Struct("<8sII16s")  # magic, version, length of the JSON, its blake2b digest
ALWAYS_VERIFIED_BYTES = 64 << 20  # larger files are verified once and then remembered by size and time (see _verify)
CHUNK = 1 << 22


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds ids 0 … vocab_size−1: 65,536 ids fit uint16, 70,000 do not."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def raw(array: np.ndarray) -> memoryview:
    """The array's bytes, for hashing and writing."""
    return np.ascontiguousarray(array).data


def damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"token file `{path}` is damaged: {why}", f"delete {path.parent} or run `lmlab data prepare --force`"
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (disk full, quota, no permission) under `path` into two lines for the user."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space" if full else "make it writable"
        raise DataError(
            f"can't write `{path}`: {os.strerror(e.errno or 0)}", f"{hint}, or set paths.cache / $LMLAB_CACHE elsewhere"
        ) from e


@dataclass(frozen=True)
class TokenFile:
    """One split, read-only. `tokens` (N,) and `doc_starts` (documents,) are memory-mapped.

    raw_bytes: UTF-8 bytes of the documents; content_hash: over type, ids and document starts, whatever the file's name.
    """

    path: Path
    tokens: np.ndarray
    doc_starts: np.ndarray
    n_tokens: int
    raw_bytes: int
    vocab_size: int
    tokenizer_hash: str
    content_hash: str

    @property
    def n_docs(self) -> int:
        return len(self.doc_starts)

    @property
    def n_targets(self) -> int:
        return self.n_tokens - 1

    def batches(
        self, *, rows: int, seq_len: int, packing: str, start: int, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        """Non-overlapping windows in the order of the file (lmlab/data/batches.py)."""
        from lmlab.data.batches import eval_batches  # here: whoever only opens a file needs no torch

        return eval_batches(self, rows=rows, seq_len=seq_len, packing=packing, start=start, max_tokens=max_tokens)

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Map `path`. Raises DataError when it is missing, cut short, or differs from its checksum."""
        header = _read_header(path)
        dtype, n_tokens, n_docs = np.dtype(header["dtype"]), header["n_tokens"], header["n_docs"]
        expected = HEADER_BYTES + n_tokens * dtype.itemsize + n_docs * 8
        size = path.stat().st_size
        if size != expected:
            raise damaged(path, f"it has {size:,} bytes, its header says {expected:,}")
        if n_tokens == 0:
            raise damaged(path, "it holds no token")
        tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (n_tokens,))
        starts = np.memmap(path, "<i8", "r", HEADER_BYTES + n_tokens * dtype.itemsize, (n_docs,))
        found = cls(
            path, tokens, starts, n_tokens, header["raw_bytes"], header["vocab_size"], header["tokenizer_hash"],
            header["content_hash"],
        )  # fmt: skip
        _verify(found)
        return found

    @classmethod
    def write(
        cls,
        path: Path,
        docs: Iterable[tuple[np.ndarray | list[int], int]],
        *,
        vocab_size: int,
        start: int,
        tokenizer_hash: str,
    ) -> TokenFile:
        """Write documents given as (ids without the start, their UTF-8 bytes), and open the result."""
        with TokenWriter(path, vocab_size=vocab_size, start=start, tokenizer_hash=tokenizer_hash) as writer:
            for ids, n_bytes in docs:
                writer.add(np.asarray(ids, dtype=np.int64), n_bytes)
        return cls.open(path)


class TokenWriter:
    """Writes a token file document by document. Used as a context: leaving it normally puts the file in place."""

    def __init__(self, path: Path, *, vocab_size: int, start: int, tokenizer_hash: str) -> None:
        self.path, self.vocab_size, self.start, self.tokenizer_hash = path, vocab_size, start, tokenizer_hash
        self.n_tokens = self.raw_bytes = 0
        self.doc_starts: list[int] = []
        self._dtype = dtype_for(vocab_size)
        self._hash = hashlib.blake2b(self._dtype.str.encode(), digest_size=16)
        self._beside = path.with_name(f".{path.name}.{os.getpid()}")
        with writing(path):
            self._file = self._beside.open("wb")
            self._file.write(bytes(HEADER_BYTES))

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        """Append the start of a document and `ids`. Raises DataError when an id is outside the vocabulary."""
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"id {bad} is outside the vocabulary of {self.vocab_size} ids (`{self.path}`)",
                "the tokenizer's tokenizer.json and its added tokens disagree",
            )
        block = np.empty(len(ids) + 1, self._dtype)
        block[0], block[1:] = self.start, ids
        self.doc_starts.append(self.n_tokens)
        self.n_tokens += len(block)
        self.raw_bytes += n_bytes
        self._hash.update(raw(block))
        with writing(self.path):
            self._file.write(raw(block))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with writing(self.path):
                    self._finish()
        finally:
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                self._file.close()
            self._beside.unlink(missing_ok=True)

    def _finish(self) -> None:
        starts = np.asarray(self.doc_starts, dtype="<i8")
        self._hash.update(raw(starts))
        self._file.write(raw(starts))
        self._file.seek(0)
        self._file.write(_header(self, self._hash.hexdigest()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._beside, self.path)


def _header(writer: TokenWriter, content_hash: str) -> bytes:
    fields = {
        "dtype": writer._dtype.str,
        "vocab_size": writer.vocab_size,
        "tokenizer_hash": writer.tokenizer_hash,
        "n_tokens": writer.n_tokens,
        "n_docs": len(writer.doc_starts),
        "raw_bytes": writer.raw_bytes,
        "content_hash": content_hash,
    }
    text = json.dumps(fields).encode()
    packed = PREFIX.pack(MAGIC, VERSION, len(text), hashlib.blake2b(text, digest_size=16).digest()) + text
    return packed.ljust(HEADER_BYTES, b"\0")


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as f:
            raw = f.read(HEADER_BYTES)
    except OSError as e:
        raise damaged(path, os.strerror(e.errno or 0).lower()) from e
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise damaged(path, "it is not a token file")
    _, version, length, digest = PREFIX.unpack_from(raw)
    if version != VERSION:
        raise damaged(path, f"its format is version {version}, this lmlab reads {VERSION}")
    text = raw[PREFIX.size : PREFIX.size + length]
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise damaged(path, "its header differs from its checksum")
    header: dict[str, Any] = json.loads(text)
    return header


def _verify(file: TokenFile) -> None:
    """Ids and checksum. A file over 64 MiB is read in full only until that succeeded once: `<name>.verified` beside it
    then keeps size, time and hash, and a file that still has these is believed."""
    stat, stamp = file.path.stat(), file.path.with_name(file.path.name + ".verified")
    seen = f"{stat.st_size} {stat.st_mtime_ns} {file.content_hash}"
    large = stat.st_size > ALWAYS_VERIFIED_BYTES
    if large and stamp.exists() and stamp.read_text() == seen:
        return
    digest, largest = hashlib.blake2b(file.tokens.dtype.str.encode(), digest_size=16), 0
    for i in range(0, file.n_tokens, CHUNK):
        part = file.tokens[i : i + CHUNK]
        digest.update(raw(part))
        largest = max(largest, int(part.max()))
    digest.update(raw(file.doc_starts))
    if largest >= file.vocab_size:
        raise damaged(file.path, f"id {largest} is outside its vocabulary of {file.vocab_size} ids")
    if digest.hexdigest() != file.content_hash:
        raise damaged(file.path, "its content differs from its checksum")
    if large:
        with contextlib.suppress(OSError):  # a read-only cache is verified each time
            stamp.write_text(seen)
