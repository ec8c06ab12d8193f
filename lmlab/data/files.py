"""`data=text`: your own .txt, .jsonl and .parquet files, streamed, with errors that name file, line or byte.

A .txt file is one document, byte for byte; .jsonl and .parquet hold one a record, in the field `data.field`.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmlab.data.corpora import Document, split_documents
from lmlab.data.spec import TextFiles as TextFilesSpec
from lmlab.errors import DataError, listed, nearest


class TextFiles:
    """Files, folders (every known file below) and globs (`**` descends, `~` is home), sorted, without doubles."""

    def __init__(self, spec: TextFilesSpec) -> None:
        self.spec = spec
        self.files, self.skipped = find_files(spec.files)

    def documents(self) -> Iterator[Document]:
        texts = (text for path in self.files for text in READERS[path.suffix.lower()](path, self.spec.field))
        yield from split_documents(texts, self.spec.val_frac, self.spec.test_frac)

    def fingerprint(self) -> str:
        return content_hash(self.files)

    def info(self) -> dict[str, Any]:
        return {
            "corpus": "text",
            "version": None,
            "source_hash": self.fingerprint(),
            "files": len(self.files),
            "skipped": self.skipped,
        }

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def find_files(patterns: list[str]) -> tuple[list[Path], int]:
    """The files that `patterns` name, and how many files of other kinds lie in folders among them.

    Raises DataError when a pattern finds nothing, or names a file whose extension has no reader.
    """
    if not patterns:
        raise DataError("`data.files` is empty", "name files, folders or globs: data.files=[texts/*.txt]")
    found: dict[Path, None] = {}
    skipped = 0
    for pattern in patterns:
        known, others = _matches(pattern)
        if not known:
            raise DataError(f"`data.files` entry `{pattern}` matches no file", _nothing(pattern))
        skipped += others
        for path in known:
            if path.suffix.lower() not in READERS:
                raise DataError(
                    f"`data.files`: no reader for {path} (extension `{path.suffix}`; known: {listed(READERS)})",
                    "convert it, or name other files",
                )
            found[path.absolute()] = None
    return sorted(found), skipped


def _matches(pattern: str) -> tuple[list[Path], int]:
    """What `pattern` names. Of a folder: every file below that has a reader, and how many others there are."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        below = [p for p in path.rglob("*") if p.is_file()]
        known = [p for p in below if p.suffix.lower() in READERS]
        return known, len(below) - len(known)
    if path.is_file():
        return [path], 0
    return [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()], 0


def _nothing(pattern: str) -> str:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return f"it has no {listed(READERS)} file; name a folder that has some"
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    guess = nearest(path.name, beside)
    return f"did you mean {path.with_name(guess)}?" if guess else f"relative names start at {Path.cwd()}"


def content_hash(files: list[Path]) -> str:
    """Over contents, kinds and order; not over names or folders, so that a moved corpus is found again."""
    digest = hashlib.sha256()
    for path in files:
        with reading(path), path.open("rb") as f:
            digest.update(f"{path.suffix.lower()}\0{path.stat().st_size}\0".encode())
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


class reading:
    """Turn a failed read of `path` into two lines for the user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise DataError(
                f"can't read {self.path}: {error.strerror}", "check that it is there and readable"
            ) from error


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        at = offset + e.start
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[e.start]:02x} at offset {at}",
            "convert it, e.g. with iconv -f latin1 -t utf-8",
        ) from e


def _read_txt(path: Path, field: str) -> Iterator[str]:
    with reading(path):
        raw = path.read_bytes()
    if not raw:
        raise _empty(path)
    yield _decode(raw, path, 0)


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    offset = n_records = 0
    with reading(path), path.open("rb") as f:
        for number, raw in enumerate(f, 1):
            line = _decode(raw, path, offset)
            offset += len(raw)
            if line.strip():
                n_records += 1
                yield text_of(_parse(line, f"{path}:{number}"), field, f"{path}:{number}")
    if not n_records:
        raise _empty(path)


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as e:
        raise DataError(f"{where}: invalid JSON: {e}", "a .jsonl file has one JSON object a line") from e


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    try:
        with reading(path), parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise missing_field(field, names, str(path))
            if not file.metadata.num_rows:
                raise _empty(path)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield text_of({field: value}, field, f"{path}, record {number}")
    except ArrowException as e:
        raise DataError(f"{path} is not a readable parquet file: {e}", "write it again, or name other files") from e


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def text_of(record: Any, field: str, where: str) -> str:
    """The text of a record. Raises DataError naming the fields there, or the type that is no text."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: the record is a {type(record).__name__}, not an object", "one JSON object a line")
    if field not in record:
        raise missing_field(field, list(record), where)
    value = record[field]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise DataError(
            f"{where}: field `{field}` is {kind}, not text", "set data.field to a field of text, or drop the record"
        )
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise DataError(
            f"{where}: field `{field}` holds the lone surrogate {value[e.start]!r}, which no UTF-8 text has",
            "drop the record, or write the character as a pair",
        ) from e
    return value


def missing_field(field: str, there: list[str], where: str) -> DataError:
    guess = nearest(field, there) or (there[0] if len(there) == 1 else None)
    hint = f"set data.field={guess}" if guess else "set data.field to one of these"
    return DataError(f"{where}: no field `{field}` (`data.field`); fields there: {listed(there, 20) or 'none'}", hint)


def _empty(path: Path) -> DataError:
    return DataError(f"{path} is empty", "remove it from data.files, or fill it")
